"""Plans of Triton's paged attention: for one step, or of fixed size, for CUDA graphs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.paged import Int32Array, flat_tables
from splitserve.kernels.tuning.decode_launch import MAX_PARTS, PROGRAMS_PER_DEVICE, DecodeLaunch

QUERY_TILE = 64
CONTEXT_TILE = 64
_ALIGNED = 32  # in int32 numbers: each array begins a cache line
UNSPLIT_TILES = 8  # tiles of context: splitting so few costs more than it saves


@dataclass(frozen=True, slots=True)
class DecodePart:
    """The sequences of one query token each: device arrays as in :class:`FlatTables`, and buffers for the parts."""

    num_sequences: int
    indptr: Tensor
    indices: Tensor
    context_lens: Tensor
    launch: DecodeLaunch
    partial: Tensor  # float32 [S, H, parts, D]
    partial_lse: Tensor  # float32 [S, H, parts]
    tickets: Tensor  # int32 [S, G]: parts that have arrived, 0 between launches


DecodePartials = tuple[DecodeLaunch, Tensor, Tensor, Tensor]  # the last four of a DecodePart


@dataclass(frozen=True, slots=True)
class ChunkWorkspace:
    """Buffers for parts of tiles that are to be joined; reused by each step."""

    programs_per_head: int  # number of programs that share the work of a step's chunks
    partial: Tensor  # float32 [slots, H, QUERY_TILE, D]
    partial_lse: Tensor  # float32 [slots, H, QUERY_TILE]: logarithms to base 2


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Longer chunks, in the form of :func:`chunk_arrays`."""

    indptr: Tensor
    indices: Tensor
    items: Tensor  # int32 [7, N]
    joins: Tensor  # int32 [1 + 4 * J]
    workspace: ChunkWorkspace

    @property
    def max_joins(self) -> int:
        return self.joins.shape[0] // 4


@dataclass(frozen=True, slots=True)
class TritonPlan:
    decode: DecodePart | None
    chunks: ChunkPart | None


class FixedArrays:
    """Int32 arrays of the given sizes on the device that keep their addresses, for CUDA graphs; filled by one copy."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        self._starts = list(itertools.accumulate(padded[:-1], initial=0))
        self._flat = torch.zeros(sum(padded), dtype=torch.int32, device=device)
        self.arrays = [self._flat[start : start + size] for start, size in zip(self._starts, sizes, strict=True)]

    def fill(self, arrays: Sequence[Int32Array]) -> None:
        """Fill all arrays, in the stream's order; the last one may be shorter, and then its end stays unchanged."""
        packed = np.zeros(self._starts[-1] + len(arrays[-1]), dtype=np.int32)
        for start, array in zip(self._starts, arrays, strict=True):
            packed[start : start + len(array)] = array
        host = torch.from_numpy(packed)
        if self._flat.is_cuda:
            host = host.pin_memory()  # its allocator keeps it until it is copied
        self._flat[: len(packed)].copy_(host, non_blocking=True)


class TritonDecodePlan:
    """A plan whose tensors keep their addresses, for CUDA graphs. Implements ``kernels.api.DecodePlan``."""

    def __init__(self, shape: AttentionShape, batch_size: int, max_blocks: int, partials: DecodePartials) -> None:
        self._block_size = shape.block_size
        self._numbers = FixedArrays((batch_size + 1, batch_size, batch_size * max_blocks), shape.device)
        indptr, context_lens, indices = self._numbers.arrays
        self._part = DecodePart(batch_size, indptr, indices, context_lens, *partials)
        self.fixed = TritonPlan(self._part, None)

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        part, tables = self._part, flat_tables(batch, self._block_size)
        assert len(tables.context_lens) == part.num_sequences and len(tables.indices) <= part.indices.shape[0]
        self._numbers.fill((tables.indptr, tables.context_lens, tables.indices))


class TritonMixedPlan:
    """A :class:`TritonDecodePlan` with optional chunks after the decoding sequences; unused items have no rows."""

    def __init__(
        self,
        shape: AttentionShape,
        num_decodes: int,
        num_chunk_tokens: int,
        num_chunks: int,
        max_blocks: int,
        partials: DecodePartials | None,
        workspace: ChunkWorkspace,
    ) -> None:
        self._block_size = shape.block_size
        num_sequences = num_decodes + num_chunks
        num_tiles = num_chunk_tokens // QUERY_TILE + num_chunks
        splits = max_blocks * shape.block_size > UNSPLIT_TILES * CONTEXT_TILE
        self._num_programs = workspace.programs_per_head if splits else 1
        num_items, num_joins = num_tiles + self._num_programs - 1, min(num_tiles, self._num_programs - 1)
        sizes = (num_sequences + 1, num_sequences, 7 * num_items, 1 + 4 * num_joins, num_sequences * max_blocks)
        self._numbers = FixedArrays(sizes, shape.device)
        indptr, context_lens, items, joins, indices = self._numbers.arrays
        decode = DecodePart(num_decodes, indptr, indices, context_lens, *partials) if partials else None
        chunks = ChunkPart(indptr[num_decodes:], indices, items.view(7, num_items), joins, workspace)
        self.fixed = TritonPlan(decode, chunks)
        self._num_decodes, self._num_chunks = num_decodes, num_chunks
        self._num_items, self._num_joins = num_items, num_joins

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        assert len(batch.query_lens) <= self._num_decodes + self._num_chunks
        tables = flat_tables(batch, self._block_size)
        items, joins = chunk_arrays(batch, self._num_decodes, self._num_programs, self._num_items, self._num_joins)
        assert items.shape[1] == self._num_items and joins.shape[0] == 1 + 4 * self._num_joins, "too many chunk tokens"
        self._numbers.fill((tables.indptr, tables.context_lens, items.ravel(), joins, tables.indices))


