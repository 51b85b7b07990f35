"""Blocks on offer whose place on the device others need: they are offered from the host tier instead.

Decode holds room before a prompt is computed, so blocks are on offer for long only where reads lag behind, or decode
is frozen, cut off or dead. Meanwhile the next prompts find no room. Whatever of the offered blocks has a copy in the
host tier can do without the device: the slot is pinned as long as the hand-over lasts, the offer's next revision names
it, and the block is free. Nobody here knows what decode is reading. What it reads of a block that is taken meanwhile
is told apart by its generation, as ever, and read again from the slot.
"""

import itertools
from collections.abc import Iterable, Iterator

from splitserve.handover import SourceHandover, SourceState
from splitserve.messages import OfferedBlock
from splitserve.prefill.block_manager import Shortage
from splitserve.prefill.engine_state import EngineState
from splitserve.prefill.sequence import Sequence


class HostOffers:
    """``is_on``: whether it may be done at all."""

    def __init__(self, state: EngineState, *, is_on: bool) -> None:
        self._state = state
        self._is_on = is_on and state.blocks.tiers.serves_slots
        self._due_at = float("inf")

    @property
    def is_on(self) -> bool:
        return self._is_on

    def make_room(self, handovers: Iterable[SourceHandover], shortage: Shortage, now: float) -> list[SourceHandover]:
        """Move as many blocks as are missing, or none: fewer would help nobody. Those that have been on offer for the
        longest go first, and of a prompt its end, which is read last. Returns whose offer has a new revision."""
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
        """Whoever looks for room next finds more of it."""
        if now >= self._due_at:
            self._due_at = float("inf")

    def next_deadline(self) -> float:
        """When blocks will have been on offer long enough, if somebody needs room."""
        return self._due_at

    def _movable(self, handover: SourceHandover, shortage: Shortage) -> Iterator[int]:
        """Numbers of prompt blocks that nobody but the hand-over holds, and that the host tier has. Last ones first."""
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
        places = self._state.blocks.leave_device(
            self._sequence(handover), {number: block.block_id for number, block in offered.items()}
        )
        handover.move({number: OfferedBlock(*place) for number, place in places.items()}, now)
        self._state.counters.host_offered_blocks += len(numbers)

    def _sequence(self, handover: SourceHandover) -> Sequence:
        return self._state.sequences[handover.key]
