"""Plans of latent attention on GPUs in which each query token is a row with a context of its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.paged import Int32Array, flat_tables, num_leading_decodes
from splitserve.kernels.triton.attention.plans import FixedArrays

PROGRAMS_PER_DEVICE = 528  # 4 for each of an H100's 132 multiprocessors
MAX_PARTS = 32
MAX_HEADS = 32  # of one program
MAX_REPEATED_TOKENS = 500_000
"""Tokens of context that a replay may read again in each layer: of 1,152 bytes in 16 bits with DeepSeek's sizes, which
takes an H200 some 0.14 ms. A replay saves 0.1 to 0.6 ms of a layer (docs/decisions/037-latent-graphs.md)."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Device arrays, int32: row i has the blocks from ``indices[starts[i]]`` on, and attends to ``contexts[i]``
    tokens. With several parts of contexts there are buffers for their results."""

    starts: Tensor  # [T]
    contexts: Tensor  # [T]
    indices: Tensor  # blocks of all sequences
    num_parts: int
    partial: Tensor  # float32 [T, H, parts, rank]; empty with one part
    partial_lse: Tensor  # float32 [T, H, parts]: logarithms to base 2


def heads_per_program(num_heads: int) -> int:
    """Return the largest divisor of ``num_heads`` that one program handles."""
    return max(size for size in range(1, min(num_heads, MAX_HEADS) + 1) if num_heads % size == 0)


def row_arrays(batch: PagedBatch, block_size: int) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Return starts, contexts and indices of :class:`RowPlan`."""
    tables = flat_tables(batch, block_size)
    lens = np.asarray(batch.query_lens, dtype=np.int32)
    ends = np.cumsum(lens, dtype=np.int32)
    behind = np.repeat(ends, lens) - np.arange(int(ends[-1]), dtype=np.int32) - 1  # later rows of the same sequence
    contexts = np.repeat(tables.context_lens, lens) - behind
    return np.repeat(tables.indptr[:-1], lens), contexts.astype(np.int32), tables.indices


class RowWorkspace:
    """Memory for the parts of contexts, shared by all plans of an attention: 17 MB in DeepSeek-V2-Lite's shape."""

    def __init__(self, shape: AttentionShape) -> None:
        assert shape.latent is not None
        heads = heads_per_program(shape.num_heads)
        self._num_heads, self._rank = shape.num_heads, shape.latent.rank
        self._programs_per_row = shape.num_heads // heads
        most = PROGRAMS_PER_DEVICE * heads  # parts of all heads of all rows
        self._partial = torch.empty(most * self._rank, dtype=torch.float32, device=shape.device)
        self._partial_lse = torch.empty(most, dtype=torch.float32, device=shape.device)

    def plan(self, arrays: Sequence[Tensor]) -> RowPlan:
        """Return a plan of starts, contexts and indices."""
        starts, contexts, indices = arrays
        num_rows = starts.shape[0]
        num_parts = max(1, min(MAX_PARTS, PROGRAMS_PER_DEVICE // (num_rows * self._programs_per_row)))
        sizes = (num_rows if num_parts > 1 else 0, self._num_heads, num_parts)
        partial = self._partial[: math.prod(sizes) * self._rank].view(*sizes, self._rank)
        lse = self._partial_lse[: math.prod(sizes)].view(sizes)
        return RowPlan(starts, contexts, indices, num_parts, partial, lse)


class PlanSize(NamedTuple):
    """The size that a plan keeps. Query tokens and sequences include the leading sequences of one token each, of which
    every batch has ``num_decodes``."""

    num_decodes: int
    num_tokens: int
    num_sequences: int

    def repeats_much(self, batch: PagedBatch) -> bool:
        """Return whether ``batch``, which isn't padded yet, leaves so many rows of decodes, which will repeat its last
        decode, that reading their contexts takes too long."""
        first = num_leading_decodes(batch)
        return first > 0 and (self.num_decodes - first) * batch.context_lens[first - 1] > MAX_REPEATED_TOKENS


class FixedRowPlan:
    """A plan whose tensors keep their addresses, for CUDA graphs. Implements ``kernels.api.MixedPlan``. Unused rows
    attend to one token."""

    def __init__(self, shape: AttentionShape, size: PlanSize, max_blocks: int, workspace: RowWorkspace) -> None:
        self._block_size, self._size = shape.block_size, size
        self._numbers = FixedArrays((size.num_tokens, size.num_tokens, size.num_sequences * max_blocks), shape.device)
        self.fixed = workspace.plan(self._numbers.arrays)

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        starts, contexts, indices = row_arrays(batch, self._block_size)
        num_unused = self._size.num_tokens - len(starts)
        assert num_leading_decodes(batch) >= self._size.num_decodes and num_unused >= 0
        assert len(indices) <= self.fixed.indices.shape[0]
        starts, contexts = np.pad(starts, (0, num_unused)), np.pad(contexts, (0, num_unused), constant_values=1)
        self._numbers.fill((starts, contexts, indices))

    def suits(self, batch: PagedBatch, /) -> bool:
        """See :class:`splitserve.kernels.api.MixedPlan`."""
        return not self._size.repeats_much(batch)
