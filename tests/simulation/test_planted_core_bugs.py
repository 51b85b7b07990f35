"""Bugs planted one at a time in the router's own code: schedules find each, by the words of an invariant.

Some of them are found over real sockets too: ``test_planted_router_bugs.py``.
"""

from collections.abc import Iterator
from typing import Any

import pytest

import core_plants as plants
from planted import Plant, find
from schedules import FEW_MAY_WAIT, Schedule
from splitserve.simulation.faults import Faults, Shape

NUM_SCHEDULES = 300

TWO_MIXED = Shape(prefill=0, decode=0, mixed=2)
TWO_EACH = Shape(prefill=2, decode=2)
QUIET: dict[str, Any] = {}
CROWD = {"num_requests": 16, "protocol": FEW_MAY_WAIT}
BAD_READS = {"faults": Faults(read_error=0.5), "shape": TWO_EACH}
DEATHS = {"faults": Faults(kills=4, freezes=1, step_seconds=0.1), "shape": TWO_EACH, "num_requests": 16}
LAST_ONE_DIES = {"faults": Faults(kills=2, step_seconds=0.1), "shape": Shape(prefill=0, decode=0, mixed=1)}
FREEZES = {"faults": Faults(freezes=3, step_seconds=0.3), "shape": TWO_MIXED, "num_requests": 16}
DRAINS = {"faults": Faults(drains=2, step_seconds=0.3), "shape": TWO_MIXED, "num_requests": 16}
SMALL_PREFILL = DEATHS | {"shape": Shape(prefill=2, decode=2, prefill_blocks=6)}
PREFIXES = {"shape": Shape(prefill=0, decode=0, mixed=3, tier_slots=40), "num_requests": 24}
FULL_LINKS = {"faults": Faults(unsent=0.3), "shape": TWO_EACH}
LEAVES = {"faults": Faults(abort=1.0), "num_requests": 16}

ADD_UP = "but its attempts add up to"
TIMERS = "timers are pending that should not be, or the reverse"
NEED_NOT_WAIT = "waits, although"


@pytest.mark.parametrize(
    ("plant", "options", "words"),
    [
        (plants.retries_get_the_whole_deadline, BAD_READS, "gets more than what was left of its deadline"),
        (plants.retries_start_over, DEATHS, "instead of the delivered tokens"),
        (plants.aborts_name_the_next_attempt, DEATHS, "which runs"),
        (plants.orphans_are_not_aborted, FREEZES, "is back, and wasn't told to abort"),
        (plants.survivors_are_not_aborted, BAD_READS, "were not told to abort"),
        (plants.unsent_requests_are_forgotten, FULL_LINKS, "failed without need: the request took longer"),
        (plants.draining_workers_get_requests, DRAINS, "which is draining"),
        (plants.lost_workers_get_requests, DEATHS, "which is lost"),
        (plants.prefill_workers_decode, DEATHS, "but its role is prefill"),
        (plants.every_worker_has_room, SMALL_PREFILL, "gets a sequence of"),
        (plants.workers_help_themselves, PREFIXES, "is to read a prefix from itself"),
        (plants.charges_of_failed_attempts_stay, BAD_READS, ADD_UP),
        (plants.each_token_ends_the_prefill, QUIET, ADD_UP),
        (plants.only_the_first_attempt_has_a_first_token, DEATHS, "charged for a prompt that has been computed"),
        (plants.failed_attempts_count_as_ends, BAD_READS, "were counted"),
        (plants.ended_requests_stay, QUIET, "has ended, and is still active"),
        (plants.retries_have_no_timer, LAST_ONE_DIES, TIMERS),
        (plants.timers_outlive_their_requests, QUIET, TIMERS),
        (plants.the_waiting_room_is_not_served, CROWD, NEED_NOT_WAIT),
        (plants.stranded_requests_sleep_on, LAST_ONE_DIES, NEED_NOT_WAIT),
        (plants.the_waiting_room_has_no_bound, CROWD, "wait where 2 may"),
        (plants.clients_that_left_stay_in_line, LEAVES, "but its client has left"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found(
    plant: Plant, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    find(schedules(**options), words, plant=plant.__name__)


def schedules(**options: Any) -> Iterator[Schedule]:
    for seed in range(NUM_SCHEDULES):
        yield Schedule(seed=seed, **options)
