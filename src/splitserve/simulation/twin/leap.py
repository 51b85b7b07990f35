"""Decode steps of an unchanged batch, taken in one go on a worker's core: the same state as step by step."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from itertools import repeat

from splitserve.engine.core import EngineCore
from splitserve.engine.sequence import Sequence
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.protocol.counters import STEP_SEQUENCE_BUCKETS, STEP_TOKEN_BUCKETS
from splitserve.protocol.messages.requests import TokenDelta
from splitserve.protocol.placement.step_model import StepWork
from splitserve.protocol.request import Party
from splitserve.simulation.twin.step_times import StepTimes
from splitserve.simulation.worker.parts import sink_of

MIN_STEPS = 2
"""Steps below which a leap costs more than the steps."""

Keep = Callable[[TokenDelta, Party, ListLike[float]], None]
"""Function that takes a request's tokens, the router that they go to, and the times at which they were drawn."""


class Leap:
    """Steps that a core without a step in flight takes from ``begin`` on, as far as their batch can't change.

    ``between``: the seconds of the worker's loop before each step.
    """

    def __init__(self, core: EngineCore, times: StepTimes, begin: float, between: float) -> None:
        self._core = core
        self._times = times
        self._begin = begin
        self._between = between
        self._batch = list(core.scheduler.decodes.running)

    def ends_before(self, time: float) -> list[float]:
        """Return the ends of the steps whose successors have begun before ``time``; none where a leap isn't possible,
        or isn't worth it."""
        most = self._max_steps()
        if most < MIN_STEPS:
            return []
        ends: list[float] = []
        at = self._begin
        for work in self.works(most):
            at += self._between + self._times.seconds(work)
            if at >= time:
                break
            ends.append(at)
        return ends if len(ends) >= MIN_STEPS else []

    def works(self, count: int) -> Iterator[StepWork]:
        """Yield the work of the first ``count`` steps."""
        num, context = len(self._batch), sum([len(sequence.token_ids) for sequence in self._batch])
        for number in range(count):
            yield StepWork(num, context + num * number)

    def take(self, ends: list[float], token_id: int, keep: Keep) -> None:
        """Take the steps that end at ``ends``; each sequence draws ``token_id`` in each of them."""
        count, num, core = len(ends), len(self._batch), self._core
        blocks, counters = core.state.blocks, core.state.counters
        for sequence in self._batch:
            keep(_delta(sequence, token_id, count), sequence.reply_to, ends)
            lacking = num_blocks_for(sequence.num_computed + count, blocks.block_size) - len(sequence.block_ids)
            if lacking > 0:
                fresh = blocks.pool.allocate(lacking, after=sequence.block_ids[-1])
                assert fresh is not None, "a leap longer than its blocks"
                sequence.block_ids += fresh
            sequence.token_ids.extend(repeat(token_id, count))
            sequence.num_computed += count
            blocks.publish_computed(sequence)
        counters.output_tokens += count * num
        counters.steps += count
        for _ in ends:
            counters.step_sequences.add(num, STEP_SEQUENCE_BUCKETS)
            counters.step_tokens.add(num, STEP_TOKEN_BUCKETS)

    def _max_steps(self) -> int:
        """Return the number of steps in which no sequence ends, lacks a block, or has something to report."""
        core, batch = self._core, self._batch
        scheduler, blocks = core.scheduler, core.state.blocks
        if not batch or not is_quiet(core):
            return 0
        if len(batch) > min(scheduler.budget.max_num_seqs, scheduler.budget.max_num_batched_tokens):
            return 0
        if not all(_is_plain(sequence) for sequence in batch):
            return 0
        most = min(sequence.end_length - len(sequence.token_ids) for sequence in batch) - 1
        room = blocks.pool.num_available // len(batch) * blocks.block_size
        return min(most, room)


def is_quiet(core: EngineCore) -> bool:
    """Return whether no prompt waits or is computed, and nothing waits for room: steps only decode."""
    prompts = core.scheduler.prompts
    is_busy = prompts.waiting or prompts.active or core.state.blocks.others or core.state.is_frozen
    return not is_busy and not sink_of(core).sink.has_queue


def _is_plain(sequence: Sequence) -> bool:
    """Return whether a sequence's next steps do nothing but draw a token."""
    return not (
        sequence.handover is not None
        or sequence.marks is not None
        or sequence.features is not None
        or sequence.launched.num_steps
        or sequence.was_aborted
        or sequence.siblings
        or sequence.copies
        or sequence.num_remaining != 1
    )


def _delta(sequence: Sequence, token_id: int, count: int) -> TokenDelta:
    return TokenDelta(sequence.key, sequence.num_output_tokens, [token_id] * count, None, sequence.num_cached_tokens)
