"""The declaration of a stored tensor: its name, shape, role and split over tensor-parallel ranks. No torch here.

All else that is known about a checkpoint's tensors follows from it: what a checkpoint must have, the part of each rank,
scales of FP8 weights, the numbers of dummy and demo weights, memory sizes.
"""

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from splitserve.models.config import Fp8Format
from splitserve.models.weights.shard import Kept, Part, Parts, Shard, head_rows


class Role(Enum):
    """The use of a stored tensor: decides which numbers dummy and demo weights get, and what may be stored in FP8."""

    EMBEDDING = auto()
    HEAD = auto()
    PROJECTION = auto()
    BIAS = auto()
    NORM = auto()
    EXPERT = auto()  # a matrix of one of many experts
    EXPERT_BLOCKS = auto()  # the same in MXFP4: two elements in a byte
    EXPERT_SCALES = auto()  # exponents of the blocks' scales
    ROUTER = auto()
    CORRECTION_BIAS = auto()  # of experts' scores, kept in float32
    SINK = auto()  # scores of attention that no token has, kept in float32
    HEAD_NORM = auto()  # one weight for all query heads, or all key heads
    FINAL_NORM = auto()


@dataclass(frozen=True, slots=True)
class Units:
    """Equal units of a dimension that ranks share evenly, each whole on one rank: heads, or single elements."""

    label: str  # with the number, for messages: "8 attention heads"
    count: int
    repeated: bool = False  # more ranks than units are possible: neighbouring ranks hold the same unit

    def fits(self, size: int) -> bool:
        """Return whether ``size`` ranks can share the units."""
        return self.count % size == 0 or (self.repeated and size % self.count == 0)

    def per_rank(self, size: int) -> int:
        """Return the number of units that each of ``size`` ranks has."""
        return max(1, self.count // size)

    def part(self, extent: int, shard: Shard) -> range:
        """Return the rank's share of a dimension of ``extent`` elements."""
        first, unit = shard.rank * self.count // shard.size, extent // self.count
        return range(first * unit, (first + self.per_rank(shard.size)) * unit)


@dataclass(frozen=True, slots=True)
class TokenUnits:
    """The rows of the LM head, one per token: any number of ranks shares them, and the last ranks' rows are padded."""

    def part(self, extent: int, shard: Shard) -> range:
        """Return the rank's stored rows; fewer than :func:`head_rows` where those are padded."""
        rows = head_rows(extent, shard.size)
        start = min(shard.rank * rows, extent)
        return range(start, min(start + rows, extent))


@dataclass(frozen=True, slots=True)
class AllRows:
    """Rows that every rank has all of, of a matrix that is stacked with matrices whose rows ranks share."""

    def part(self, extent: int, shard: Shard) -> range:  # noqa: ARG002 -- as the other kinds of rows
        """Return all rows."""
        return range(extent)


@dataclass(frozen=True, slots=True)
class OfExpert:
    """The expert that a weight belongs to. Ranks may share experts evenly instead of what is in them."""

    index: int
    experts: Units

    def is_on(self, shard: Shard) -> bool:
        """Return whether the rank has it, where ranks share the experts."""
        return self.index in self.experts.part(self.experts.count, shard)


def fp8_scale_name(name: str, stored: Container[str], *, in_blocks: bool) -> str:
    """Return the name of the scales of the FP8 matrix ``name``: one per block, or one for all of it, which transformers
    names like those of blocks. Weights are multiplied by any of them. ``stored``: the checkpoint's names."""
    plain, inverse = f"{name}_scale", f"{name}_scale_inv"
    return inverse if in_blocks or (plain not in stored and inverse in stored) else plain


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the checkpoint. ``rows`` and ``columns``: how ranks share that dimension; None: each has all of it.

    A matrix is [out_features, in_features], as stored; a vector has rows only.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    rows: Units | TokenUnits | AllRows | None = None
    columns: Units | None = None
    section: range | None = None  # the rows of ``shape`` that this declaration is about, where others share the tensor
    expert: OfExpert | None = None
    is_transposed: bool = False  # where a layer's experts are stored as one tensor

    @property
    def num_rows(self) -> int:
        """Rows that this declaration is about."""
        return self.shape[0] if self.section is None else len(self.section)

    def is_on(self, shard: Shard) -> bool:
        """Return whether the rank has anything of it."""
        return self.expert is None or not shard.has_whole_experts or self.expert.is_on(shard)

    def shared_dimensions(self, has_whole_experts: bool) -> tuple[Units | TokenUnits | AllRows | None, ...]:
        """Return what ranks share of it, where they share the experts or where they share what is in them."""
        if self.expert is not None and has_whole_experts:
            return (self.expert.experts,)
        return self.rows, self.columns

    def part(self, shard: Shard) -> Part:
        """Return what the rank has of it."""
        if self.expert is not None and shard.has_whole_experts:
            shard = Shard()
        rows = None if self.rows is None else self.rows.part(self.num_rows, shard)
        if self.section is not None:
            rows = range(self.num_rows) if rows is None else rows
            rows = range(self.section.start + rows.start, self.section.start + rows.stop)
        columns = None if self.columns is None or shard.size == 1 else self.columns.part(self.shape[1], shard)
        return Part(self.name, rows, columns, self.kept)

    @property
    def kept(self) -> Kept:
        """Return the type that the weight has in memory."""
        if self.role in (Role.CORRECTION_BIAS, Role.SINK):
            return Kept.FLOAT32
        return Kept.BYTES if self.role in (Role.EXPERT_BLOCKS, Role.EXPERT_SCALES) else Kept.MODEL

    @property
    def may_be_fp8(self) -> bool:
        """Return whether the weight may be stored in FP8: true for the matrices of layers."""
        return self.role in (Role.PROJECTION, Role.EXPERT)

    def scale_shapes(self, fp8: Fp8Format, stored: Container[str]) -> dict[str, tuple[int, ...]]:
        """Return the scales that a checkpoint with the names ``stored`` must have if it has this matrix in FP8, by
        name."""
        name = fp8_scale_name(self.name, stored, in_blocks=fp8.block is not None)
        sizes = () if fp8.block is None else zip(self.shape, fp8.block, strict=True)
        return {name: tuple(-(-size // block) for size, block in sizes)}


Stack: TypeAlias = tuple[Weight, ...]
"""Weights that are loaded as one, stacked along their rows."""


def stack_parts(stack: Stack, shard: Shard) -> Parts:
    """Return what the rank has of a stack."""
    return tuple(weight.part(shard) for weight in stack if weight.is_on(shard))
