"""The cache of a model as bytes: groups of layers, each with fields of bytes ``[layer, head, bytes]``. Pure arithmetic.

A transport moves bytes. It learns from here how large a block is, which bytes of it belong to which heads, and which of
a peer's ranks has them; it needs no name for what the bytes mean. Those names (keys, values, a head's dimension) belong
to the kernels' views of the same memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Annotated

import msgspec

MAX_GROUPS = 8
MAX_LAYERS = 1024
MAX_FIELDS = 16

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class GroupKind(StrEnum):
    """The part of a sequence that a group's blocks hold."""

    FULL = "full"  # every token
    WINDOW = "window"  # the last tokens
    STATE = "state"  # all tokens up to one position, summed up


class Sharding(StrEnum):
    """The distribution of a field over the ranks."""

    HEADS = "heads"  # the heads are split over the ranks, or repeated where there are more ranks
    WHOLE = "whole"  # every rank has all of it


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of one kind that each layer of a group keeps."""

    name: str
    dtype: str  # for readers of the layout; no byte count depends on it
    num_heads: int  # of the model
    head_bytes: int  # of one head of one layer in one block
    sharding: Sharding = Sharding.HEADS

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.head_bytes < 1:
            raise ValueError(
                f"field {self.name} has {self.num_heads} heads of {self.head_bytes} bytes; both must be >= 1"
            )

    def heads_per_rank(self, num_ranks: int) -> int:
        """Return how many heads each rank holds: one at least."""
        return self.num_heads if self.sharding is Sharding.WHOLE else max(1, self.num_heads // num_ranks)

    def heads(self, rank: int, num_ranks: int) -> range:
        """Return the model's numbers of the heads that ``rank`` holds."""
        first = 0 if self.sharding is Sharding.WHOLE else rank * self.num_heads // num_ranks
        return range(first, first + self.heads_per_rank(num_ranks))

    def splits_over(self, num_ranks: int) -> bool:
        """Return whether every head has a rank, and all ranks hold equally many."""
        larger, smaller = max(num_ranks, self.num_heads), min(num_ranks, self.num_heads)
        return self.sharding is Sharding.WHOLE or larger % smaller == 0


class CacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that cache the same fields for the same part of a sequence."""

    kind: GroupKind
    layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LAYERS)]  # the model's numbers, ascending
    block_tokens: int  # of one block; 0: a block is a state, not tokens
    fields: Annotated[tuple[Field, ...], msgspec.Meta(max_length=MAX_FIELDS)]
    window: int = 0  # of a window group: the last tokens that a token attends to, itself included

    def __post_init__(self) -> None:
        if not self.layers or not self.fields:
            raise ValueError(f"a group of kind {self.kind} needs a layer and a field at least")
        if (self.window > 0) != (self.kind is GroupKind.WINDOW):
            raise ValueError(f"a group of kind {self.kind} has a window of {self.window} tokens")
        if (self.block_tokens > 0) == (self.kind is GroupKind.STATE):
            raise ValueError(f"a group of kind {self.kind} has blocks of {self.block_tokens} tokens")

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class ByteRows:
    """Equally long runs of bytes in one block: ``count`` of ``width`` bytes, the first at ``offset``."""

    offset: int
    pitch: int  # from the beginning of one run to that of the next
    count: int
    width: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.width

    def __iter__(self) -> Iterator[range]:
        """Yield each run's byte numbers."""
        for row in range(self.count):
            begin = self.offset + row * self.pitch
            yield range(begin, begin + self.width)


@dataclass(frozen=True, slots=True)
class HeadSpan:
    """Heads of one field that the peer's rank ``rank`` holds for ours."""

    rank: int
    source_head: int  # the first one, as numbered in the peer's blocks
    local_head: int  # the same, in ours
    num_heads: int
    field: int = 0


