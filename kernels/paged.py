"""A :class:`PagedBatch` as flat arrays, the form that GPU backends use."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

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
    """Return the tables of the sequences from ``first`` on."""
    context_lens = np.asarray(batch.context_lens[first:], dtype=np.int32)
    counts = -(-context_lens // block_size)
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    tables = (table[:count] for table, count in zip(batch.block_tables[first:], counts.tolist(), strict=True))
    indices = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(indptr[-1]))
    return FlatTables(indptr, indices, context_lens)


def num_leading_decodes(batch: PagedBatch) -> int:
    """Return the number of sequences before the first one with more than one query token."""
    for index, query_len in enumerate(batch.query_lens):
        if query_len != 1:
            return index
    return len(batch.query_lens)
