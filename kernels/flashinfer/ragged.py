"""Attention of long prompt chunks: keys and values gathered into one tensor, then FlashInfer's FlashAttention 3 on it.

Its kernel for paged memory reads keys and values element by address; the one for plain tensors has the bulk copy
engine bring them, which more than pays for the gathering.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.triton.gather import gather_tokens
from splitserve.kernels.triton.sampling import to_device

MIN_QUERY_TOKENS = 512  # of a step: with fewer, gathering takes longer than it saves
MAX_CONTEXT_TOKENS = 1 << 16  # of a step: bounds the memory that is gathered into
_NUM_PINNED = 4  # plans under way at once, and one more


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """``tiles`` int32 [3, N]: block, first token among those gathered, number of tokens."""

    tiles: Tensor
    num_tokens: int


class RaggedPrefill:
    """Chunks of several sequences at once. On compute capability 9.0 only."""

    def __init__(self, flashinfer: Any, shape: AttentionShape, workspace: Tensor) -> None:
        self._shape = shape
        self._wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        self._pinned = pinned_buffers(self._wrapper)

    @staticmethod
    def serves(batch: PagedBatch, first: int) -> bool:
        """Whether it is the better choice for the chunks of ``batch`` from ``first`` on."""
        return (
            sum(batch.query_lens[first:]) >= MIN_QUERY_TOKENS and sum(batch.context_lens[first:]) <= MAX_CONTEXT_TOKENS
        )

    def plan(self, batch: PagedBatch, first: int) -> RaggedPlan:
        shape = self._shape
        ends = [
            torch.tensor([0, *itertools.accumulate(lens[first:])], dtype=torch.int32)
            for lens in (batch.query_lens, batch.context_lens)
        ]
        self._wrapper._pin_memory_int_workspace_buffer = next(self._pinned)
        self._wrapper.plan(
            *(end.pin_memory() for end in ends),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        tiles = [
            (block, start + offset, min(shape.block_size, context - offset))
            for start, context, table in zip(
                ends[1].tolist(), batch.context_lens[first:], batch.block_tables[first:], strict=False
            )
            for block, offset in zip(table, range(0, context, shape.block_size), strict=False)
        ]
        flat = torch.from_numpy(np.ascontiguousarray(np.array(tiles, dtype=np.int32).T))
        return RaggedPlan(to_device(flat, shape.device), int(ends[1][-1]))

    def run(self, query: Tensor, kv_layer: Tensor, plan: RaggedPlan, out: Tensor) -> None:
        """``query``, ``out`` [T, H, D]: those of the planned chunks; ``kv_layer`` [num_blocks, G, 2, B, D]."""
        keys, values = gather_tokens(kv_layer, plan.tiles, plan.num_tokens)
        self._wrapper.run(query, keys, values, out=out)


def pinned_buffers(wrapper: Any) -> Iterator[Tensor]:
    """Endlessly: host buffers for ``wrapper``'s plans, in turn."""
    first = wrapper._pin_memory_int_workspace_buffer
    buffers = [first, *(torch.empty_like(first, pin_memory=True) for _ in range(_NUM_PINNED - 1))]
    return itertools.cycle(buffers)
