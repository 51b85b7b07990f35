"""Plans of latent attention on GPUs in which each query token is a row with a context of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.paged import Int32Array, flat_tables
from splitserve.kernels.triton.plans import FixedArrays

PROGRAMS_PER_DEVICE = 528  # 4 for each of an H100's 132 multiprocessors
MAX_PARTS = 32
MAX_HEADS = 32  # of one program


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


def make_row_plan(shape: AttentionShape, arrays: Sequence[Tensor]) -> RowPlan:
    """Return a plan of starts, contexts and indices, with its buffers."""
    assert shape.latent is not None
    starts, contexts, indices = arrays
    num_rows = starts.shape[0]
    programs = num_rows * (shape.num_heads // heads_per_program(shape.num_heads))
    num_parts = max(1, min(MAX_PARTS, PROGRAMS_PER_DEVICE // programs))
    sizes = (num_rows if num_parts > 1 else 0, shape.num_heads, num_parts)
    partial = torch.empty((*sizes, shape.latent.rank), dtype=torch.float32, device=shape.device)
    lse = torch.empty(sizes, dtype=torch.float32, device=shape.device)
    return RowPlan(starts, contexts, indices, num_parts, partial, lse)


class FixedRowPlan:
    """A plan whose tensors keep their addresses, for CUDA graphs. Implements ``kernels.api.DecodePlan``. Rows that a
    batch doesn't use repeat its last one, so that their results are numbers."""

    def __init__(self, shape: AttentionShape, num_rows: int, num_sequences: int, max_blocks: int) -> None:
        self._block_size, self._num_rows = shape.block_size, num_rows
        self._numbers = FixedArrays((num_rows, num_rows, num_sequences * max_blocks), shape.device)
        self.fixed = make_row_plan(shape, self._numbers.arrays)

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        starts, contexts, indices = row_arrays(batch, self._block_size)
        num_unused = self._num_rows - len(starts)
        assert num_unused >= 0 and len(indices) <= self.fixed.indices.shape[0]
        starts, contexts = (np.pad(array, (0, num_unused), mode="edge") for array in (starts, contexts))
        self._numbers.fill((starts, contexts, indices))

    def suits(self, _batch: PagedBatch, /) -> bool:
        """Return True: there is one form of attention. See :class:`splitserve.kernels.api.DecodePlan`."""
        return True
