"""Stores: blocks of the device are offloaded to the tiers in the background, a bounded number of copies at a time."""

from splitserve.kvconnector.tiers.commands import CopyCommand, CopyResult
from splitserve.kvconnector.tiers.shared import ChainCopy
from splitserve.kvconnector.tiers.tier import Tier, TierWork

MAX_STORES_IN_FLIGHT = 2
"""Bound per tier: one store being copied, and the next one."""
STORES_UNTIL_RETRY = 64
"""Stores in the place of earlier content after which a tier that was full tries again whether there is more room."""


class TierStores:
    """Copies of blocks into tiers. A block that is being copied is referenced, so that its content stays."""

    def __init__(self, work: TierWork) -> None:
        self._work = work

    def propose(self, block_id: int, block_hash: bytes) -> None:
        """Make a complete block of the device a candidate for each tier that lacks its content."""
        for tier in self._work.tiers:
            tier.propose(block_id, block_hash)

    def start(self) -> None:
        """Begin stores of candidates, as far as the bounds allow. Candidates whose blocks were reused meanwhile are
        dropped."""
        work = self._work
        for tier in work.tiers:
            while tier.candidates and tier.num_stores_in_flight < MAX_STORES_IN_FLIGHT:
                self._start_one(tier)
        while (copy := work.shared.next_store(work.copies.next_id, work.pool.match)) is not None:
            work.pool.reference(copy.block_ids)
            work.copies.start(copy)

    def _start_one(self, tier: Tier) -> None:
        work = self._work
        block_ids: list[int] = []
        slots: list[int] = []
        hashes: list[bytes] = []
        while tier.candidates and len(block_ids) < tier.max_blocks_per_copy:
            block_hash, block_id = tier.candidates.popitem(last=False)
            if work.pool.match([block_hash]) != [block_id]:
                continue
            place = tier.index.begin_store(block_hash)
            if place is None:
                continue
            if place.evicted is not None:
                tier.counts.evicted_blocks += 1
                work.events.evicted(tier.name, [place.evicted])
            block_ids.append(block_id)
            slots.append(place.slot)
            hashes.append(block_hash)
        if block_ids:
            work.pool.reference(block_ids)
            tier.num_stores_in_flight += 1
            work.copies.start(CopyCommand(work.copies.next_id, tier.name, False, block_ids, slots, hashes))

    def finish(self, tier: Tier, command: CopyCommand, result: CopyResult) -> None:
        """Index the good blocks of a store that ended, and free the slots of the others; of a tier that is full, use no
        slots but those of earlier content."""
        num_good = result.num_good
        tier.num_stores_in_flight -= 1
        stored: list[bytes] = []
        for number, (block_hash, slot) in enumerate(zip(command.hashes, command.slots, strict=True)):
            if tier.index.finish_store(block_hash, slot, is_good=number < num_good):
                stored.append(block_hash)
        self._work.counters.tier_stored_blocks += len(stored)
        self._work.events.stored(tier.name, stored)
        self._work.pool.release(command.block_ids)
        if result.is_full:
            tier.index.set_free_aside()
            tier.num_stores_since_full = 0
        elif result.error is None:
            tier.num_stores_since_full += 1
            if tier.num_stores_since_full % STORES_UNTIL_RETRY == 0:
                tier.index.take_back()

    def finish_shared(self, command: ChainCopy, result: CopyResult) -> None:
        """Record the end of a store to the shared tier."""
        self._work.shared.on_stored(command, is_good=result.error is None)
        self._work.counters.tier_stored_blocks += result.num_good
        self._work.pool.release(command.block_ids)

    def num_references(self) -> int:
        """Return how many references stores hold on blocks of the device."""
        return sum(len(copy.block_ids) for copy in self._work.copies.stores)