@dataclass(frozen=True)
class BlockLayout:
    """A group's block as a rank holds it: contiguous, field after field ``[layer, head, bytes]``."""

    group: CacheGroup
    num_ranks: int = 1

    @cached_property
    def block_bytes(self) -> int:
        return sum(self._field_bytes)

    @property
    def num_layers(self) -> int:
        return self.group.num_layers

    @cached_property
    def word_bytes(self) -> int:
        """Size of the largest machine word, up to 8 bytes, that every head of every field consists of."""
        sizes = [field.head_bytes for field in self.group.fields]
        return next(word for word in (8, 4, 2, 1) if all(size % word == 0 for size in sizes))

    def heads_per_rank(self, field: int = 0) -> int:
        return self.group.fields[field].heads_per_rank(self.num_ranks)

    def heads(self, rank: int, field: int = 0) -> range:
        """Return the model's numbers of the heads of a field in ``rank``'s blocks."""
        return self.group.fields[field].heads(rank, self.num_ranks)

    def layer_bytes(self, field: int = 0) -> int:
        """Return the bytes of one layer of a field in a block: the distance from one layer to the next."""
        return self.heads_per_rank(field) * self.group.fields[field].head_bytes

    def rows(self, first_head: int, num_heads: int, field: int = 0) -> ByteRows:
        """Return the bytes of adjacent heads, numbered as in this rank's blocks: a run per layer."""
        if not 0 <= first_head < first_head + num_heads <= self.heads_per_rank(field):
            raise ValueError(f"heads {first_head} to {first_head + num_heads - 1} of {self.heads_per_rank(field)}")
        head_bytes, pitch = self.group.fields[field].head_bytes, self.layer_bytes(field)
        offset = self._offsets[field] + first_head * head_bytes
        return ByteRows(offset, pitch, self.num_layers, num_heads * head_bytes)

    def piece_bytes(self, num_heads: int, field: int = 0) -> int:
        """Return the bytes of that many heads of a block over all layers."""
        return self.num_layers * num_heads * self.group.fields[field].head_bytes

    def spans(self, rank: int, theirs: "BlockLayout") -> tuple[HeadSpan, ...]:
        """Return the locations of our rank's heads in the peer's ranks, field by field, in order of the heads.

        If several ranks hold the same head, one is taken; our ranks don't all take the same one.
        """
        fields = range(len(self.group.fields))
        if (source := self.whole_source(rank, theirs)) is not None:
            return tuple(HeadSpan(source, 0, 0, self.heads_per_rank(field), field) for field in fields)
        return tuple(span for field in fields for span in self._spans_of_field(field, rank, theirs))

    def whole_source(self, rank: int, theirs: "BlockLayout") -> int | None:
        """Return the peer's rank whose blocks are, as a whole, those of our rank; None if there is none."""
        fields = range(len(self.group.fields))
        mine = [self.heads(rank, field) for field in fields]
        sources = range(theirs.num_ranks)
        alike = [source for source in sources if [theirs.heads(source, field) for field in fields] == mine]
        return alike[rank % len(alike)] if alike else None

    @cached_property
    def _field_bytes(self) -> tuple[int, ...]:
        return tuple(self.num_layers * self.layer_bytes(field) for field in range(len(self.group.fields)))

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return tuple(accumulate(self._field_bytes, initial=0))[:-1]

    def _spans_of_field(self, number: int, rank: int, theirs: "BlockLayout") -> Iterator[HeadSpan]:
        mine = self.heads(rank, number)
        held = [theirs.heads(other, number) for other in range(theirs.num_ranks)]
        head = mine.start
        while head < mine.stop:
            holders = [other for other, heads in enumerate(held) if head in heads]
            other = holders[rank % len(holders)]
            stop = min(mine.stop, held[other].stop)
            yield HeadSpan(other, head - held[other].start, head - mine.start, stop - head, number)
            head = stop


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All groups of a worker's cache. Each has a pool of blocks, a region of memory and generations of its own."""

    groups: tuple[CacheGroup, ...]
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if not self.groups or self.groups[0].kind is not GroupKind.FULL:
            raise ValueError("the first group of a cache must be full: its blocks' hashes name prefixes")
        sizes = {group.block_tokens for group in self.groups if group.kind is not GroupKind.STATE}
        if len(sizes) > 1:
            raise ValueError(f"all groups must have blocks of the same number of tokens, got {sorted(sizes)}")

    @property
    def is_simple(self) -> bool:
        """Return whether every layer keeps one field for every token: a block then has one run of bytes per layer."""
        return len(self.groups) == 1 and self.groups[0].kind is GroupKind.FULL and len(self.groups[0].fields) == 1

    def blocks(self, group: int = 0) -> BlockLayout:
        """Return the layout of one rank's blocks of a group."""
        return BlockLayout(self.groups[group], self.num_ranks)

    def pool_size(self, num_bytes: int, group: int = 0) -> int:
        """Return how many blocks of a group fit into that many bytes of one rank."""
        return num_bytes // self.blocks(group).block_bytes

    def matches(self, other: "CacheLayout") -> bool:
        """Return whether blocks can be exchanged: the same groups, whatever the numbers of ranks."""
        return self.groups == other.groups
