"""Events that :class:`splitserve.router.requests.core.RouterCore` handles. Its driver makes them from sockets, timers
and clients.

Questions and requests share one space of ids: both may have to wait for a worker, and a client cancels both alike.
"""

from enum import StrEnum
from typing import TypeAlias

import msgspec

from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.requests import DecodeRequest, LocalRequest, PrefillRequest
from splitserve.protocol.messages.routers import RouterReport, SentPrefixes
from splitserve.protocol.request import Party, RequestKey
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.queue.tenants import Tenants


class TimerKind(StrEnum):
    DEADLINE = "deadline"  # of a request that has begun
    RETRY = "retry"  # searches again for a worker that can continue after a failed attempt
    QUEUE = "queue"  # ends the wait of a request for its turn
    TRY = "try"  # tries further requests of the queue
    FREEZE = "freeze"  # tells workers again whether they are frozen
    CACHE_RESET = "cache_reset"  # resets the prefix caches again
    REPORT = "report"  # tells other routers the state of this one
    WAIT = "wait"  # ends the wait of a new request, or of a question, for a worker


class Timer(msgspec.Struct, frozen=True, gc=False):
    """The identity of a timer: at most one of a kind per request."""

    kind: TimerKind
    request_id: str


class PauseMode(StrEnum):
    """The fate of the requests that run when a pause begins. New ones wait in each mode."""

    ABORT = "abort"  # they end with an error
    WAIT = "wait"  # they finish
    KEEP = "keep"  # they are frozen with their KV, and continue after the pause


class AskLimits(msgspec.Struct, frozen=True, gc=False):
    """A question for the bounds of a prompt that is about to be prepared; answered by TellLimits or Refuse."""

    question_id: str
    arrived_at: float
    num_bytes: int = 0  # size of the body from which the prompt will be prepared


class Submit(msgspec.Struct, frozen=True):
    """A new request, ready to run; answered by Begun or Refuse. The core owns it from now on."""

    request: ActiveRequest


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """Cancellation of a request whose client is gone or has its whole answer; harmless after the end."""

    request_id: str


class StopStringReached(msgspec.Struct, frozen=True, gc=False):
    """Completion of the output's text, though workers may still compute tokens; harmless after the end."""

    request_id: str


class FromWorker(msgspec.Struct, frozen=True, gc=False):
    """A message over a worker's link."""

    sender: Party
    body: Body


class NotSent(msgspec.Struct, frozen=True, gc=False):
    """A message that a worker's link didn't take: the link is full, or down."""

    to: Party
    body: Body

    @property
    def attempts(self) -> tuple[RequestKey, ...]:
        """The attempts that the message would have begun."""
        body = self.body
        return (body.key, *body.siblings) if isinstance(body, PrefillRequest | DecodeRequest | LocalRequest) else ()


class WorkerReady(msgspec.Struct, frozen=True, gc=False):
    """A worker whose link is up, for the first time or again."""

    worker: Party


class WorkerLost(msgspec.Struct, frozen=True, gc=False):
    """A worker that died, left, sent no heartbeats or was replaced; ``why`` continues a sentence after its name."""

    worker: Party
    why: str


class TimerFired(msgspec.Struct, frozen=True, gc=False):
    timer: Timer


class TenantsChanged(msgspec.Struct, frozen=True, gc=False):
    """The tenants from now on."""

    tenants: Tenants


class PauseRequests(msgspec.Struct, frozen=True, gc=False):
    """A pause, or another mode of the present one; harmless in a pause of this mode."""

    mode: PauseMode


class ResumeRequests(msgspec.Struct, frozen=True, gc=False):
    """The end of a pause; harmless without one."""


class ResetCaches(msgspec.Struct, frozen=True, gc=False):
    """A reset of all prefix caches, also of those that are being reset."""


class MeetRouters(msgspec.Struct, frozen=True, gc=False):
    """Start of the exchange with the other routers, or a new connection to the one with this name."""

    router: str = ""


class FromRouter(msgspec.Struct, frozen=True, gc=False):
    """A message of another router."""

    sender: Party
    body: RouterReport | SentPrefixes


class RouterLost(msgspec.Struct, frozen=True, gc=False):
    """Another router to which the connection has ended."""

    router: Party


class Close(msgspec.Struct, frozen=True, gc=False):
    """Shutdown of the router, which ends every request now."""


Event: TypeAlias = (
    AskLimits
    | Submit
    | Cancel
    | StopStringReached
    | FromWorker
    | NotSent
    | WorkerReady
    | WorkerLost
    | TimerFired
    | TenantsChanged
    | PauseRequests
    | ResumeRequests
    | ResetCaches
    | MeetRouters
    | FromRouter
    | RouterLost
    | Close
)
