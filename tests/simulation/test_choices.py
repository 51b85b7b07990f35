"""Prompts with several choices under seeded faults, and bugs planted in what they share."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planted import WRONG_TOKENS, find
from schedules import Schedule, num_schedules, random_schedule, run_schedule
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.requests import Requests
from splitserve.engine.sequence import Sequence
from splitserve.engine.state import EngineState
from splitserve.protocol.messages.requests import Abort, FailureCode, RequestFailed
from splitserve.protocol.request import Party
from splitserve.protocol.step import Draw, ScheduledChunk
from splitserve.router.requests.table import RequestTable
from splitserve.simulation.faults import Faults, Shape

ABORTS = Faults(abort=0.7, max_delay=0.1, step_seconds=0.1)
DEATHS = Faults(kills=3, freezes=1, step_seconds=0.1)
BAD_READS = Faults(read_error=0.3)
UNANSWERED = "failed without need: the request took longer"
NUM_SCHEDULES = 100


@given(seed=st.integers(0, 2**32), shape=st.sampled_from([Shape(), Shape(prefill=2, decode=2), Shape(num_blocks=16)]))
@settings(max_examples=num_schedules(4))
def test_a_prompt_is_handed_over_once_for_all_its_choices(seed: int, shape: Shape) -> None:
    sim = run_schedule(Schedule(seed=seed, shape=shape, max_choices=4))
    firsts = [client for client in sim.router.clients.values() if client.first is None]
    assert sim.num_handovers <= len(firsts) and not sim.router.failures
    assert all(len(client.output) for client in sim.router.clients.values())
    counters = [worker.core.state.counters for worker in sim.workers.values()]
    if shape.num_blocks > 16 and not any(each.preemptions for each in counters):
        num_computed = sum(each.prompt_tokens for each in counters)
        assert num_computed <= sum(len(client.prompt) for client in firsts), "a token of a prompt was computed twice"


@given(seed=st.integers(0, 2**32), faults=st.sampled_from([ABORTS, DEATHS]), window=st.sampled_from([0, 6]))
@settings(max_examples=num_schedules(4))
def test_choices_end_well_under_aborts_and_deaths(seed: int, faults: Faults, window: int) -> None:
    shape = Shape(prefill=2, decode=2, window=window)
    run_schedule(Schedule(seed=seed, faults=faults, shape=shape, max_choices=4))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=num_schedules(4))
def test_choices_end_well_in_random_schedules(seed: int) -> None:
    run_schedule(msgspec.structs.replace(random_schedule(seed), max_choices=4))


# ---- planted bugs ----


def all_choices_draw_alike(patch: pytest.MonkeyPatch) -> None:
    original = Sequence.fork

    def fork(self: Sequence) -> list[Sequence]:
        self.siblings = dict.fromkeys(self.siblings, 0)
        return original(self)

    patch.setattr(Sequence, "fork", fork)


def partial_blocks_not_copied(patch: pytest.MonkeyPatch) -> None:
    original = Sequence.chunk

    def chunk(self: Sequence, num_tokens: int, block_size: int) -> ScheduledChunk:
        return msgspec.structs.replace(original(self, num_tokens, block_size), copies=())

    patch.setattr(Sequence, "chunk", chunk)


def sources_given_up_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.share

    def share(self: BlockManager, sequence: Sequence, fork: Sequence) -> bool:
        has_blocks = original(self, sequence, fork)
        for copy in fork.copies:
            self.pools[copy.group].release([copy.source])
        return has_blocks

    patch.setattr(BlockManager, "share", share)


def siblings_get_each_others_first_tokens(patch: pytest.MonkeyPatch) -> None:
    original = Requests.fork

    def fork(self: Requests, sequence: Sequence, draw: Draw, now: float) -> None:
        original(self, sequence, msgspec.structs.replace(draw, others=draw.others[::-1]), now)

    patch.setattr(Requests, "fork", fork)


def siblings_end_with_the_first_choice(patch: pytest.MonkeyPatch) -> None:
    def on_abort(self: Requests, abort: Abort, sender: Party, now: float) -> None:
        sequence = self.state.sequences.get(abort.key)
        if sequence is None:
            self.state.leave_tombstone(abort.key, "aborted", now, attempt_over=True)
        elif not sequence.has_ended:
            self.end(sequence, "aborted", now)

    patch.setattr(Requests, "on_abort", on_abort)


def siblings_fail_unnoticed(patch: pytest.MonkeyPatch) -> None:
    def fail(self: EngineState, sequence: Sequence, code: FailureCode, message: str) -> None:
        self.outbox.send(sequence.reply_to, RequestFailed(key=sequence.key, code=code, message=message))

    patch.setattr(EngineState, "fail", fail)


def siblings_uncounted(patch: pytest.MonkeyPatch) -> None:
    original = RequestTable._retire

    def retire(self: RequestTable, request: Any, now: float) -> None:
        original(self, request, now)
        for sibling in request.siblings:
            if self._requests.pop(sibling.request_id, None) is not None:
                self.num_of_tenant[sibling.context.tenant] -= 1

    patch.setattr(RequestTable, "_retire", retire)


def schedules(**options: Any) -> Iterator[Schedule]:
    for seed in range(NUM_SCHEDULES):
        yield Schedule(seed=seed, max_choices=4, **options)


@pytest.mark.parametrize(
    ("plant", "faults", "words"),
    [
        (all_choices_draw_alike, Faults(), WRONG_TOKENS),
        (partial_blocks_not_copied, Faults(), WRONG_TOKENS),
        (sources_given_up_before_the_copy, Faults(), "blocks have references without a holder"),
        (siblings_get_each_others_first_tokens, Faults(), WRONG_TOKENS),
        (siblings_end_with_the_first_choice, ABORTS, UNANSWERED),
        (siblings_fail_unnoticed, BAD_READS, UNANSWERED),
        (siblings_uncounted, Faults(), "but its attempts add up to"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], faults: Faults, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    find(schedules(faults=faults), words)
