"""Continuous batching: every running sequence gets a token each step."""

from collections.abc import Iterable

from splitserve.engine.block_manager import BlockManager
from splitserve.engine.scheduling import Planned
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.protocol.counters import WorkerCounters


class DecodeScheduler:
    """Running sequences, oldest first. When blocks run out, the newest is preempted, counted and later recomputed."""

    def __init__(self, blocks: BlockManager, counters: WorkerCounters) -> None:
        self._blocks = blocks
        self.counters = counters
        self._preempted: list[Sequence] = []
        self.running: dict[Sequence, None] = {}  # an ordered set, oldest first

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences with KV for all known tokens but the last, or with the step launched that computes it."""
        for sequence in sequences:
            sequence.enter(Stage.DECODING)
            self.running[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence. Its blocks stay with the caller."""
        del self.running[sequence]

    def plan(self, budget: int) -> list[Planned]:
        """Return a chunk of one token for each of at most ``budget`` sequences.

        A sequence whose last token a launched step draws is left out.
        """
        planned: list[Planned] = []
        block_size = self._blocks.block_size
        for sequence in list(self.running):
            if sequence not in self.running:
                break  # preempted just now, and all behind it
            if sequence.launched.num_steps and not sequence.may_go_on:
                continue
            if len(planned) >= budget:
                break
            if not self._blocks.grow(sequence) and not self._make_room(sequence):
                break  # it was itself the newest, or that one is in a step: everybody before it is planned
            planned.append(Planned(sequence, sequence.chunk(1, block_size)))
        return planned

    def take_preempted(self) -> list[Sequence]:
        """Return the sequences that lost their blocks since the last call, last the one that is to begin first."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def _make_room(self, sequence: Sequence) -> bool:
        while not self._blocks.grow(sequence):
            newest = next(reversed(self.running))
            if newest.launched.num_steps:
                return False
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self._blocks.give_back(sequence)
        self._preempted.append(sequence)
        self.counters.preemptions += 1
