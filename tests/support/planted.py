"""Finds planted bugs: by the words of a check, and by nothing else. Not a test module."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from schedules import Schedule, run_schedule

Plant = Callable[[pytest.MonkeyPatch], None]
HANDOVERS_FAILED = "hand-overs failed without a fault"
WRONG_TOKENS = "wrong tokens"
CHANGED = "count as verified, but their generations changed"


@dataclass(frozen=True)
class Finding:
    """The check that found a planted bug, and its cost."""

    text: str
    num_schedules: int
    seconds: float


FOUND_AT = {
    "a_second_freeze_begins_anew": 3,
    "any_acknowledgement_counts": 30,
    "attempts_without_end": 8,
    "biases_lost_on_a_retry": 4,
    "block_numbers_unchecked": 20,
    "clients_that_left_stay_in_line": 14,
    "connecting_peers_fail_quietly": 95,
    "ends_reach_the_first_part_alone": 11,
    "failed_peers_fail_again": 4,
    "forgotten_peers_keep_their_socket": 8,
    "frozen_workers_give_kv_up": 36,
    "generations_of_one_rank": 25,
    "last_generation_unchecked": 11,
    "late_connections_revive": 95,
    "loads_of_waiting_steps_are_given_up": 8,
    "moves_are_not_told": 8,
    "old_attempts_heard": 18,
    "other_incarnations_served": 19,
    "other_tokens_believed": 53,
    "partial_block_published": 44,
    "prefill_workers_decode": 7,
    "reads_outlive_their_handover": 78,
    "resets_are_forgotten": 9,
    "slot_generations_unchecked": 6,
    "slots_are_not_pinned": 40,
    "slots_keep_their_generation": 24,
    "the_last_worker_drains": 5,
    "token_of_a_failed_load_counts": 8,
}
"""Indices of the schedules that find plants which others do not: the search begins there, to be short."""


def find(
    schedules: Iterable[Schedule],
    *words: str,
    is_handover_sure: Callable[[Schedule], bool] = lambda schedule: False,
    plant: str = "",
) -> Finding:
    """Run schedules until a check fails, which must say one of ``words``; the one of ``plant`` in :data:`FOUND_AT` is
    the first.

    Where ``is_handover_sure``, each hand-over that begins must end well. An error that isn't a check's own (KeyError,
    IndexError) goes through: a bug that ends in a crash of its own was not found by an invariant.
    """
    started, number = time.process_time(), 0
    ordered, first = list(schedules), FOUND_AT.get(plant, 0)
    for number, schedule in enumerate(ordered[first:] + ordered[:first], start=1):
        try:
            sim = run_schedule(schedule)
            if is_handover_sure(schedule):
                assert not sim.num_handover_failures, f"{sim.num_handover_failures} {HANDOVERS_FAILED}"
        except AssertionError as error:
            is_wanted = any(each in str(error) for each in words)
            assert is_wanted, f"found by another check, {str(error)!r}, instead of {words}"
            return Finding(str(error), number, time.process_time() - started)
    pytest.fail(f"{number} schedules didn't find it")
