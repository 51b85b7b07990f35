"""Late grants in the simulator: room is asked for in time, no sooner, and no cycle of waiting forms; planted bugs."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grant_plants as plants
from planted import HANDOVERS_FAILED, Plant, find
from schedules import LONG_WAITS, Schedule, num_schedules, run_schedule
from splitserve.protocol.messages.handover import Grant, GrantDelayed, GrantRequest
from splitserve.protocol.request import Party, RequestKey
from splitserve.simulation.faults import Faults, Shape
from splitserve.simulation.simulator import Simulator
from splitserve.simulation.waits import Node, cycle_in

NUM_SCHEDULES = 60  # within which each bug must be found
QUIET, SLOW = Faults(), Faults(step_seconds=0.2)
LOSSY = Faults(drop=0.3, duplicate=0.2, max_delay=0.3)
LEAVERS = Faults(abort=0.7, step_seconds=0.2, max_delay=0.1)
EVERYTHING = Faults(
    drop=0.1, duplicate=0.1, max_delay=0.3, read_error=0.1, abort=0.3, step_error=0.03, step_seconds=0.1, partitions=1,
    mutes=1, kills=1, freezes=1, pauses=1, resets=1,
)  # fmt: skip
FULL = Shape(decode=2, num_blocks=14, prefill_blocks=24)  # decode workers lack room
BOTH_FULL = Shape(prefill=2, decode=2, num_blocks=14)
CROWDED = [FULL, BOTH_FULL, Shape(decode=1, num_blocks=14), Shape(decode=2, num_blocks=16, prefill_blocks=11)]
NUM_REQUESTS = 24


def run(seed: int, faults: Faults, shape: Shape, **options: Any) -> Simulator:
    return run_schedule(Schedule(seed=seed, faults=faults, shape=shape, num_requests=NUM_REQUESTS, **options))


def messages(sim: Simulator) -> Counter[str]:
    return Counter(type(body).__name__ for _, _, _, body in sim._events)


@given(seed=st.integers(0, 2**32), shape=st.sampled_from(CROWDED))
@settings(max_examples=num_schedules(4))
def test_where_decode_lacks_room_every_request_ends_well(seed: int, shape: Shape) -> None:
    sim = run(seed, SLOW, shape)
    assert sim.router.failures == [] and sim.num_handover_failures == 0
    counts = messages(sim)
    assert counts[GrantRequest.__name__] and counts[GrantDelayed.__name__]


@given(seed=st.integers(0, 2**32), shape=st.sampled_from(CROWDED))
@settings(max_examples=num_schedules(4))
def test_lost_questions_and_answers_cost_time_only(seed: int, shape: Shape) -> None:
    sim = run(seed, LOSSY, shape, protocol=LONG_WAITS)
    assert sim.router.failures == [] and sim.num_handover_failures == 0


@given(seed=st.integers(0, 2**32), faults=st.sampled_from([LEAVERS, EVERYTHING]), shape=st.sampled_from(CROWDED))
@settings(max_examples=num_schedules(4))
def test_every_fault_among_prompts_that_wait(seed: int, faults: Faults, shape: Shape) -> None:
    run(seed, faults, shape, max_choices=1 + seed % 3)


def test_an_idle_cluster_asks_for_nothing() -> None:
    """The router has decode reserve room at once, so the first token is not later than with early grants."""
    sim = Simulator(1, QUIET, Shape())
    for index in range(5):
        sim.at(1.0 + 3.0 * index, lambda i=index: sim.router.submit(f"r{i}", [i, 1, 2, 3, 4], 6))  # type: ignore[misc]
    sim.run(until=60.0)
    counts = messages(sim)
    assert sim.num_handovers == 5 and counts[Grant.__name__] >= 5
    assert counts[GrantRequest.__name__] == counts[GrantDelayed.__name__] == 0


A, B, C, D = ((Party("w", 1), RequestKey(name)) for name in "abcd")


@pytest.mark.parametrize(
    ("waits", "cycle"),
    [
        ({}, []),
        ({A: [B, C], B: [D], C: [D], D: []}, []),
        ({A: [B], B: [C]}, []),
        ({A: [A]}, [A, A]),
        ({D: [A], A: [B], B: [C], C: [A]}, [A, B, C, A]),
        ({A: [B, C], B: [], C: [D], D: [C]}, [C, D, C]),
    ],
)
def test_cycles_of_waiting_are_found(waits: dict[Node, list[Node]], cycle: list[Node]) -> None:
    assert cycle_in(waits) == cycle


IN_A_CYCLE = {"faults": SLOW, "shape": Shape(num_blocks=14, prefill_blocks=14)}


@pytest.mark.parametrize(
    ("plant", "options", "words"),
    [
        (plants.all_prompts_are_next, {"faults": SLOW}, "is asked for too early"),
        (plants.whole_steps_are_forgotten, {"faults": SLOW}, "is asked for too early"),
        (plants.the_router_sees_no_queue, {"faults": SLOW}, "is to be granted at once, although"),
        (plants.room_is_reserved_unasked, {"faults": SLOW}, "which was not asked for"),
        (plants.grants_are_asked_for_once, {"faults": LOSSY, "protocol": LONG_WAITS}, HANDOVERS_FAILED),
        (
            plants.prompts_without_room_keep_their_place,
            {"faults": SLOW, "shape": FULL},
            "waits behind prompts whose decode workers have no room",
        ),
        (plants.ended_prompts_stay_in_line, {"faults": LEAVERS}, "waits for its grant, but is"),
        (plants.ended_requests_stay_in_line, {"faults": LEAVERS, "shape": FULL}, "goes from"),
        (plants.unasked_requests_take_a_slot, {"faults": LEAVERS}, "count as unasked for"),
        (plants.prompts_hold_room_before_their_grant, IN_A_CYCLE, "wait in a cycle"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found(
    plant: Plant, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    is_sure = options["faults"] == LOSSY
    find(schedules(**options), words, is_handover_sure=lambda schedule: is_sure, plant=plant.__name__)


def schedules(**options: Any) -> Iterator[Schedule]:
    for seed in range(NUM_SCHEDULES):
        yield Schedule(seed=seed, num_requests=NUM_REQUESTS, **options)
