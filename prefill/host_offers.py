"""Blocks on offer whose device memory is needed for other prompts: they are offered from the host tier instead.

Decode holds room before a prompt is computed, so blocks are on offer for long only if reads lag behind, or decode
is frozen, cut off or dead. Meanwhile the next prompts find no room. An offered block with a copy in the host tier
doesn't need the device: the slot is pinned as long as the hand-over lasts, the offer's next revision names it, and the
device block is free. Prefill doesn't know which blocks decode is reading at the time. If a block is overwritten while
decode reads it, decode detects that by the generation, as ever, and reads the block again from the slot.
"""

import itertools
from collections.abc import Iterable, Iterator

from splitserve.engine.block_manager import Shortage
from splitserve.engine.sequence import Sequence
from splitserve.engine.state import EngineState
from splitserve.protocol.handover.source import SourceHandover, SourceState
from splitserve.protocol.messages.handover import OfferedBlock


class HostOffers:
    """Moves of offered blocks to the host tier. ``is_on``: whether the worker's settings allow them."""

    def __init__(self, state: EngineState, *, is_on: bool) -> None:
        self._state = state
        self._is_on = is_on and state.blocks.tiers.serves_slots
        self._due_at = float("inf")

    @property
    def is_on(self) -> bool:
        return self._is_on

    def make_room(self, handovers: Iterable[SourceHandover], shortage: Shortage, now: float) -> list[SourceHandover]:
        """Move as many blocks as are missing: all or nothing, since a partial move admits no request. The blocks that
        have been on offer longest go first, and of a prompt its end, which is read last. Returns the hand-overs whose
        offers have a new revision."""
        self._due_at = float("inf")
        left = shortage.num_blocks
        if left == 0:
            return []
        chosen: list[tuple[SourceHandover, list[int]]] = []
        for handover in sorted(handovers, key=lambda handover: handover.all_offered_at):
            if handover.state is not SourceState.OFFERED or not handover.reads_host_tier:
                continue
            due_at = handover.all_offered_at + self._state.protocol.host_offer_after_seconds
            if now < due_at:
                self._due_at = min(self._due_at, due_at)
                continue
            numbers = list(itertools.islice(self._movable(handover, shortage), left))
            left -= len(numbers)
            if numbers:
                chosen.append((handover, numbers))
            if left == 0:
                break
        else:
            return []
        for handover, numbers in chosen:
            self._move(handover, numbers, now)
        return [handover for handover, _ in chosen]

    def poll(self, now: float) -> None:
        """Clear a deadline that has passed: the next call of :meth:`make_room` may move more blocks."""
        if now >= self._due_at:
            self._due_at = float("inf")

    def next_deadline(self) -> float:
        """Return the time at which blocks will have been on offer long enough to move, if a prompt needs room."""
        return self._due_at

    def _movable(self, handover: SourceHandover, shortage: Shortage) -> Iterator[int]:
        """Yield the numbers of prompt blocks that only the hand-over holds and that the host tier has; last ones
        first."""
        blocks, sequence = self._state.blocks, self._sequence(handover)
        if sequence.is_touched:
            return
        for number in range(len(sequence.block_hashes) - 1, handover.first_block - 1, -1):
            block_id = handover.offered_block(number).block_id
            is_on_device = block_id < blocks.pool.num_blocks
            if is_on_device and block_id not in shortage.wanted and blocks.can_leave(sequence, number, block_id):
                yield number

    def _move(self, handover: SourceHandover, numbers: list[int], now: float) -> None:
        offered = {number: handover.offered_block(number) for number in numbers}
        locations = self._state.blocks.leave_device(
            self._sequence(handover), {number: block.block_id for number, block in offered.items()}
        )
        handover.move({number: OfferedBlock(*location) for number, location in locations.items()}, now)
        self._state.counters.host_offered_blocks += len(numbers)

    def _sequence(self, handover: SourceHandover) -> Sequence:
        return self._state.sequences[handover.key]
