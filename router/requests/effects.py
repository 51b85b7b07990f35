"""Effects that :class:`splitserve.router.requests.core.RouterCore` returns for its driver to perform in order."""

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.routers import RouterReport, SentPrefixes
from splitserve.protocol.request import Party
from splitserve.router.placement.placer import Limits
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.events import Timer
from splitserve.router.requests.state import Update


class Send(msgspec.Struct, frozen=True, gc=False):
    """A message over a worker's link. If the link doesn't take it, the driver answers with the event NotSent."""

    to: Party
    body: Body


class TellRouters(msgspec.Struct, frozen=True, gc=False):
    """A message to another router, None: to all of them. It may get lost."""

    body: RouterReport | SentPrefixes
    to: Party | None = None


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Update of a request for its client; the last one has ``ended``."""

    request_id: str
    update: Update


class Begun(msgspec.Struct, frozen=True, gc=False):
    """Beginning of a submitted request: its workers are chosen."""

    request_id: str


class TellLimits(msgspec.Struct, frozen=True, gc=False):
    """Answer to AskLimits."""

    question_id: str
    limits: Limits


class Refuse(msgspec.Struct, frozen=True, gc=False):
    """Refusal of a submitted request, or of a question, that no worker can serve; ``reason`` is for the client.

    ``retry_after_seconds``: the time after which the workers are predicted to be less busy; 0: they are not the reason.
    """

    request_id: str
    reason: str
    retry_after_seconds: int = 0


class SetTimer(msgspec.Struct, frozen=True, gc=False):
    """Timer that causes TimerFired at ``at``; it replaces a pending timer with the same identity."""

    timer: Timer
    at: float


class CancelTimer(msgspec.Struct, frozen=True, gc=False):
    """End of a timer; harmless if it isn't pending."""

    timer: Timer


class Count(msgspec.Struct, frozen=True, gc=False):
    """Increment of a counter: ``metric`` is an attribute of :class:`splitserve.router.admin.metrics.RouterMetrics`."""

    metric: str
    labels: tuple[str, ...] = ()
    amount: int = 1


class CountTokens(msgspec.Struct, frozen=True, gc=False):
    """Count of tokens delivered together, and the time since the request's last ones, or since its arrival."""

    num_tokens: int
    seconds: float
    are_first: bool


class Observe(msgspec.Struct, frozen=True, gc=False):
    """Value for a histogram of :class:`splitserve.router.admin.metrics.RouterMetrics`."""

    metric: str
    seconds: float


class Ended(msgspec.Struct, frozen=True):
    """End of a request that had begun: its timeline is complete."""

    request: ActiveRequest


class CachesAreReset(msgspec.Struct, frozen=True, gc=False):
    """Confirmation of a reset of the prefix caches by all linked workers."""


class PauseIsFollowed(msgspec.Struct, frozen=True, gc=False):
    """Confirmation that all routers follow the last pause or resumption that an operator asked this one for."""


class Stale(msgspec.Struct, frozen=True, gc=False):
    """A worker's message that was dropped, to be counted and logged: it came too late, or isn't for a router."""

    kind: str
    detail: str
    sender: Party


class Log(msgspec.Struct, frozen=True, gc=False):
    """A warning for the log."""

    text: str


Effect: TypeAlias = (
    Send
    | TellRouters
    | Deliver
    | Begun
    | TellLimits
    | Refuse
    | SetTimer
    | CancelTimer
    | Count
    | CountTokens
    | Observe
    | Ended
    | CachesAreReset
    | PauseIsFollowed
    | Stale
    | Log
)


class Outbox:
    """Effects of one event so far; ``put`` adds one."""

    __slots__ = ("_effects", "put")

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self.put: Callable[[Effect], None] = self._effects.append

    def take(self) -> list[Effect]:
        effects = self._effects.copy()
        self._effects.clear()
        return effects
