"""Chunked prefill: which prompts get how many tokens of the next step. Pure; no torch, no clock."""

import itertools
from collections import deque

from splitserve.engine.block_manager import BlockManager, Shortage
from splitserve.engine.scheduling import MAX_LOADS_AHEAD, Planned, StepBudget
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.kvconnector.layout.shape import num_blocks_for

LEAST_ALIGNED_SHARE = 0.875
"""Share of a chunk to which it is shortened at most to end on a block's edge."""
EDGE_TOKENS = 16
"""Tokens of which a chunk within a block is a multiple, as matrix instructions take them."""
TAIL_SPLIT_FACTOR = 4  # prompts shorter than this many tail chunks move fast enough in one piece


class PrefillScheduler:
    """First come, first served. A prompt starts only when all of it has room, so two can't wait for each other.

    With ``budget.tail_chunk_tokens`` the last chunk of a long prompt is that small: everything before it moves to
    decode while it is computed, so little is left to move once the first token is out.
    """

    def __init__(self, blocks: BlockManager, budget: StepBudget) -> None:
        self._blocks = blocks
        self._budget = budget
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []  # admitted, with known tokens left to compute

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        """Queue a sequence before all others, or in the order of arrival, since some get their grant late. One that had
        room before is not overtaken."""
        sequence.enter(Stage.QUEUED)
        place = len(self.waiting)
        while place and self.waiting[place - 1].number > sequence.number and not self.waiting[place - 1].was_admitted:
            place -= 1
        self.waiting.insert(0 if first else place, sequence)

    def add_admitted(self, sequence: Sequence) -> None:
        """Add a sequence that holds all its blocks, and has KV for some of its known tokens."""
        sequence.enter(Stage.PREFILLING)
        self.active.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Its blocks stay with the caller."""
        if sequence in self.active:
            self.active.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def take_prefilled(self) -> list[Sequence]:
        """Forget, and return, the sequences that decode here next: a launched step draws their first token."""
        drawing = (s for s in self.active if s.launched.drawing_chunk is not None and not s.launched.is_gated)
        taken = [s for s in drawing if s.decodes_here and s.may_go_on]
        if taken:
            self.active = [sequence for sequence in self.active if sequence not in taken]
        return taken

    def begin_loads(self, num_running: int = 0) -> None:
        """Onboard KV from the tiers for the first ones that wait, from the moment they are here. They keep their
        turn, and hold their blocks meanwhile: as long as there's room for all before them, too. Those that are to read
        a prefix from a peer begin with that.
        """
        ahead = num_running
        for waiting in list(itertools.islice(self.waiting, MAX_LOADS_AHEAD)):
            if waiting.block_ids:
                continue
            if (
                waiting.prefix is not None
                or not self._blocks.would_load(waiting)
                or not self._blocks.reserve(waiting, headroom=ahead)
            ):
                ahead += num_blocks_for(len(waiting.token_ids), self._blocks.block_size)

    def plan(self, budget: int, num_running: int = 0) -> list[Planned]:
        """Return chunks of at most ``budget`` tokens in total, beside ``num_running`` sequences that decode.

        Sequences that wait for their blocks are left out. If no other sequence has anything to compute, the first one
        whose wait is nearly over has the step to itself.
        """
        planned: list[Planned] = []
        if urgent := [sequence for sequence in self.active if sequence.draws_second and sequence.num_unplanned]:
            for sequence in urgent:  # a decode worker waits for its second token, and has read its prompt by then
                budget -= self._plan_chunk(sequence, budget, planned)
            return planned
        most = (num_running and self._budget.max_prompts_beside_decode) or len(self.active) + len(self.waiting)
        for sequence in self.active:
            if len(planned) < most:
                budget -= self._plan_chunk(sequence, budget, planned)
        max_active = self._budget.max_num_seqs - num_running
        while budget > 0 and self.waiting and len(planned) < most and len(self.active) < max_active:
            following = self._next_with_blocks(num_running)
            if following is None:
                break
            self.waiting.remove(following)
            self.add_admitted(following)
            budget -= self._plan_chunk(following, budget, planned)
        return planned or self._plan_gated(budget, num_running)

    def shortage(self, budget: int, num_running: int = 0) -> Shortage:
        """Return the blocks that the first waiting sequence lacks, if nothing else keeps it from beginning in the next
        step."""
        computing = sum(sequence.num_unplanned for sequence in self.active if sequence.load is None)
        is_full = num_running + len(self.active) >= self._budget.max_num_seqs
        if not self.waiting or self.waiting[0].block_ids or is_full or computing >= budget:
            return Shortage()
        first = self.waiting[0]
        return self._blocks.shortage(first, headroom=num_running + self._blocks.fork_headroom(first))

    def _next_with_blocks(self, headroom: int) -> Sequence | None:
        """Return the first waiting sequence, if there's room for it; else the first one that already holds its blocks.
        If that one waited for those before it, and they waited for its blocks, they would deadlock."""
        first = self.waiting[0]
        if first.block_ids or self._blocks.reserve(first, headroom=headroom + self._blocks.fork_headroom(first)):
            return first
        return next((sequence for sequence in self.waiting if sequence.block_ids), None)

    def _plan_gated(self, budget: int, num_running: int) -> list[Planned]:
        """Plan a step that waits on the device. It delays the steps behind it, so it is the last one of its prompt."""
        if num_running:
            return []
        block_size = self._blocks.block_size
        for sequence in self.active:
            if sequence.load is None or sequence.launched.num_steps or not sequence.load.can_hold_step:
                continue
            num_tokens = sequence.num_after_load(block_size)
            if num_tokens <= budget and not self._splits_tail(num_tokens):
                return [Planned(sequence, sequence.gated_chunk(block_size))]
        return []

    def _plan_chunk(self, sequence: Sequence, budget: int, planned: list[Planned]) -> int:
        is_waiting = sequence.load is not None or sequence.launched.is_gated
        num_tokens = 0 if is_waiting else self.chunk_tokens(sequence, budget)
        if num_tokens > 0:
            planned.append(Planned(sequence, sequence.chunk(num_tokens, self._blocks.block_size)))
        return num_tokens

    def chunk_tokens(self, sequence: Sequence, budget: int) -> int:
        """Length of the sequence's next chunk. A chunk that isn't the last ends on a block's edge if it can. Where few
        blocks fit, it ends within one instead of being much shorter."""
        remaining, block_size = sequence.num_unplanned, self._blocks.block_size
        wanted = remaining
        if self._splits_tail(remaining):
            wanted = remaining - self._budget.tail_chunk_tokens
        if wanted == remaining and remaining <= budget:
            return remaining
        start, most = sequence.num_launched, min(wanted, budget)
        for edge in (block_size, min(block_size, EDGE_TOKENS)):
            aligned = (start + most) // edge * edge - start
            if aligned >= LEAST_ALIGNED_SHARE * most:
                return aligned
        return max(aligned, 0) or most

    def _splits_tail(self, num_tokens: int) -> bool:
        tail = self._budget.tail_chunk_tokens
        return tail > 0 and num_tokens >= TAIL_SPLIT_FACTOR * tail
