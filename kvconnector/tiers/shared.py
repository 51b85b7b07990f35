"""A tier that several workers share, as one of them sees it: only a lookup reveals its content. No I/O, no clock.

It stores and returns chunks, addressed by token ids, of a fixed number of tokens counted from the beginning of a
sequence. So a chunk is offloaded when its last block is complete. A request that finds fewer blocks of its prompt in
this process than whole chunks could provide waits for one lookup, which is a load that may return nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

MAX_STORES_IN_FLIGHT = 2
MAX_CANDIDATES = 4096
MAX_KNOWN = 1 << 16

FindBlocks: TypeAlias = Callable[[Sequence[bytes]], list[int]]
"""Function that returns the device's blocks with the given contents, up to the first content that has none."""


class TierState(msgspec.Struct, frozen=True, tag=True):
    """State of the shared tier: its availability and the tokens of a chunk, a multiple of the block size."""

    tier: str
    is_available: bool
    chunk_tokens: int = 0
    num_clears: int = 0  # orders to clear it that were carried out since this worker's start


class ChainCopy(msgspec.Struct, frozen=True, tag=True):
    """Copy of blocks of one sequence between the device and the shared tier.

    The last block ends a chunk. In a store, the first block begins one. A result's ``num_good`` is the number of these
    blocks that are there now.
    """

    copy_id: int
    tier: str
    is_load: bool  # True: into the blocks
    token_ids: Sequence[int]  # the sequence's tokens up to the end of the last block
    first_block: int  # position of block_ids[0] in the sequence
    block_ids: Sequence[int]
    hashes: Sequence[bytes]  # hashes[i]: the content of block_ids[i]


@dataclass(slots=True)
class _Candidate:
    """A chunk that may be offloaded."""

    token_ids: Sequence[int]  # begins with the sequence's tokens
    number: int  # position of the chunk in its sequence
    hashes: list[bytes]


@dataclass(slots=True)
class SharedTier:
    """The shared tier; off if it has no name."""

    name: str = ""
    block_size: int = 1
    max_blocks_per_copy: int = 64  # bounds the duration of a copy; a chunk is always copied as a whole
    chunk_blocks: int = 0  # 0: unavailable
    num_stores_in_flight: int = 0
    num_late_loads: int = 0  # abandoned copies out of it that have not ended; none is requested until they have
    num_clears: int = 0  # since start
    _candidates: OrderedDict[bytes, _Candidate] = field(default_factory=OrderedDict)  # by the hash of the last block
    _known: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # likewise: chunks known to be in the tier

    @property
    def is_available(self) -> bool:
        return self.chunk_blocks > 0

    def on_state(self, state: TierState) -> None:
        """Record that the tier was lost or is available (again): its content is unknown then. A state from before the
        latest clear doesn't make it available: the content is still to be removed."""
        is_usable = state.is_available and state.num_clears >= self.num_clears
        self.chunk_blocks = state.chunk_tokens // self.block_size if is_usable else 0
        self.forget()

    def clear(self) -> None:
        """Use nothing of the tier until its first state after the clear: its content is to be removed."""
        self.num_clears += 1
        self.chunk_blocks = 0
        self.forget()

    def forget(self) -> None:
        """Forget the known content: it can't be trusted, or is gone."""
        self._candidates.clear()
        self._known.clear()

    # ---- onboard ----

    def num_wanted(self, first_block: int, num_blocks: int) -> int:
        """Return how many blocks of a sequence to request from ``first_block`` on: up to the last whole chunk within
        ``num_blocks``."""
        if not self.is_available or self.num_late_loads:
            return 0
        return max(0, num_blocks // self.chunk_blocks * self.chunk_blocks - first_block)

    def on_loaded(self, copy: ChainCopy, num_good: int) -> None:
        for number, block_hash in self._chunk_ends(copy):
            if number < num_good:
                self._remember(block_hash)
            else:
                self._known.pop(block_hash, None)

    # ---- offload ----

    def propose(
        self, token_ids: Sequence[int], hashes: Sequence[bytes], first_block: int, worth: Sequence[bool]
    ) -> None:
        """Make whole chunks candidates for a store: blocks ``first_block`` and following of a sequence are complete, or
        used again.

        ``worth[i]``: the policy would keep that block. A chunk is worth as much as its last block. ``token_ids`` may
        grow, but its existing elements don't change.
        """
        size = self.chunk_blocks
        if not self.is_available:
            return
        for number in range(first_block // size, (first_block + len(worth)) // size):
            end = (number + 1) * size
            if not worth[end - 1 - first_block] or hashes[end - 1] in self._known:
                continue
            chunk = list(hashes[number * size : end])
            self._candidates.setdefault(chunk[-1], _Candidate(token_ids, number, chunk))
            if len(self._candidates) > MAX_CANDIDATES:
                self._candidates.popitem(last=False)

    def next_store(self, copy_id: int, find: FindBlocks) -> ChainCopy | None:
        """Return the next store, if the bounds allow one; ``find`` returns the blocks that have some contents now."""
        while self._candidates and self.num_stores_in_flight < MAX_STORES_IN_FLIGHT:
            first = self._candidates.popitem(last=False)[1]
            block_ids, hashes = find(first.hashes), list(first.hashes)
            if len(block_ids) < len(hashes):
                continue  # evicted before its turn
            number = first.number
            while len(hashes) + self.chunk_blocks <= self.max_blocks_per_copy and self._candidates:
                following = next(iter(self._candidates.values()))
                if following.token_ids is not first.token_ids or following.number != number + 1:
                    break
                more = find(following.hashes)
                if len(more) < len(following.hashes):
                    break
                self._candidates.popitem(last=False)
                number += 1
                block_ids, hashes = [*block_ids, *more], [*hashes, *following.hashes]
            token_ids = list(first.token_ids[: (number + 1) * self.chunk_blocks * self.block_size])
            self.num_stores_in_flight += 1
            return ChainCopy(copy_id, self.name, False, token_ids, first.number * self.chunk_blocks, block_ids, hashes)
        return None

    def on_stored(self, copy: ChainCopy, *, is_good: bool) -> None:
        self.num_stores_in_flight -= 1
        if is_good:
            for _, block_hash in self._chunk_ends(copy):
                self._remember(block_hash)

    def _chunk_ends(self, copy: ChainCopy) -> list[tuple[int, bytes]]:
        """Return the last blocks of the chunks in ``copy``: their positions in it, and their hashes."""
        if not self.is_available:
            return []
        ends = range(-(copy.first_block + 1) % self.chunk_blocks, len(copy.hashes), self.chunk_blocks)
        return [(number, copy.hashes[number]) for number in ends]

    def _remember(self, block_hash: bytes) -> None:
        self._known[block_hash] = None
        self._known.move_to_end(block_hash)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


NO_SHARED_TIER = SharedTier()
"""A tier that is never enabled."""
