"""Events that :class:`splitserve.router.core.RouterCore` handles. Its driver makes them from sockets, timers, clients.

Questions and requests share one space of ids: both may have to wait for a worker, and a client gives both up alike.
"""

from enum import StrEnum
from typing import TypeAlias

import msgspec

from splitserve.messages import Body
from splitserve.request import Party
from splitserve.router.active_request import ActiveRequest


class TimerKind(StrEnum):
    DEADLINE = "deadline"  # of a request that has begun
    RETRY = "retry"  # looks again for a worker that can go on with a failed attempt
    WAIT = "wait"  # ends the wait of a new request, or of a question, for a worker


class Timer(msgspec.Struct, frozen=True, gc=False):
    """The identity of a timer: at most one of a kind per request."""

    kind: TimerKind
    request_id: str


class AskLimits(msgspec.Struct, frozen=True, gc=False):
    """A client's prompt is about to be prepared: answered by TellLimits or Refuse."""

    question_id: str
    arrived_at: float


class Submit(msgspec.Struct, frozen=True):
    """A new request, ready to run: answered by Begun or Refuse. It belongs to the core from now on."""

    request: ActiveRequest


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """The client is gone, or has all that it wants; harmless after the end."""

    request_id: str


class StopStringReached(msgspec.Struct, frozen=True, gc=False):
    """The output's text is complete, whatever the workers still compute; harmless after the end."""

    request_id: str


class FromWorker(msgspec.Struct, frozen=True, gc=False):
    """A message over a worker's link."""

    sender: Party
    body: Body


class NotSent(msgspec.Struct, frozen=True, gc=False):
    """A message that a worker's link didn't take: it is full, or down."""

    to: Party
    body: Body


class WorkerReady(msgspec.Struct, frozen=True, gc=False):
    """A worker's link is up, for the first time or again."""

    worker: Party


class WorkerLost(msgspec.Struct, frozen=True, gc=False):
    """A worker died, left, fell silent or was replaced; ``why`` goes on after its name."""

    worker: Party
    why: str


class TimerFired(msgspec.Struct, frozen=True, gc=False):
    timer: Timer


class Close(msgspec.Struct, frozen=True, gc=False):
    """The router shuts down: every request ends now."""


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
    | Close
)
