"""Plans of Triton's paged attention: for one step, or of fixed size, for CUDA graphs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.paged import FlatTables, Int32Array, flat_tables
from splitserve.kernels.tuning.decode_launch import MAX_PARTS, PROGRAMS_PER_DEVICE, DecodeLaunch, decode_launch

QUERY_TILE = 64
CONTEXT_TILE = 64
ITEM_NUMBERS = 8  # of an item of decode_items
_ALIGNED = 32  # in int32 numbers: each array begins a cache line
UNSPLIT_TILES = 8  # tiles of context: splitting so few costs more than it saves


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers for parts of contexts that are to be joined, for S sequences of one query token each; reused by each
    step."""

    launch: DecodeLaunch
    partial: Tensor  # float32 [N, H, D], a slot for each item
    partial_lse: Tensor  # float32 [N, H]: logarithms to base 2
    tickets: Tensor  # int32 [S, G]: parts that have arrived, 0 between launches

    @property
    def num_items(self) -> int:
        return self.partial.shape[0]


class DecodeWorkspaces:
    """Workspaces of plans of any sizes, which run one after the other: all have the same memory, which doubles where a
    plan needs more."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._partial, self._lse, self._tickets = self._allocated(0, 0)

    def of(self, num_sequences: int) -> DecodeWorkspace:
        """Return the workspace of a plan of so many sequences."""
        launch = decode_launch(self._shape, max(1, num_sequences))
        num_items = num_decode_items(num_sequences, launch.num_parts)
        most_items, most_sequences = self._partial.shape[0], self._tickets.shape[0]
        if num_items > most_items or num_sequences > most_sequences:
            sizes = max(num_items, 2 * most_items), max(num_sequences, 2 * most_sequences)
            self._partial, self._lse, self._tickets = self._allocated(*sizes)
        return DecodeWorkspace(launch, self._partial[:num_items], self._lse[:num_items], self._tickets[:num_sequences])

    def _allocated(self, num_items: int, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        shape, device = self._shape, self._shape.device
        partial = torch.empty((num_items, shape.num_heads, shape.head_dim), dtype=torch.float32, device=device)
        lse = torch.empty((num_items, shape.num_heads), dtype=torch.float32, device=device)
        return partial, lse, torch.zeros((num_sequences, shape.num_kv_heads), dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class DecodePart:
    """The sequences of one query token each, in the form of :func:`decode_items`."""

    indices: Tensor  # int32: blocks of all sequences
    items: Tensor  # int32 [N, ITEM_NUMBERS]
    workspace: DecodeWorkspace


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

    def __init__(self, shape: AttentionShape, batch_size: int, max_blocks: int, workspace: DecodeWorkspace) -> None:
        self._shape, self._batch_size, self._max_indices = shape, batch_size, batch_size * max_blocks
        self._workspace = workspace
        self._numbers = FixedArrays((ITEM_NUMBERS * self._workspace.num_items, self._max_indices), shape.device)
        items, indices = self._numbers.arrays
        self.fixed = TritonPlan(DecodePart(indices, items.view(-1, ITEM_NUMBERS), self._workspace), None)

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        tables = flat_tables(batch, self._shape.block_size)
        assert len(tables.context_lens) == self._batch_size and len(tables.indices) <= self._max_indices
        alike = num_alike(batch, self._batch_size)
        items = decode_items(tables, self._batch_size, alike, self._workspace.launch, self._shape.window)
        self._numbers.fill((items.ravel(), tables.indices))


class TritonMixedPlan:
    """A :class:`TritonDecodePlan` with optional chunks after the decoding sequences; unused items have no rows."""

    def __init__(
        self,
        shape: AttentionShape,
        num_decodes: int,
        num_chunk_tokens: int,
        num_chunks: int,
        max_blocks: int,
        decodes: DecodeWorkspace,
        workspace: ChunkWorkspace,
    ) -> None:
        self._shape, self._workspace = shape, decodes
        num_sequences = num_decodes + num_chunks
        num_tiles = num_chunk_tokens // QUERY_TILE + num_chunks
        splits = max_blocks * shape.block_size > UNSPLIT_TILES * CONTEXT_TILE
        self._num_programs = workspace.programs_per_head if splits else 1
        num_items, num_joins = num_tiles + self._num_programs - 1, min(num_tiles, self._num_programs - 1)
        num_numbers = ITEM_NUMBERS * decodes.num_items
        sizes = (num_sequences + 1, num_numbers, 7 * num_items, 1 + 4 * num_joins, num_sequences * max_blocks)
        self._numbers = FixedArrays(sizes, shape.device)
        indptr, decode_numbers, items, joins, indices = self._numbers.arrays
        decode = DecodePart(indices, decode_numbers.view(-1, ITEM_NUMBERS), decodes) if num_decodes else None
        chunks = ChunkPart(indptr[num_decodes:], indices, items.view(7, num_items), joins, workspace)
        self.fixed = TritonPlan(decode, chunks)
        self._num_decodes, self._num_chunks = num_decodes, num_chunks
        self._num_items, self._num_joins = num_items, num_joins

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        assert len(batch.query_lens) <= self._num_decodes + self._num_chunks
        tables = flat_tables(batch, self._shape.block_size)
        alike = num_alike(batch, self._num_decodes)
        decode = decode_items(tables, self._num_decodes, alike, self._workspace.launch, self._shape.window)
        items, joins = chunk_arrays(batch, self._num_decodes, self._num_programs, self._num_items, self._num_joins)
        assert items.shape[1] == self._num_items and joins.shape[0] == 1 + 4 * self._num_joins, "too many chunk tokens"
        self._numbers.fill((tables.indptr, decode.ravel(), items.ravel(), joins, tables.indices))

    def suits(self, _batch: PagedBatch, /) -> bool:
        """Return True: it serves any step. See :class:`splitserve.kernels.api.MixedPlan`."""
        return True


def num_decode_items(num_sequences: int, num_parts: int) -> int:
    """Return the most items of :func:`decode_items`."""
    return num_sequences * (num_parts + 1)


def decode_items(
    tables: FlatTables, num_sequences: int, num_alike: int, launch: DecodeLaunch, window: int | None
) -> Int32Array:
    """Divide the contexts of the first ``num_sequences`` sequences, of one query token each, into items of about the
    same size; return int32 [N, ITEM_NUMBERS], padded with zeros to :func:`num_decode_items`. The last ``num_alike`` of
    these sequences are the same one: its context is divided once, and its result goes to all of their rows.

    The tokens that sequences attend to, in tiles, are shared out among ``launch.num_parts`` items per sequence: a
    context has as many items as it has such shares, rounded, at least one and at most ``MAX_PARTS``. So none is as long
    as two shares, if its context isn't divided into ``MAX_PARTS``, and nothing waits for a long context among short
    ones. Items of a sequence follow each other; the longest items come first. The numbers of an item:

    - its sequence, and the sequence's first block in ``tables.indices``
    - the item's first tile, and the end of its tokens
    - the sequence's first item, and number of items
    - the sequence's context, and the number of rows that its result goes to
    """
    items = np.zeros((num_decode_items(num_sequences, launch.num_parts), ITEM_NUMBERS), dtype=np.int32)
    if not num_sequences:
        return items
    contexts = tables.context_lens[: num_sequences - num_alike + 1]
    assert contexts.min() > 0, "a kernel without items wouldn't wait for the one before"
    begins = np.maximum(contexts - (window or contexts), 0) // launch.tile  # of tiles with a token to attend to
    num_tiles = -(-contexts // launch.tile) - begins
    share = max(1.0, num_tiles.sum() / (num_sequences * launch.num_parts))
    num_parts = np.clip(np.floor(num_tiles / share + 0.5), 1, MAX_PARTS).astype(np.int64)
    order = np.argsort(-num_tiles / num_parts, kind="stable")
    first_items, rows = np.empty_like(num_parts), np.ones_like(num_parts)
    first_items[order] = np.cumsum(num_parts[order]) - num_parts[order]
    rows[-1] = num_alike
    own = np.repeat(order, num_parts[order])  # each item's sequence
    part = np.arange(len(own)) - first_items[own]
    first, after = (begins[own] + num_tiles[own] * cut // num_parts[own] for cut in (part, part + 1))
    end = np.minimum(after * launch.tile, contexts[own])
    of_sequence = [numbers[own] for numbers in (first_items, num_parts, contexts, rows)]
    items[: len(own)].T[:] = own, tables.indptr[own], first, end, *of_sequence
    return items


def num_alike(batch: PagedBatch, num_sequences: int) -> int:
    """Return how many of the first ``num_sequences`` sequences, counted from the last of these, are the same as it:
    they have its very table, and its context. So rows that pad a CUDA graph repeat a sequence."""
    tables, contexts = batch.block_tables[:num_sequences], batch.context_lens[:num_sequences]
    pairs = enumerate(zip(reversed(tables), reversed(contexts), strict=True))
    others = (count for count, (table, context) in pairs if table is not tables[-1] or context != contexts[-1])
    return next(others, num_sequences)


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
    share are split. Without a window every row attends to the first token of every part of its tile; with one, a part
    may lie before all that some rows, or all, attend to.

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
