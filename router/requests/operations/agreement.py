"""Operators' acts on all router processes of one port: a pause or a reset that one of them is asked for takes effect in
all. Pure; time is an argument.

Pauses are numbered, and the last one holds everywhere (:class:`~splitserve.protocol.messages.routers.PauseStamp`). A
pause or a resumption is over when all routers that run have reported it: then the loss of one can't undo it.
Resets of the prefix caches are numbered alike: each router resets the workers over its own links, so that no request of
its own comes between, and a reset is over when all routers have done so.
"""

from collections.abc import Callable

from splitserve.protocol.messages.routers import RouterReport, SentPrefixes
from splitserve.router.links.membership import Membership
from splitserve.router.peers.peers import Peers
from splitserve.router.placement.placer import Placer
from splitserve.router.requests.effects import CachesAreReset, Outbox, PauseIsFollowed, Stale
from splitserve.router.requests.events import (
    FromRouter,
    MeetRouters,
    PauseMode,
    PauseRequests,
    ResetCaches,
    ResumeRequests,
    RouterLost,
)
from splitserve.router.requests.operations.cache_reset import CacheResets
from splitserve.router.requests.operations.pause import Pause


class Agreement:
    """The pause and the resets of this router, in agreement with ``peers``. ``on_pause`` and ``on_resume`` carry them
    out; ``on_room`` is called when other routers may have left room at the workers."""

    def __init__(
        self,
        peers: Peers,
        membership: Membership,
        placer: Placer,
        outbox: Outbox,
        *,
        on_pause: Callable[[PauseMode, float], None],
        on_resume: Callable[[float], None],
        on_room: Callable[[float], None],
    ) -> None:
        self.pause = Pause(membership, outbox)
        self.resets = CacheResets(membership, placer, outbox, self._on_own_reset)
        self._peers = peers
        self._outbox = outbox
        self._on_pause = on_pause
        self._on_resume = on_resume
        self._on_room = on_room
        self._awaits_pause = False  # or a resumption, of all routers, which an operator has asked this one for
        self._awaits_reset = False

    # ---- operators ----

    def on_pause(self, event: PauseRequests, now: float) -> None:
        self._peers.stamp(event.mode.value, now)
        self._on_pause(event.mode, now)
        self._await_pause()

    def on_resume(self, _event: ResumeRequests, now: float) -> None:
        self._peers.stamp("", now)
        self._on_resume(now)
        self._await_pause()

    def on_reset_caches(self, _event: ResetCaches, now: float) -> None:
        self._peers.stamp_reset(now)
        self._awaits_reset = True
        self._reset()

    def _await_pause(self) -> None:
        self._awaits_pause = True
        self._check_pause()

    def _check_pause(self) -> None:
        if self._awaits_pause and not self._peers.names_behind:
            self._awaits_pause = False
            self._outbox.put(PauseIsFollowed())

    def _reset(self) -> None:
        self._peers.forget_sent()
        self._peers.is_urgent = not self._peers.is_alone
        self.resets.begin()

    def _on_own_reset(self) -> None:
        """Note that all workers have confirmed to this router; the reset is over when the others know the same."""
        peers = self._peers
        peers.is_urgent |= not peers.is_alone and peers.reset_done != peers.reset
        peers.reset_done = peers.reset
        self._check_resets()

    def _check_resets(self) -> None:
        is_over = self._awaits_reset and self._peers.have_reset and not (self.resets.awaited or self.resets.repeats)
        if self._peers.is_alone or is_over:
            self._awaits_reset = False
            self._outbox.put(CachesAreReset())

    # ---- other routers ----

    def on_meet_routers(self, event: MeetRouters, now: float) -> None:
        """Begin the exchange, or tell a new connection the state of this router."""
        self._peers.greet(event.router)
        if not self._peers.is_reporting:
            self._peers.set_timer(now)
        self._peers.is_urgent = True

    def on_report_due(self, now: float) -> None:
        self._peers.expire(now)
        self._check_all()
        self._on_room(now)
        self._peers.set_timer(now)
        self._peers.is_urgent = True

    def on_from_router(self, event: FromRouter, now: float) -> None:
        sender, body = event.sender, event.body
        if isinstance(body, SentPrefixes):
            is_news = self._peers.on_prefixes(sender, body)
        else:
            is_news = self._peers.on_report(sender, body, now)
            if is_news:
                self._follow(body, now)
        if not is_news:
            self._outbox.put(Stale(type(body).__name__, "of another router", sender))

    def on_router_lost(self, event: RouterLost, now: float) -> None:
        self._peers.lose(event.router, now)
        self._check_all()
        self._on_room(now)

    def _check_all(self) -> None:
        self._check_pause()
        self._check_resets()

    def _follow(self, report: RouterReport, now: float) -> None:
        """Carry out what operators have asked another router for."""
        peers = self._peers
        if report.pause > peers.pause:
            peers.pause, peers.is_urgent = report.pause, True
            if report.pause.mode:
                self._on_pause(PauseMode(report.pause.mode), now)
            else:
                self._on_resume(now)
        if report.reset > peers.reset:
            peers.reset = report.reset
            if peers.is_new:  # it begins with what the others have done
                peers.reset_done = report.reset
            else:
                self._reset()
        self._check_all()
        self._on_room(now)
