"""Attention of long prompt chunks: keys and values are gathered into one tensor, then FlashInfer's FlashAttention 3
runs on it.

FlashInfer's kernel for paged memory computes the address of each element of keys and values; the kernel for contiguous
tensors loads them with the bulk copy engine, which saves more time than the gathering takes.
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

MIN_QUERY_TOKENS = 512  # per step: with fewer, gathering takes longer than it saves
MAX_CONTEXT_TOKENS = 1 << 16  # per step: bounds the memory for gathered keys and values
_NUM_PINNED = 5  # plans of two steps in flight and of the rehearsals before them, plus one


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """Plan of a step's chunks. ``tiles`` int32 [3, N]: block, first token among the gathered ones, number of tokens."""

    tiles: Tensor
    num_tokens: int


class RaggedPrefill:
    """Attention of chunks of several sequences at once. Compute capability 9.0 only."""

    def __init__(self, flashinfer: Any, shape: AttentionShape, workspace: Tensor) -> None:
        self._shape = shape
        self._wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        self._pinned = pinned_buffers(self._wrapper)

    @staticmethod
    def serves(batch: PagedBatch, first: int) -> bool:
        """Return whether ragged attention is the better choice for the chunks of ``batch`` from ``first`` on."""
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
            **score_options(shape),
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
        """Attend with the query tokens of the planned chunks. ``query``, ``out``: [T, H, D]; ``kv_layer``: [num_blocks,
        G, 2, B, D]."""
        keys, values = gather_tokens(kv_layer, plan.tiles, plan.num_tokens)
        self._wrapper.run(query, keys, values, out=out)


def pinned_buffers(wrapper: Any) -> Iterator[Tensor]:
    """Return an endless iterator over host buffers for the plans of ``wrapper``, and of others that are used in its
    place."""
    first = wrapper._pin_memory_int_workspace_buffer
    buffers = [first, *(torch.empty_like(first, pin_memory=True) for _ in range(_NUM_PINNED - 1))]
    return itertools.cycle(buffers)


def score_options(shape: AttentionShape) -> dict[str, float]:
    """Return a plan's arguments about scores, where they differ from FlashInfer's defaults."""
    options: dict[str, float] = {}
    if shape.scale is not None:
        options["sm_scale"] = shape.scale
    if shape.soft_cap is not None:
        options["logits_soft_cap"] = shape.soft_cap
    if shape.window is not None:
        options["window_left"] = shape.window - 1  # tokens before the query's own
    return options
