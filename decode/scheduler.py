"""Continuous batching: every running sequence gets a token each step; prefill chunks take what is left of the budget,
and no more than running sequences can wait for."""

from splitserve.prefill.scheduler import Planned, PrefillScheduler
from splitserve.prefill.sequence import BlockManager, Sequence, Shortage


class DecodeScheduler:
    """Running sequences first, oldest first. When blocks run out, the newest is preempted and later recomputed.

    A step that decodes computes at most ``max_num_prefill_tokens`` of prompts beside it; one that doesn't, as many as
    the budget allows.
    """

    def __init__(
        self, blocks: BlockManager, prefill: PrefillScheduler, *, max_num_seqs: int, max_num_prefill_tokens: int
    ) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_prefill_tokens = max_num_prefill_tokens
        self.prefill = prefill
        self.running: dict[Sequence, None] = {}  # an ordered set, oldest first
        self.num_preemptions = 0

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """A sequence whose known tokens have yet to be computed here."""
        sequence.decodes_here = True
        self.prefill.add(sequence, first=first)

    def add_admitted(self, sequence: Sequence) -> None:
        """A sequence that holds all its blocks, and has KV for some of its known tokens."""
        sequence.decodes_here = True
        self.prefill.active.append(sequence)

    def add_running(self, sequence: Sequence) -> None:
        """A sequence with KV for all known tokens but the last."""
        assert sequence.num_remaining == 1
        sequence.decodes_here = True
        self.running[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Its blocks stay with the caller."""
        if sequence in self.running:
            del self.running[sequence]
        else:
            self.prefill.remove(sequence)

    def begin_loads(self) -> None:
        self.prefill.begin_loads(len(self.running))

    def shortage(self, budget: int) -> Shortage:
        return self.prefill.shortage(budget - len(self.running), len(self.running))

    def plan(self, budget: int) -> list[Planned]:
        """One step of at most ``budget`` tokens.

        A sequence whose first token a launched step draws joins those that decode, so that it misses no step; one whose
        last token a launched step draws is left out.
        """
        self.running |= dict.fromkeys(self.prefill.take_prefilled())
        planned: list[Planned] = []
        block_size, most = self._blocks.block_size, min(self._max_num_seqs, budget)
        for sequence in list(self.running):
            if sequence not in self.running:
                break  # preempted just now, and all behind it
            if sequence.in_step and not sequence.may_go_on:
                continue
            if len(planned) >= most:
                break
            if not self._blocks.grow(sequence) and not self._make_room(sequence):
                break  # it was itself the newest, or that one is in a step: everybody before it is planned
            planned.append(Planned(sequence, sequence.chunk(1, block_size)))
        budget -= len(planned)
        if planned:
            budget = min(budget, self._max_num_prefill_tokens)
        planned += self.prefill.plan(budget, num_running=len(self.running))
        return planned

    def _make_room(self, sequence: Sequence) -> bool:
        while not self._blocks.grow(sequence):
            newest = next(reversed(self.running))
            if newest.in_step:
                return False
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self._blocks.give_back(sequence)
        self.prefill.add(sequence, first=True)
        self.num_preemptions += 1
