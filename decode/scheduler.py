"""Continuous batching: every running sequence gets a token each step; prefill chunks take what is left of the
budget."""

from splitserve.prefill.scheduler import Planned, PrefillScheduler
from splitserve.prefill.sequence import BlockManager, Sequence


class DecodeScheduler:
    """Running sequences first, oldest first. When blocks run out, the newest is preempted and later recomputed."""

    def __init__(self, blocks: BlockManager, prefill: PrefillScheduler, *, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self.prefill = prefill
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """A sequence whose known tokens have yet to be computed here."""
        self.prefill.add(sequence)

    def add_running(self, sequence: Sequence) -> None:
        """A sequence with KV for all known tokens but the last."""
        assert sequence.num_remaining == 1
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Its blocks stay with the caller."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.prefill.remove(sequence)

    def plan(self, budget: int) -> list[Planned]:
        """One step of at most ``budget`` tokens. A sequence whose last token a launched step draws is left out."""
        planned: list[Planned] = []
        index = 0
        while index < len(self.running) and len(planned) < min(self._max_num_seqs, budget):
            sequence = self.running[index]
            index += 1
            if sequence.in_step and not sequence.may_go_on:
                continue
            if not self._make_room(sequence):
                break  # it was itself the newest, or that one is in a step: everybody before it is planned
            planned.append(Planned(sequence, sequence.chunk(1, self._blocks.block_size)))
        planned += self.prefill.plan(budget - len(planned), num_running=len(self.running))
        return planned

    def _make_room(self, sequence: Sequence) -> bool:
        while not self._blocks.grow(sequence):
            newest = self.running[-1]
            if newest.in_step:
                return False
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._blocks.give_back(sequence)
        self.prefill.add(sequence, first=True)
        self.num_preemptions += 1
