"""What Triton's paged attention derives from a batch: for one step, or of fixed size, for CUDA graphs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.decode_launch import DecodeLaunch
from splitserve.kernels.paged import Int32Array, flat_tables
from splitserve.kernels.triton_sampling import to_device

QUERY_TILE = 64


@dataclass(frozen=True, slots=True)
class DecodePart:
    """The sequences of one query token each: device arrays as in :class:`FlatTables`, and room for the parts."""

    num_sequences: int
    indptr: Tensor
    indices: Tensor
    context_lens: Tensor
    launch: DecodeLaunch
    partial: Tensor  # float32 [S, H, parts, D]
    partial_lse: Tensor  # float32 [S, H, parts]


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Longer chunks. ``tiles`` int32 [4, N]: first query row, its offset in the chunk, rows, sequence."""

    indptr: Tensor
    indices: Tensor
    tiles: Tensor
    starts: Tensor  # int32 [S]: context before the chunk


@dataclass(frozen=True, slots=True)
class TritonPlan:
    decode: DecodePart | None
    chunks: ChunkPart | None


class TritonDecodePlan:
    """A plan whose tensors stay where they are, for CUDA graphs. Implements ``kernels.api.DecodePlan``."""

    def __init__(
        self, shape: AttentionShape, batch_size: int, max_blocks: int, partials: tuple[DecodeLaunch, Tensor, Tensor]
    ) -> None:
        self._block_size = shape.block_size
        sizes = (batch_size + 1, batch_size * max_blocks, batch_size)
        buffers = [torch.zeros(size, dtype=torch.int32, device=shape.device) for size in sizes]
        indptr, indices, context_lens = buffers
        self._part = DecodePart(batch_size, indptr, indices, context_lens, *partials)
        self.fixed = TritonPlan(self._part, None)

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        part, tables = self._part, flat_tables(batch, self._block_size)
        assert len(tables.context_lens) == part.num_sequences and len(tables.indices) <= part.indices.shape[0]
        arrays = (tables.indptr, tables.indices, tables.context_lens)
        copy_arrays(arrays, (part.indptr, part.indices, part.context_lens))


class TritonMixedPlan:
    """As :class:`TritonDecodePlan`, with chunks after the sequences that decode, which may be none; tiles left over
    have no rows."""

    def __init__(
        self,
        shape: AttentionShape,
        num_decodes: int,
        num_chunk_tokens: int,
        num_chunks: int,
        max_blocks: int,
        partials: tuple[DecodeLaunch, Tensor, Tensor] | None,
    ) -> None:
        self._block_size = shape.block_size
        num_sequences = num_decodes + num_chunks
        num_tiles = num_chunk_tokens // QUERY_TILE + num_chunks
        sizes = (num_sequences + 1, num_sequences * max_blocks, num_sequences, 4 * num_tiles, num_chunks)
        self._buffers = [torch.zeros(size, dtype=torch.int32, device=shape.device) for size in sizes]
        indptr, indices, context_lens, tiles, starts = self._buffers
        decode = DecodePart(num_decodes, indptr, indices, context_lens, *partials) if partials else None
        chunks = ChunkPart(indptr[num_decodes:], indices, tiles.view(4, num_tiles), starts)
        self.fixed = TritonPlan(decode, chunks)
        self._num_decodes, self._num_chunks, self._num_tiles = num_decodes, num_chunks, num_tiles

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        tables = flat_tables(batch, self._block_size)
        tiles, starts = chunk_tiles(batch, self._num_decodes)
        left_over = self._num_tiles - tiles.shape[1]
        assert left_over >= 0 and len(starts) <= self._num_chunks
        tiles = np.pad(tiles, ((0, 0), (0, left_over)))
        copy_arrays((tables.indptr, tables.indices, tables.context_lens, tiles.ravel(), starts), self._buffers)


def chunk_tiles(batch: PagedBatch, first: int) -> tuple[Int32Array, Int32Array]:
    """Tiles and starts of :class:`ChunkPart` of the sequences from ``first`` on, before which each has one row."""
    tiles: list[tuple[int, int, int, int]] = []
    row = first
    for index, query_len in enumerate(batch.query_lens[first:]):
        tiles += [
            (row + offset, offset, min(QUERY_TILE, query_len - offset), index)
            for offset in range(0, query_len, QUERY_TILE)
        ]
        row += query_len
    tiles.sort(key=lambda tile: -tile[1])  # those that see most start first
    starts = np.subtract(batch.context_lens[first:], batch.query_lens[first:]).astype(np.int32)
    return np.ascontiguousarray(np.array(tiles, dtype=np.int32).reshape(-1, 4).T), starts


def copy_arrays(arrays: Sequence[Int32Array], targets: Sequence[Tensor]) -> None:
    """Into the beginnings of ``targets``, flat buffers on the device, in the stream's order, by one copy from pinned
    memory."""
    packed = torch.from_numpy(np.concatenate(arrays))
    parts = torch.split(to_device(packed, targets[0].device), [len(array) for array in arrays])
    for target, part in zip(targets, parts, strict=True):
        target[: part.shape[0]].copy_(part)
