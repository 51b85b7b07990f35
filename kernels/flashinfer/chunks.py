"""Plans of prompts' chunks for FlashInfer's kernels that read paged memory in place: for one step, or, with
FlashAttention 3, for CUDA graphs, since its grid is the number of multiprocessors, whatever the chunks."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.flashinfer.ragged import score_options
from splitserve.kernels.paged import FlatTables, flat_tables, last_block_lens
from splitserve.kernels.triton.attention.plans import FixedArrays


@dataclass(frozen=True, slots=True)
class PagedChunkPlan:
    """Plan of a step's chunks. ``wrapper``: FlashInfer's, which has their numbers."""

    wrapper: Any


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """The room of a plan of fixed size."""

    num_chunks: int
    num_tokens: int  # query tokens of all chunks
    max_blocks: int  # of one chunk's context


class FixedChunkPlan:
    """A plan whose tensors keep their addresses. ``wrapper``: FlashInfer's, which has the numbers of the last
    update."""

    def __init__(
        self, shape: AttentionShape, limits: ChunkLimits, make_wrapper: Callable[..., Any], pinned: Iterator[Tensor]
    ) -> None:
        """``make_wrapper`` makes a wrapper that has the given tensors; ``pinned``: host buffers for its plans."""
        self._shape, self._num_chunks, self._pinned = shape, limits.num_chunks, pinned
        sizes = (limits.num_chunks + 1, limits.num_chunks + 1, limits.num_chunks)
        query_ends, table_ends, last_lens = (
            torch.zeros(size, dtype=torch.int32, device=shape.device) for size in sizes
        )
        self._indices = FixedArrays((limits.num_chunks * limits.max_blocks,), shape.device)
        self.wrapper = make_wrapper(
            use_cuda_graph=True,
            qo_indptr_buf=query_ends,
            paged_kv_indptr_buf=table_ends,
            paged_kv_indices_buf=self._indices.arrays[0],
            paged_kv_last_page_len_buf=last_lens,
        )
        self.wrapper._max_total_num_rows = limits.num_tokens  # else the first update would set it

    def update(self, chunks: PagedBatch) -> None:
        """Fill the plan, in the order of the current stream."""
        num_more = self._num_chunks - len(chunks.query_lens)
        padded = PagedBatch(
            [*chunks.query_lens, *[0] * num_more],
            [*chunks.context_lens, *[0] * num_more],
            [*chunks.block_tables, *[()] * num_more],
        )
        tables = flat_tables(padded, self._shape.block_size)
        self._indices.fill((tables.indices,))  # FlashInfer, which copies the other arrays, would wait for this copy
        indices = self._indices.arrays[0][: len(tables.indices)]
        self.wrapper._pin_memory_int_workspace_buffer = next(self._pinned)
        plan_chunks(self.wrapper, padded, tables, indices, self._shape)


def plan_chunks(wrapper: Any, chunks: PagedBatch, tables: FlatTables, indices: Tensor, shape: AttentionShape) -> None:
    """Give ``wrapper`` the numbers of a step's chunks. ``tables``: of these chunks; ``indices``: the blocks in them, in
    pinned memory or on the device."""
    query_ends = torch.tensor([0, *itertools.accumulate(chunks.query_lens)], dtype=torch.int32)
    wrapper.plan(
        query_ends.pin_memory(),
        torch.from_numpy(tables.indptr).pin_memory(),
        indices,
        last_block_lens(tables, shape.block_size).pin_memory(),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        causal=True,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        **score_options(shape),
    )
