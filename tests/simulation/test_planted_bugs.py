"""Bugs planted one at a time in production code: the simulator finds each within a bounded number of schedules.

So the checks of test_simulation.py can fail, and for the reasons that they're meant for.
"""

from collections.abc import Iterator
from typing import Any

import pytest

import worker_plants as plants
from planted import CHANGED, HANDOVERS_FAILED, WRONG_TOKENS, Plant, find
from schedules import LONG_WAITS, SHORT_LEASES, Schedule, num_schedules, run_schedule
from splitserve.simulation.faults import Faults, Shape

NUM_SCHEDULES = 300  # within which each must be found


PUBLISHED = "is shared or published, so no read can be writing to it"
WRITTEN = "which the index finds"
FREED_IN_STEP = "was freed under a step"
LITTLE_MEMORY = Shape(num_blocks=16)
TWO_DECODE = Shape(decode=2, num_blocks=16)
TWO_EACH = Shape(prefill=2, decode=2)


def schedules(number: int, **options: Any) -> Iterator[Schedule]:
    for seed in range(number):
        yield Schedule(seed=seed, **options)


QUIET: dict[str, Any] = {}
SLOW_READS = {"faults": Faults(read_seconds=0.1)}
DAMAGE = {"faults": Faults(damage=0.1)}
BAD_READS = {"faults": Faults(read_error=0.2, read_stuck=0.1, disconnect_seconds=1.0)}
LATE_READS = {"faults": Faults(read_late=0.3, disconnect_seconds=2.0), "shape": LITTLE_MEMORY, "num_requests": 16}
LONG_PROMPTS = {"faults": Faults(step_seconds=0.1), "num_requests": 16}
ABORTS = {"faults": Faults(abort=0.5, max_delay=0.1)}
LOSSY = {"faults": Faults(drop=0.2, duplicate=0.2, max_delay=0.3), "protocol": LONG_WAITS}
EXPIRING = {
    "faults": Faults(partitions=2, read_seconds=1.0),
    "protocol": SHORT_LEASES,
    "shape": TWO_DECODE,
    "num_requests": 24,
}
DEATHS = {"faults": Faults(kills=4, freezes=1, step_seconds=0.1, read_seconds=0.3), "shape": TWO_EACH}
LAST_DECODE_DIES = {"faults": Faults(kills=4, step_seconds=0.1), "num_requests": 16}
INTERRUPTED = {
    "faults": Faults(abort=0.9, step_seconds=0.1),
    "shape": Shape(prefill=0, decode=0, mixed=4, num_blocks=64),
    "num_requests": 60,
}
FALSE_STARTS = {"faults": Faults(kills=3, read_error=0.2, rounding=True, step_seconds=0.1), "shape": TWO_EACH}


@pytest.mark.parametrize(
    ("plant", "options", "words"),
    [
        (plants.generations_unchecked, EXPIRING, CHANGED),
        (plants.generation_kept_when_taken, EXPIRING, "were taken, and keep their generations"),
        (plants.published_before_verified, SLOW_READS, PUBLISHED),
        (plants.published_before_computed, QUIET, WRITTEN),
        (plants.partial_block_published, INTERRUPTED, WRITTEN),
        (plants.digests_unchecked, DAMAGE, WRONG_TOKENS),
        (plants.no_quarantine, BAD_READS, "blocks that aren't quarantined"),
        (plants.quarantine_ends_with_the_deadline, LATE_READS, "aren't those of the hand-overs"),
        (plants.offered_before_the_step_completed, QUIET, WRONG_TOKENS),
        (plants.offers_sent_once, LOSSY, HANDOVERS_FAILED),
        (plants.offered_with_the_step_before, LONG_PROMPTS, WRONG_TOKENS),
        (plants.completed_on_one_rank, LONG_PROMPTS, WRITTEN),
        (plants.read_over_on_one_rank, SLOW_READS, "was freed under a read"),
        (plants.generations_of_one_rank, EXPIRING, WRONG_TOKENS),
        (plants.blocks_given_back_during_a_step, ABORTS, FREED_IN_STEP),
        (plants.blocks_given_back_between_two_steps, INTERRUPTED, FREED_IN_STEP),
        (plants.blocks_kept_for_ever, QUIET, "blocks are still referenced"),
        (plants.freed_when_acknowledged, SLOW_READS | {"shape": LITTLE_MEMORY}, HANDOVERS_FAILED),
        (plants.lease_by_the_other_clock, QUIET, HANDOVERS_FAILED),
        (plants.grant_not_all_or_nothing, {"shape": LITTLE_MEMORY, "num_requests": 24}, "waits for room, but holds"),
        (plants.attempts_unnumbered, BAD_READS, "is told to abort"),
        (plants.old_attempts_heard, DEATHS, "was taken in for"),
        (plants.other_incarnations_served, DEATHS, "took in a stale"),
        (plants.tombstones_forgotten, LOSSY, "was granted anew"),
        (plants.delivered_without_deduplication, QUIET, "were delivered"),
        (plants.retried_from_the_prompt, FALSE_STARTS, "instead of the delivered tokens"),
        (plants.heard_between_attempts, LAST_DECODE_DIES, "was taken in for"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found(
    plant: Plant, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    find(schedules(NUM_SCHEDULES, **options), words, is_handover_sure=are_handovers_sure, plant=plant.__name__)


def are_handovers_sure(schedule: Schedule) -> bool:
    """Return whether a schedule has nothing that can make a hand-over fail: see test_simulation.py."""
    faults = schedule.faults
    return faults in (Faults(), SLOW_READS["faults"]) or (faults == LOSSY["faults"] and schedule.protocol == LONG_WAITS)


@pytest.mark.parametrize("options", [QUIET, SLOW_READS, LOSSY, {"shape": LITTLE_MEMORY, "num_requests": 24}])
def test_without_a_planted_bug_nothing_is_found(options: dict[str, Any]) -> None:
    for schedule in schedules(num_schedules(4), **options):
        sim = run_schedule(schedule)
        assert not (are_handovers_sure(schedule) and sim.num_handover_failures)
