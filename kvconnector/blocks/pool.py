"""Allocation of KV blocks: references, generations, the prefix index and quarantine. No torch, no I/O.

A block is in exactly one state:

    free         not referenced; its content is worthless
    cached       not referenced, but found by the prefix index; evicted in LRU order when free blocks run out
    referenced   its count is the number of holders: sequences, offers under a lease
    quarantined  not referenced, but a read that can't be cancelled may still write to it

A block's generation identifies one *content*. It advances when the block is allocated, before anything is written to
it; sequences that share a prefix see the same generation. It does not change when references are dropped.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from splitserve.kvconnector.blocks.kv_events import KVEvents
from splitserve.protocol.kv_event_batch import DEVICE

GENERATION_MASK = 2**64 - 1


class BlockState(Enum):
    FREE = "free"
    CACHED = "cached"
    REFERENCED = "referenced"
    QUARANTINED = "quarantined"


class BlockPool:
    """Allocator of ``len(generations)`` blocks.

    ``generations``: uint64 per block, usually in registered host memory so that peers can read it; the pool fills it
    with ``first_generation``, random per incarnation. ``events`` records which blocks enter and leave the prefix index.
    """

    def __init__(
        self,
        generations: npt.NDArray[np.uint64],
        *,
        first_generation: int,
        enable_prefix_caching: bool = True,
        events: KVEvents | None = None,
    ) -> None:
        self.num_blocks = len(generations)
        self._generations = generations
        self._generations[:] = np.uint64(first_generation & GENERATION_MASK)
        self._is_free = np.ones(self.num_blocks, dtype=np.bool_)
        self._num_free = self.num_blocks
        self._ref_counts = [0] * self.num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._quarantined: set[int] = set()
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}
        self._enable_prefix_caching = enable_prefix_caching
        self._events = events or KVEvents()

    # ---- taking and giving back ----

    @property
    def num_available(self) -> int:
        """Number of blocks that :meth:`allocate` can hand out now."""
        return self._num_free + len(self._cached)

    def allocate(self, num_blocks: int, *, after: int | None = None) -> list[int] | None:
        """Allocate ``num_blocks`` for new content, each with one reference; return None, and allocate nothing, if too
        few are available.

        Runs of adjacent blocks are preferred. ``after`` is the block that the first allocated block should follow.
        """
        if num_blocks > self.num_available:
            return None
        num_from_free = min(num_blocks, self._num_free)
        block_ids = self._pick_free(num_from_free, after)
        if num_from_free:
            self._is_free[block_ids] = False
            self._num_free -= num_from_free
        if num_from_free < num_blocks:
            block_ids = sorted(block_ids + self._evict_least_recently_used(num_blocks - num_from_free))
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        self._generations[block_ids] += np.uint64(1)  # wraps around
        return block_ids

    def reference(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; the blocks must be referenced or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]  # KeyError: the block is free or quarantined, which is a bug of the caller
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block. The last block of a sequence becomes the first to be evicted."""
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] < 1:
                raise AssertionError(f"block {block_id} was released more often than it was referenced")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if block_id in self._hash_of_block:
                    self._cached[block_id] = None
                else:
                    self._set_free(block_id)

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Drop the only reference to blocks that a read in flight may still write to; they are not allocated until the
        quarantine is lifted."""
        for block_id in block_ids:
            if self._ref_counts[block_id] != 1 or block_id in self._hash_of_block:
                raise AssertionError(f"block {block_id} is shared or published, so no read can be writing to it")
            self._ref_counts[block_id] = 0
            self._quarantined.add(block_id)

    def lift_quarantine(self, block_ids: Sequence[int]) -> None:
        """Free quarantined blocks, once the reads in flight have ended."""
        for block_id in block_ids:
            self._quarantined.remove(block_id)
            self._set_free(block_id)

    # ---- prefix index ----

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Add a full block, complete and verified, to the prefix index. A hash that is indexed already keeps its
        block."""
        if self._ref_counts[block_id] < 1:
            raise AssertionError(f"block {block_id} was published without a reference to it")
        if (
            self._enable_prefix_caching
            and block_hash not in self._block_of_hash
            and block_id not in self._hash_of_block
        ):
            self._block_of_hash[block_hash] = block_id
            self._hash_of_block[block_id] = block_hash
            self._events.stored(DEVICE, [block_hash])

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of a chain of hashes. Adds no reference."""
        block_ids: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of_hash.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this content, None if the index has none. Adds no reference."""
        return self._block_of_hash.get(block_hash)

    def num_holders(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """Return the number of blocks without a reference: referencing them lowers :attr:`num_available` by as many."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def clear_prefix_index(self) -> None:
        """Remove all blocks from the prefix index; referenced blocks keep their references."""
        for block_id in list(self._cached):
            self._set_free(block_id)
        self._cached.clear()
        self._events.evicted(DEVICE, self.hashes())
        self._block_of_hash.clear()
        self._hash_of_block.clear()

    # ---- looking at it ----

    def hashes(self) -> list[bytes]:
        """Return the hashes of all blocks in the prefix index."""
        return list(self._block_of_hash)

    def generation(self, block_id: int) -> int:
        return int(self._generations[block_id])

    def state(self, block_id: int) -> BlockState:
        if self._ref_counts[block_id]:
            return BlockState.REFERENCED
        if block_id in self._quarantined:
            return BlockState.QUARANTINED
        return BlockState.CACHED if block_id in self._cached else BlockState.FREE

    def count(self, state: BlockState) -> int:
        if state is BlockState.FREE:
            return self._num_free
        if state is BlockState.CACHED:
            return len(self._cached)
        if state is BlockState.QUARANTINED:
            return len(self._quarantined)
        return self.num_blocks - self._num_free - len(self._cached) - len(self._quarantined)

    def total_references(self) -> int:
        """Return the sum of all reference counts; the holders' own counts must add up to it."""
        return sum(self._ref_counts)

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block is in one state and the index refers only to referenced or cached
        blocks."""
        referenced = {block_id for block_id, count in enumerate(self._ref_counts) if count}
        free = set(np.flatnonzero(self._is_free).tolist())
        groups = (free, set(self._cached), referenced, self._quarantined)
        assert sum(map(len, groups)) == self.num_blocks, "a block is in no state, or in two"
        assert set().union(*groups) == set(range(self.num_blocks)), "a block is in no state"
        assert len(free) == self._num_free, "the count of free blocks is wrong"
        assert all(count >= 0 for count in self._ref_counts), "a reference count is negative"
        assert {b: h for h, b in self._block_of_hash.items()} == self._hash_of_block, (
            "the two maps of the prefix index differ"
        )
        assert set(self._cached) <= self._hash_of_block.keys() <= (set(self._cached) | referenced), (
            "the prefix index lacks a cached block or refers to a free one"
        )

    # ---- inside ----

    def _set_free(self, block_id: int) -> None:
        self._is_free[block_id] = True
        self._num_free += 1

    def _evict_least_recently_used(self, count: int) -> list[int]:
        block_ids = [self._cached.popitem(last=False)[0] for _ in range(count)]
        hashes = [self._hash_of_block.pop(block_id) for block_id in block_ids]
        for block_hash in hashes:
            del self._block_of_hash[block_hash]
        self._events.evicted(DEVICE, hashes)
        return block_ids

    def _pick_free(self, num_blocks: int, after: int | None) -> list[int]:
        if num_blocks == 0:
            return []
        if num_blocks == 1:
            has_neighbour = after is not None and after + 1 < self.num_blocks and self._is_free[after + 1]
            return [after + 1 if after is not None and has_neighbour else int(self._is_free.argmax())]
        if num_blocks == self._num_free:
            return np.flatnonzero(self._is_free).tolist()
        # Ends of runs of blocks that are all free or all not: few, where comparing all ids would take milliseconds
        edges = np.flatnonzero(self._is_free[1:] != self._is_free[:-1]) + 1
        starts = np.concatenate(([0], edges))
        lengths = np.diff(starts, append=self.num_blocks)
        is_free = self._is_free[starts]
        starts, lengths = starts[is_free], lengths[is_free]
        fitting = np.flatnonzero(lengths >= num_blocks)
        if len(fitting):  # best fit keeps the long runs whole
            start = int(starts[fitting[np.argmin(lengths[fitting])]])
            return list(range(start, start + num_blocks))
        longest_first = np.argsort(-lengths, kind="stable")
        ends = np.cumsum(lengths[longest_first])
        used = longest_first[: np.searchsorted(ends, num_blocks) + 1]
        counts = lengths[used]
        counts[-1] -= ends[len(used) - 1] - num_blocks
        begins = starts[used] - (np.cumsum(counts) - counts)  # less the number picked before
        return (np.repeat(begins, counts) + np.arange(num_blocks)).tolist()  # type: ignore[no-any-return]
