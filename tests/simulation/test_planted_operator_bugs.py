"""Bugs in pauses, resumes and drains, planted one at a time: random schedules find each by an invariant's words."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from planted import Plant, find
from schedules import Schedule, random_schedule, router_schedule
from splitserve.engine.core import EngineCore
from splitserve.engine.drain import Drain
from splitserve.engine.operations import Operations
from splitserve.protocol.messages.operators import SetFrozen
from splitserve.protocol.request import Party
from splitserve.protocol.step import StepPlan
from splitserve.router.placement.policies import NoWorker
from splitserve.router.requests.core import Newcomer, RouterCore
from splitserve.router.requests.events import PauseMode
from splitserve.router.requests.state import Failure, FailureReason
from splitserve.router.requests.table import RequestTable
from splitserve.router.requests.waiting_room import WaitingRoom

NUM_SCHEDULES = 60
STILL_SECONDS = 0.1  # within which the steps in flight at a freeze have mostly ended
TIME_LEFT = "s left when it was frozen"


def a_second_pause_begins_anew(patch: pytest.MonkeyPatch) -> None:
    original = RouterCore._pause

    def pause(self: RouterCore, mode: PauseMode, now: float) -> None:
        self.pause.since = now
        original(self, mode, now)

    patch.setattr(RouterCore, "_pause", pause)


def the_time_of_a_freeze_counts(patch: pytest.MonkeyPatch) -> None:
    def thaw(self: RequestTable, _now: float) -> None:
        if self.frozen_since is not None:
            self.frozen_since = None
            for request in self:
                self._set_deadline(request)

    patch.setattr(RequestTable, "thaw", thaw)


def a_second_freeze_begins_anew(patch: pytest.MonkeyPatch) -> None:
    """Each of several routers freezes a worker."""
    original = Operations.on_set_frozen

    def on_set_frozen(self: Operations, message: SetFrozen, sender: Party, now: float) -> None:
        original(self, message, sender, now)
        self._state.frozen_since = now if message.frozen else None

    patch.setattr(Operations, "on_set_frozen", on_set_frozen)


def frozen_workers_begin_steps(patch: pytest.MonkeyPatch) -> None:
    original = EngineCore.plan_step

    def plan_step(self: EngineCore, now: float) -> StepPlan | None:
        since, self.state.frozen_since = self.state.frozen_since, None
        try:
            return original(self, now)
        finally:
            self.state.frozen_since = since

    patch.setattr(EngineCore, "plan_step", plan_step)


def frozen_workers_give_kv_up(patch: pytest.MonkeyPatch) -> None:
    original = EngineCore.tick

    def tick(self: EngineCore, now: float) -> None:
        original(self, now)
        since, decodes = self.state.frozen_since, self.scheduler.decodes
        is_still = since is not None and now > since + STILL_SECONDS and not self._steps
        for sequence in list(decodes.running) if is_still else ():
            decodes._preempt(sequence)  # type: ignore[attr-defined]
        for sequence in decodes.take_preempted():
            self.scheduler.prompts.add(sequence, first=True)

    patch.setattr(EngineCore, "tick", tick)


def newcomers_are_lost_at_the_end(patch: pytest.MonkeyPatch) -> None:
    original = WaitingRoom.wait_for

    def wait_for(self: WaitingRoom[Any], seconds: float | None, now: float) -> None:
        original(self, seconds, now)
        for newcomer_id, _ in self.in_line() if seconds is None else ():
            self.leave(newcomer_id)

    patch.setattr(WaitingRoom, "wait_for", wait_for)


def pauses_refuse_nobody(patch: pytest.MonkeyPatch) -> None:
    original = RouterCore._serve

    def serve(self: RouterCore, newcomer_id: str, newcomer: Newcomer, now: float) -> NoWorker | None:
        mode, self.pause.mode = self.pause.mode, None
        try:
            return original(self, newcomer_id, newcomer, now)
        finally:
            self.pause.mode = mode

    patch.setattr(RouterCore, "_serve", serve)


def every_pause_aborts(patch: pytest.MonkeyPatch) -> None:
    original = RouterCore._pause

    def pause(self: RouterCore, mode: PauseMode, now: float) -> None:
        original(self, mode, now)
        for request in self.requests:
            self.requests.apply(request, request.state.fail(Failure(FailureReason.PAUSED, "")), now)

    patch.setattr(RouterCore, "_pause", pause)


def the_last_worker_drains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("splitserve.simulation.operators.check_drain", lambda *_, **__: None)


def drained_workers_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drain, "is_over", lambda *_: False)
    patch.setattr(Drain, "next_deadline", lambda _: float("inf"))


PLANTS: dict[Plant, tuple[Callable[[int], Schedule], str]] = {
    a_second_pause_begins_anew: (random_schedule, "is asked for again, and changes something"),
    the_time_of_a_freeze_counts: (random_schedule, TIME_LEFT),
    a_second_freeze_begins_anew: (router_schedule, TIME_LEFT),
    frozen_workers_begin_steps: (random_schedule, "is frozen, and begins a step"),
    frozen_workers_give_kv_up: (random_schedule, "does not stand still in a frozen worker"),
    newcomers_are_lost_at_the_end: (random_schedule, "an operator's act loses"),
    pauses_refuse_nobody: (random_schedule, "although the server is paused"),
    every_pause_aborts: (random_schedule, "although it aborts nothing"),
    the_last_worker_drains: (random_schedule, "although nobody forces it"),
    drained_workers_stay: (random_schedule, "were told to drain, and are still here"),
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    make, words = PLANTS[plant]
    with_operators = filter(has_operators, map(make, itertools.count()))
    find(itertools.islice(with_operators, NUM_SCHEDULES), words, plant=plant.__name__)


def has_operators(schedule: Schedule) -> bool:
    faults = schedule.faults
    return bool(faults.pauses or faults.operator_drains)
