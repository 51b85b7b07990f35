"""Index of the blocks that workers announce, by tier, with a bit per worker: one look-up for all of them. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from splitserve.protocol.kv_event_batch import DEVICE

TIER_WORTH = {DEVICE: 1.0, "host": 0.9, "disk": 0.6}
"""Worth of a block in a tier, relative to one on the device, which costs nothing to use; the highest is preferred."""
OTHER_WORTH = 0.5


@dataclass(slots=True)
class BlockIndex:
    """Workers of each block, as bits of a number per tier. The tiers are in the order of their worth."""

    tiers: list[str] = field(default_factory=lambda: [*TIER_WORTH])  # others follow in order of appearance
    _blocks: dict[bytes, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, bit: int, block_hashes: Iterable[bytes], tier: str) -> list[bytes]:
        """Add blocks of the worker ``bit``; return those that were not in this tier already."""
        number, num_tiers, blocks = self._number(tier), len(self.tiers), self._blocks
        added = []
        for block_hash in block_hashes:
            masks = blocks.get(block_hash)
            if masks is None:
                masks = blocks[block_hash] = [0] * num_tiers
            elif len(masks) <= number:
                masks.extend([0] * (num_tiers - len(masks)))
            if not masks[number] & bit:
                masks[number] |= bit
                added.append(block_hash)
        return added

    def take(self, bit: int, block_hashes: Iterable[bytes], tier: str) -> tuple[int, list[bytes]]:
        """Remove blocks from a worker's tier. Return how many of them were there, and which the worker has in no other
        tier."""
        number, blocks = self._number(tier), self._blocks
        num_taken, gone = 0, []
        for block_hash in block_hashes:
            masks = blocks.get(block_hash)
            if masks is None or len(masks) <= number or not masks[number] & bit:
                continue
            masks[number] ^= bit
            num_taken += 1
            left = 0
            for mask in masks:
                left |= mask
            if not left:
                del blocks[block_hash]
            if not left & bit:
                gone.append(block_hash)
        return num_taken, gone

    def forget(self, bit: int, block_hashes: Iterable[bytes]) -> None:
        """Remove blocks from all tiers of a worker."""
        for block_hash in block_hashes:
            masks = [mask & ~bit for mask in self._blocks[block_hash]]
            if any(masks):
                self._blocks[block_hash] = masks
            else:
                del self._blocks[block_hash]

    def leading(self, chain: Sequence[bytes], sent: Iterable[tuple[int, int]]) -> dict[int, tuple[int, float]]:
        """Return the number of leading blocks of ``chain`` that each worker holds, and their worth, by the workers'
        bits. ``sent``: the end of each stretch of the chain, and the workers that were sent all of it: their devices
        are taken to hold it. What a block costs doesn't depend on the number of workers that hold it there."""
        counts: dict[int, int] = {}
        lost: dict[int, float] = {}  # worth that blocks in lower tiers lack
        left, number, blocks = _ANY, 0, self._blocks  # workers that hold the first ``number`` blocks
        for end, holders_sent in sent:
            while left & ~holders_sent and number < end:
                masks = blocks.get(chain[number], _NOWHERE)
                holders = full = masks[0] | holders_sent
                for mask in masks[1:]:
                    holders |= mask
                if left is not _ANY and left & ~holders:
                    counts |= dict.fromkeys(_bits(left & ~holders), number)
                left &= holders
                if lesser := left & ~full:
                    self._note_lost(lesser, masks, lost)
                number += 1
            number = end
            if not left:
                break
        if left is not _ANY:
            counts |= dict.fromkeys(_bits(left), number)
        return {bit: (count, count - lost.get(bit, 0.0)) for bit, count in counts.items()}

    def _note_lost(self, lesser: int, masks: Sequence[int], lost: dict[int, float]) -> None:
        for tier, mask in zip(self.tiers[1:], masks[1:], strict=False):
            for bit in _bits(lesser & mask):
                lost[bit] = lost.get(bit, 0.0) + 1.0 - TIER_WORTH.get(tier, OTHER_WORTH)
            lesser &= ~mask

    def _number(self, tier: str) -> int:
        if tier not in self.tiers:
            self.tiers.append(tier)
        return self.tiers.index(tier)


_NOWHERE = (0,)
_ANY = -1


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