def chunk_workspace(shape: AttentionShape) -> ChunkWorkspace:
    """Allocate the workspace: about 35 MB for heads of 128, whatever the chunks; all plans of one attention share
    it."""
    programs = max(1, min(MAX_PARTS, PROGRAMS_PER_DEVICE // shape.num_heads))
    sizes = (2 * programs if programs > 1 else 0, shape.num_heads, QUERY_TILE)  # see chunk_arrays
    partial = torch.empty((*sizes, shape.head_dim), dtype=torch.float32, device=shape.device)
    return ChunkWorkspace(programs, partial, torch.empty(sizes, dtype=torch.float32, device=shape.device))


def chunk_arrays(
    batch: PagedBatch, first: int, num_programs: int, num_items: int = 0, num_joins: int = 0
) -> tuple[Int32Array, Int32Array]:
    """Divide the work on the sequences from ``first`` on, before which each has one row; return (items, joins), both
    int32.

    A tile of queries is one item, or is split into items by parts of its context, so that the ``P = num_programs``
    items of a step share the work evenly; where P / 2 tiles keep the device busy, only tiles of more than twice an even
    share are split. Every row attends to the first token of every part of its tile.

    ``items`` [7, N], longest first: first query row, its position, rows, sequence, first token, end of the tokens, slot
    for the result (-1: the only part). ``joins`` [1 + 4 * J]: their number, and for each split tile: first query row,
    rows, first slot, number of slots, which are in the order of the parts. T tiles give fewer than T + P items, at most
    T and fewer than P joins, fewer than 2 * P slots. N and J are at least ``num_items`` and ``num_joins``, padded with
    zeros.
    """
    tiles = _query_tiles(batch, first)
    seen = [position // CONTEXT_TILE + 1 for _, position, _, _ in tiles]  # tiles of context that all rows attend to
    most = max(UNSPLIT_TILES, -(-sum(seen) // num_programs)) if num_programs > 1 else sum(seen)
    longest = 2 * most if 2 * len(tiles) >= num_programs else most
    items: list[tuple[int, ...]] = []
    joins: list[tuple[int, ...]] = []
    num_slots = 0
    for tile, num_tiles in zip(tiles, seen, strict=True):
        row, position, num_rows, _ = tile
        num_parts = -(-num_tiles // most) if num_tiles > longest else 1
        cuts = [num_tiles * part // num_parts * CONTEXT_TILE for part in range(num_parts)] + [position + num_rows]
        slots = range(num_slots, num_slots + num_parts) if num_parts > 1 else [-1]
        items += [(*tile, *part) for part in zip(cuts, cuts[1:], slots, strict=False)]
        if num_parts > 1:
            joins.append((row, num_rows, num_slots, num_parts))
            num_slots += num_parts
    items.sort(key=lambda item: item[4] - item[5])
    joined = _columns(joins, 4, num_joins)
    return _columns(items, 7, num_items), np.concatenate((np.array([len(joins)], dtype=np.int32), joined.ravel()))


def _query_tiles(batch: PagedBatch, first: int) -> list[tuple[int, int, int, int]]:
    """Return the tiles of queries: first row, its position in the sequence, rows, sequence counted from ``first``."""
    tiles = []
    row = first
    for index, (query_len, context) in enumerate(
        zip(batch.query_lens[first:], batch.context_lens[first:], strict=True)
    ):
        tiles += [
            (row + offset, context - query_len + offset, min(QUERY_TILE, query_len - offset), index)
            for offset in range(0, query_len, QUERY_TILE)
        ]
        row += query_len
    return tiles


def _columns(rows: Sequence[tuple[int, ...]], width: int, least: int) -> Int32Array:
    """Return ``rows`` of ``width`` numbers as columns, padded with zeros to at least ``least`` columns."""
    columns = np.zeros((width, max(least, len(rows))), dtype=np.int32)
    columns[:, : len(rows)] = np.array(rows, dtype=np.int32).reshape(-1, width).T
    return columns
