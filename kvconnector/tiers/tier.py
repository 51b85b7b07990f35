"""One tier below the device, as a worker sees it, and its slots that peers may read."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitserve.kvconnector.blocks.kv_events import KVEvents
from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.kvconnector.tiers.commands import CopiesInFlight
from splitserve.kvconnector.tiers.counts import TierStatistics
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.kvconnector.tiers.shared import SharedTier
from splitserve.protocol.counters import WorkerCounters

MAX_CANDIDATES = 1 << 16


@dataclass(slots=True)
class Tier:
    """One tier below the device: its name and content."""

    name: str
    index: TierIndex
    max_blocks_per_copy: int = 64  # bounds the duration of a store
    max_blocks_per_load: int | None = None  # bounds the duration of a load; None: max_blocks_per_copy
    counts: TierStatistics = field(default_factory=TierStatistics)
    num_stores_in_flight: int = 0
    num_stores_since_full: int = 0  # or since the start
    num_late_loads: int = 0  # abandoned copies out of it that have not ended; lookups skip it until they have
    candidates: OrderedDict[bytes, int] = field(default_factory=OrderedDict)  # hash -> block, oldest first

    def propose(self, block_id: int, block_hash: bytes) -> None:
        """Make a block a candidate for a store, unless its content is in the tier. Drops the oldest of too many
        candidates."""
        if block_hash not in self.index:
            self.candidates[block_hash] = block_id
            if len(self.candidates) > MAX_CANDIDATES:
                self.candidates.popitem(last=False)


@dataclass(frozen=True, slots=True)
class TierWork:
    """State of a worker's tiers that stores and loads share."""

    pool: BlockPool
    tiers: Sequence[Tier]  # in lookup order
    shared: SharedTier
    copies: CopiesInFlight
    events: KVEvents
    counters: WorkerCounters


class ServedSlots:
    """Slots held for peers, of the first tier whose memory peers can read; none without such a tier."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tier = next((tier for tier in tiers if tier.index.is_served), None)
        self._held: Counter[int] = Counter()

    def has(self, block_hash: bytes) -> bool:
        """Return whether :meth:`hold` would find the content."""
        return self.tier is not None and block_hash in self.tier.index

    def hold(self, block_hash: bytes) -> tuple[int, int] | None:
        """Return slot and generation of content that peers can read; it stays until :meth:`release`."""
        if self.tier is None or not self.has(block_hash):
            return None
        [slot] = self.tier.index.pin([block_hash])
        self._held[slot] += 1
        return slot, self.tier.index.generation(slot)

    def release(self, slots: Sequence[int]) -> None:
        """Release one hold on each slot."""
        if self.tier is not None:
            self.tier.index.unpin(slots)
            self._held.subtract(slots)
            self._held += Counter()  # without zeros

    @property
    def num_held(self) -> int:
        """Number of holds over all slots: a slot held twice counts twice."""
        return self._held.total()

    def held_in(self, tier: Tier) -> set[int]:
        """Return the slots of a tier that are held."""
        return set(self._held) if tier is self.tier else set()
