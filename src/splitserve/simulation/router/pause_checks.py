"""Invariants of what operators ask a router for: a pause that is asked for twice changes nothing, one that keeps its
requests lets them go on exactly, and no act loses a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.router.peers.peers import REPORT
from splitserve.router.requests.effects import (
    Begun,
    Deliver,
    Effect,
    PauseIsFollowed,
    Refuse,
    SetTimer,
    TellLimits,
    TellRouters,
)
from splitserve.router.requests.events import (
    Event,
    FromRouter,
    PauseMode,
    PauseRequests,
    ResetCaches,
    ResumeRequests,
    Timer,
    TimerKind,
)

if TYPE_CHECKING:
    from splitserve.simulation.router.driver import SimRouter

ROUNDING_SECONDS = 1e-9
ACTS = (PauseRequests, ResumeRequests, ResetCaches, FromRouter)


@dataclass(frozen=True, slots=True)
class Before:
    """The router before an act."""

    mode: PauseMode | None
    since: float
    frozen_since: float | None
    running: frozenset[str]  # ids of requests
    waiting: frozenset[str]


class PauseChecks:
    """The observer of one router's pauses. ``aborted``: the requests that a pause has ended."""

    def __init__(self, router: "SimRouter") -> None:
        self._router = router
        self.aborted: set[str] = set()
        self._left: dict[str, float] = {}  # seconds to the deadlines of the requests that are frozen

    def before(self, event: Event) -> Before | None:
        """Return the router's state, if the event may be an operator's act, here or at another router."""
        if not isinstance(event, ACTS):
            return None
        core = self._router.core
        return Before(core.pause.mode, core.pause.since, core.requests.frozen_since, *self._ids())

    def _ids(self) -> tuple[frozenset[str], frozenset[str]]:
        core = self._router.core
        running = frozenset(request.request_id for request in core.requests)
        in_line = [newcomer_id for newcomer_id, _ in core.waiting_room.in_line()]
        return running, frozenset([*in_line, *(request.request_id for request in core.gate.queue.requests())])

    def after(self, event: Event, before: Before | None, effects: Sequence[Effect]) -> None:
        """Check the effects of an event."""
        pause = self._router.core.pause
        begun = [effect.request_id for effect in effects if isinstance(effect, Begun)]
        assert not (begun and pause.is_on), f"{begun} begin, although the server is paused"
        if before is None:
            return
        is_aborted = pause.mode is PauseMode.ABORT and before.mode is not pause.mode
        if is_aborted:
            self.aborted |= before.running
        self._check_nothing_lost(before, effects, is_aborted=is_aborted)
        if isinstance(event, PauseRequests | ResumeRequests) and pause.mode is before.mode:
            self._check_no_change(before, effects)
        self._check_deadlines(before, effects)

    def on_followed(self) -> None:
        """Check that each other router that runs, and that this one knows of, follows what operators are answered."""
        router, own = self._router, self._router.core.peers.pause
        others = [each for each in router.sim.routers.living if each.party in router.heard]
        behind = [each.party for each in others if each.core.peers.pause < own]
        assert not behind, f"operators are answered before {behind} follow the pause or its end"

    def _check_no_change(self, before: Before, effects: Sequence[Effect]) -> None:
        core = self._router.core
        others = [effect for effect in effects if not isinstance(effect, TellRouters | PauseIsFollowed)]
        others = [each for each in others if not (isinstance(each, SetTimer) and each.timer == REPORT)]
        since = (core.pause.since, core.requests.frozen_since)
        is_same = not others and since == (before.since, before.frozen_since)
        assert is_same, f"what holds already is asked for again, and changes something: {others}, {since}"

    def _check_nothing_lost(self, before: Before, effects: Sequence[Effect], *, is_aborted: bool) -> None:
        ended = {effect.request_id for effect in effects if isinstance(effect, Deliver) and effect.update.ended}
        refused = {effect.request_id for effect in effects if isinstance(effect, Refuse)}
        told = {effect.question_id for effect in effects if isinstance(effect, TellLimits)}
        running, waiting = self._ids()
        lost = (before.running | before.waiting) - (running | waiting | ended | told)
        assert not (lost or refused), f"an operator's act loses {sorted(lost | refused)}"
        if is_aborted:
            assert not running, f"{sorted(running)} run on after a pause that aborts"
        else:
            assert not ended, f"an operator's act ends {sorted(ended)}, although it aborts nothing"

    def _check_deadlines(self, before: Before, effects: Sequence[Effect]) -> None:
        """Check that the time of a freeze is no request's."""
        core, now = self._router.core, self._router.sim.now
        if before.frozen_since is None and core.requests.frozen_since is not None:
            self._left = {
                request.request_id: request.arrived_at + core.deadline_seconds + request.held_seconds - now
                for request in core.requests
            }
        elif before.frozen_since is not None and core.requests.frozen_since is None:
            due = {effect.timer: effect.at for effect in effects if isinstance(effect, SetTimer)}
            for request in core.requests:
                at = due.get(Timer(TimerKind.DEADLINE, request.request_id), 0.0)
                left = self._left.get(request.request_id, at - now)
                words = f"had {left:.3f} s left when it was frozen, and {at - now:.3f} s when it goes on"
                assert abs(at - now - left) <= ROUNDING_SECONDS, f"{request.request_id} {words}"
