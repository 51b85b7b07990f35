"""Groups of a cache after the first: their pools, and the rules by which sequences hold their blocks.

The first group is a full one: a sequence holds its blocks from the first token on, and their hashes name its prefixes.
Of a window group it holds those that its next token attends to, and later ones. All groups count blocks alike, so block
``n`` of each has the same tokens; a block's id is its group's own.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple

from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.protocol.cache_layout import CacheGroup, GroupKind
from splitserve.protocol.step import ChunkTable


@dataclass(frozen=True, slots=True)
class TableRule:
    """The part of a sequence whose blocks a group keeps."""

    block_size: int
    window: int = 0  # last tokens that a token attends to, itself included; 0: all

    @classmethod
    def of(cls, group: CacheGroup) -> "TableRule":
        """Return the rule of a group. Raises ValueError for a kind of group that workers don't have yet."""
        if group.kind is GroupKind.STATE:
            raise ValueError("the cache has a group of states; workers can hold groups of full and windowed attention")
        return cls(group.block_tokens, group.window)

    def first_needed(self, num_tokens: int) -> int:
        """Return the number of the first block that a token behind ``num_tokens`` others attends to."""
        return max(0, num_tokens - self.window + 1) // self.block_size if self.window else 0


@dataclass(slots=True)
class Table:
    """A sequence's blocks of one group, without gaps from block ``first_number`` on."""

    rule: TableRule
    first_number: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0  # blocks before this number aren't to be published any more

    @property
    def end(self) -> int:
        return self.first_number + len(self.block_ids)

    def between(self, start: int, end: int) -> list[int]:
        """Return the ids of the blocks numbered from ``start`` to below ``end``, as far as the table has them."""
        first = self.first_number
        return self.block_ids[max(0, start - first) : max(0, end - first)]

    def chunk(self, start: int, end: int) -> ChunkTable:
        """Return the part that a step touches which computes the tokens from ``start`` to below ``end``."""
        first = max(self.first_number, self.rule.first_needed(start))
        return ChunkTable(first, self.between(first, num_blocks_for(end, self.rule.block_size)))


class Hold(NamedTuple):
    """Blocks of one group that a sequence needs: cached ones from ``first_number`` on, and fresh ones after them."""

    first_number: int
    cached: list[int]
    num_fresh: int


@dataclass(frozen=True, slots=True)
class GroupPool:
    """The pool of one group, with its rule."""

    pool: BlockPool
    rule: TableRule

    def hold_to_compute(self, hashes: ListLike[bytes], num_resumed: int, num_tokens: int) -> Hold:
        """Return the blocks that a sequence needs to compute its tokens from block ``num_resumed`` on."""
        first = self.rule.first_needed(num_resumed * self.rule.block_size)
        cached = [block_id for h in hashes[first:num_resumed] if (block_id := self.pool.find(h)) is not None]
        assert len(cached) == num_resumed - first, "a sequence resumes where a group lacks blocks"
        return Hold(first, cached, num_blocks_for(num_tokens, self.rule.block_size) - num_resumed)

    def hold_to_pull(self, num_tokens: int) -> Hold:
        """Return the blocks that a peer fills: those that the token after ``num_tokens`` others attends to, with its
        own."""
        first = self.rule.first_needed(num_tokens)
        return Hold(first, [], num_blocks_for(num_tokens + 1, self.rule.block_size) - first)

    def has_room(self, hold: Hold, headroom: int) -> bool:
        wanted = hold.num_fresh + headroom + self.pool.num_unheld(hold.cached)
        return wanted <= self.pool.num_available

    def take(self, hold: Hold) -> Table:
        """Reference and allocate the blocks; :meth:`has_room` was true."""
        self.pool.reference(hold.cached)
        fresh = self.pool.allocate(hold.num_fresh, after=hold.cached[-1] if hold.cached else None)
        assert fresh is not None, "room was checked before"
        return Table(self.rule, hold.first_number, hold.cached + fresh, hold.first_number + len(hold.cached))

    def grow(self, table: Table) -> None:
        """Add a block to a table; the pool has one."""
        fresh = self.pool.allocate(1, after=table.block_ids[-1] if table.block_ids else None)
        assert fresh is not None, "room was checked before"
        table.block_ids += fresh

    def publish(self, table: Table, hashes: ListLike[bytes], end: int) -> None:
        """Let others find the blocks before number ``end``, which are complete."""
        for number in range(max(table.first_number, table.num_published), end):
            self.pool.publish(table.block_ids[number - table.first_number], hashes[number])
        table.num_published = max(table.num_published, end)

    def trim(self, table: Table, num_computed: int) -> None:
        """Release the blocks that no token behind the computed ones attends to."""
        num_passed = min(self.rule.first_needed(num_computed) - table.first_number, len(table.block_ids))
        if num_passed > 0:
            self.pool.release(table.block_ids[:num_passed])
            del table.block_ids[:num_passed]
            table.first_number += num_passed

    def runs_to(self, hashes: ListLike[bytes]) -> list[int]:
        """Return, for each number of leading blocks, how many of them are found without a gap before its end."""
        runs = [0]
        for block_hash in hashes:
            runs.append(runs[-1] + 1 if self.pool.find(block_hash) is not None else 0)
        return runs


def resume_point(groups: ListLike[GroupPool], hashes: ListLike[bytes]) -> int:
    """Return the number of leading blocks, at most those of ``hashes``, after which a sequence can go on: the largest
    at which each group has all blocks that the next token attends to."""
    runs = [group.runs_to(hashes) for group in groups]
    for number in range(len(hashes), 0, -1):
        needed = (number - group.rule.first_needed(number * group.rule.block_size) for group in groups)
        if all(run[number] >= count for run, count in zip(runs, needed, strict=True)):
            return number
    return 0
