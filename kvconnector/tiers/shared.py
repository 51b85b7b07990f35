"""A tier that several workers share, as one of them sees it: only asking tells what it holds. No I/O, no clock.

It takes and gives chunks, of a fixed number of tokens from the beginning of a sequence on, by their token ids. So a
chunk goes down when the last of its blocks is complete, and a request that finds less than whole chunks of its prompt
in this process waits for the answer to one question, which is a load that may bring nothing.
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
"""The blocks of the device that have some contents, up to the first that has none."""


class TierState(msgspec.Struct, frozen=True, tag=True):
    """Whether the shared tier answers, and how many tokens its chunks have: a multiple of the block size."""

    tier: str
    is_available: bool
    chunk_tokens: int = 0


class ChainCopy(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks of one sequence between the device and the shared tier. ``is_load``: into the blocks.

    ``block_ids[i]`` has the content ``hashes[i]`` and is number ``first_block + i`` of the sequence, whose tokens up to
    the end of the last of them are ``token_ids``. That end is a chunk's; the beginning is one, too, of what goes down.
    A result's ``num_good`` says how many of the blocks are there now.
    """

    copy_id: int
    tier: str
    is_load: bool
    token_ids: Sequence[int]
    first_block: int
    block_ids: Sequence[int]
    hashes: Sequence[bytes]


@dataclass(slots=True)
class _Candidate:
    """A chunk that may go down: ``number`` in its sequence, whose tokens ``token_ids`` begins with."""

    token_ids: Sequence[int]
    number: int
    hashes: list[bytes]


@dataclass(slots=True)
class SharedTier:
    """Off, without a name. ``max_blocks_per_copy`` bounds how long a copy takes; a chunk is copied as a whole."""

    name: str = ""
    block_size: int = 1
    max_blocks_per_copy: int = 64
    chunk_blocks: int = 0  # 0: it doesn't answer
    num_stores_in_flight: int = 0
    _candidates: OrderedDict[bytes, _Candidate] = field(default_factory=OrderedDict)  # by the hash of the last block
    _known: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # likewise: in the tier, as far as we know

    @property
    def is_available(self) -> bool:
        return self.chunk_blocks > 0

    def on_state(self, state: TierState) -> None:
        """The tier is lost, or there (again): then nothing is known of what it holds."""
        self.chunk_blocks = state.chunk_tokens // self.block_size if state.is_available else 0
        self.forget()

    def forget(self) -> None:
        """What was stored can't be trusted, or isn't there any more."""
        self._candidates.clear()
        self._known.clear()

    # ---- up ----

    def num_wanted(self, first_block: int, num_blocks: int) -> int:
        """How many of a sequence's blocks, ``first_block`` the first, to ask for: up to its last whole chunk of
        ``num_blocks``."""
        if not self.is_available:
            return 0
        return max(0, num_blocks // self.chunk_blocks * self.chunk_blocks - first_block)

    def on_loaded(self, copy: ChainCopy, num_good: int) -> None:
        for number, block_hash in self._chunk_ends(copy):
            if number < num_good:
                self._remember(block_hash)
            else:
                self._known.pop(block_hash, None)

    # ---- down ----

    def propose(
        self, token_ids: Sequence[int], hashes: Sequence[bytes], first_block: int, worth: Sequence[bool]
    ) -> None:
        """Blocks ``first_block`` and following of a sequence are complete, or used again; ``worth[i]``: the policy
        would keep that one. A chunk is worth as much as its last block.

        ``token_ids`` may grow, but what there is of it doesn't change.
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
        """What goes down next, if the bounds allow it; ``find`` gives the blocks that have some contents now."""
        while self._candidates and self.num_stores_in_flight < MAX_STORES_IN_FLIGHT:
            first = self._candidates.popitem(last=False)[1]
            block_ids, hashes = find(first.hashes), list(first.hashes)
            if len(block_ids) < len(hashes):
                continue  # taken before its turn
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
        """Last blocks of the chunks that ``copy`` reaches: their numbers in it, and their hashes."""
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
"""Nobody ever turns it on."""
