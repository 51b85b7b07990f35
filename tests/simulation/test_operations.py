"""Pauses and resets of the prefix caches under faults: right tokens, nothing stale, every count back to zero."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Schedule, any_window_schedule, num_schedules, operated, random_schedule, run_schedule
from splitserve.engine.state import EngineState
from splitserve.router.requests.operations.pause import Pause
from splitserve.router.requests.state import FailureReason
from splitserve.simulation.faults import Faults, Shape

seeds = st.integers(0, 2**32)
SHAPES = [
    Shape(prefill=2, decode=2),
    Shape(prefill=0, decode=0, mixed=2),
    Shape(decode=2, num_blocks=40, tier_slots=20),
]


@given(seed=seeds, shape=st.sampled_from(SHAPES))
@settings(max_examples=num_schedules(6))
def test_without_other_faults_only_an_abort_ends_a_request(seed: int, shape: Shape) -> None:
    sim = run_schedule(Schedule(seed=seed, shape=shape, faults=Faults(pauses=2, resets=2)))
    states = [client.request.state for client in sim.router.clients.values() if client.request is not None]
    reasons = {state.failure.reason for state in states if state.failure is not None}
    assert reasons <= {FailureReason.PAUSED}
    assert sim.num_handover_failures == 0 or reasons, "a pause fails no hand-over"


@given(seed=seeds)
@settings(max_examples=num_schedules(6))
def test_with_any_other_faults(seed: int) -> None:
    schedule = any_window_schedule(seed) if seed % 3 == 0 else random_schedule(seed)
    run_schedule(operated(schedule, random.Random(seed)))


def first_failure(schedules: list[Schedule]) -> str:
    for schedule in schedules:
        try:
            run_schedule(schedule)
        except AssertionError as error:
            return str(error)
    return ""


def plain(faults: Faults) -> list[Schedule]:
    return [Schedule(seed=seed, shape=SHAPES[seed % 3], faults=faults) for seed in range(40)]


def test_what_requests_of_before_compute_must_not_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineState, "forget_prefixes", lambda self: self.blocks.forget_prefixes())
    assert "forgot" in first_failure(plain(Faults(resets=3)))


def test_blocks_of_before_must_not_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineState, "forget_prefixes", lambda self: None)
    assert "is found after the reset" in first_failure(plain(Faults(resets=3)))


def test_a_worker_whose_freeze_is_not_ended_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(self: Pause) -> None:
        if self.freezes:
            for record in self._membership.records():
                self._send(record.info.party)

    monkeypatch.setattr(Pause, "tell", tell)
    assert first_failure(plain(Faults(pauses=2)))
