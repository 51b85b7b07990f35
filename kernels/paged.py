"""A :class:`PagedBatch` as flat arrays, the form that GPU backends use."""

from array import array
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve.kernels.api import PagedBatch

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class FlatTables:
    """Block tables as flat arrays, all int32: sequence i has blocks ``indices[indptr[i] : indptr[i + 1]]``, exactly
    those that its context covers."""

    indptr: Int32Array  # [S + 1]
    indices: Int32Array  # [indptr[S]]
    context_lens: Int32Array  # [S]


def flat_tables(batch: PagedBatch, block_size: int, first: int = 0) -> FlatTables:
    """Return the tables of the sequences from ``first`` on. Raises ValueError if a table doesn't cover its context."""
    context_lens = batch.context_lens[first:]
    counts = [-(-length // block_size) for length in context_lens]
    indices = array("i")  # takes half the time of numpy to read lists
    for table, count in zip(batch.block_tables[first:], counts, strict=True):
        indices.fromlist(list(table[:count]))
    indptr = np.array([0, *accumulate(counts)], dtype=np.int32)
    if len(indices) != indptr[-1]:
        raise ValueError("a block table is shorter than its context")
    return FlatTables(indptr, np.array(indices, dtype=np.int32), np.array(context_lens, dtype=np.int32))


def part_of(batch: PagedBatch, first: int, end: int | None = None) -> PagedBatch:
    """Return the sequences of ``batch`` from ``first`` on, before ``end``."""
    part = slice(first, end)
    return PagedBatch(batch.query_lens[part], batch.context_lens[part], batch.block_tables[part])


def last_block_lens(tables: FlatTables, block_size: int) -> Tensor:
    """Return the number of tokens in each sequence's last block, int32 [S] on the host; 0 without a block."""
    return torch.from_numpy(np.minimum((tables.context_lens - 1) % block_size + 1, tables.context_lens))


def num_leading_decodes(batch: PagedBatch) -> int:
    """Return the number of sequences before the first one with more than one query token."""
    for index, query_len in enumerate(batch.query_lens):
        if query_len != 1:
            return index
    return len(batch.query_lens)
