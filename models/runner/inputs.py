"""The numbers that a step's forward pass reads on a CUDA device: packed on the host, copied at once."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitserve.kernels.windows import FixedLayerPlans
from splitserve.models.runner.cache import RunnerCache
from splitserve.models.runner.graph_sizes import MixedSize
from splitserve.protocol.step import ScheduledChunk

Int64Array = npt.NDArray[np.int64]

_NO_ROW = -1
_NO_BLOCK = -1


class StepInputs:
    """Packs the chunks of steps over ``cache``. ``row_of_chunk``: of the step launched last, the rows of its drawn
    tokens, by chunk."""

    def __init__(self, cache: RunnerCache) -> None:
        self._cache = cache
        self.row_of_chunk: dict[int, int] = {}

    @property
    def num_rows(self) -> int:
        """The rows of a step's inputs: see :class:`.graphs.DecodeGraph`."""
        return 3 + self._cache.num_groups

    def flatten(self, chunks: Sequence[ScheduledChunk], out: Int64Array) -> Int64Array:
        """Fill ``out`` [3 + N, T] as described in :class:`.graphs.DecodeGraph`; return the rows that draw."""
        rows, first, block_size = [], 0, self._cache.block_size
        for chunk in chunks:
            end = first + len(chunk.token_ids)
            positions = np.arange(chunk.start, chunk.start + end - first)
            out[0, first:end] = chunk.token_ids
            out[1, first:end] = positions
            out[2, first:end] = self._previous_row(chunk)
            out[3, first:end] = np.asarray(chunk.block_ids)[positions // block_size]
            for row, table in enumerate(chunk.other_tables, 4):
                out[row, first:end] = np.asarray(table.block_ids)[positions // block_size - table.first_number]
            if chunk.sample is not None:
                rows.append(end - 1)
            first = end
        return np.array(rows, dtype=np.int64)

    def fill(self, inputs: Tensor, plan: FixedLayerPlans, chunks: Sequence[ScheduledChunk], size: int) -> None:
        """Fill the inputs and the plan of a :class:`.graphs.DecodeGraph` of ``size`` sequences, in the stream's
        order."""
        padded = [*chunks, *[chunks[-1]] * (size - len(chunks))]
        block_size = self._cache.block_size
        numbers = [
            [chunk.token_ids[0] for chunk in padded],
            [chunk.start for chunk in padded],
            [self._previous_row(chunk) for chunk in padded],
            [chunk.block_ids[chunk.start // block_size] for chunk in padded],
        ]
        groups = range(1, self._cache.num_groups)
        numbers += [[chunk.table(group).block_ids[-1] for chunk in padded] for group in groups]
        inputs.copy_(torch.from_numpy(np.array(numbers, dtype=np.int64)).pin_memory(), non_blocking=True)
        plan.update(self._cache.batches(padded))

    def fill_mixed(
        self, inputs: Tensor, plan: FixedLayerPlans, chunks: Sequence[ScheduledChunk], size: MixedSize
    ) -> None:
        """Fill those of a :class:`.graphs.MixedGraph`, likewise."""
        num_decodes = num_leading_decodes(chunks)
        decodes, longer = chunks[:num_decodes], chunks[num_decodes:]
        repeated = [decodes[-1]] * (size.num_decodes - num_decodes) if decodes else []
        padded = [*decodes, *repeated, *longer]
        flat = np.zeros((self.num_rows, sum(size)), dtype=np.int64)
        flat[2], flat[3:] = _NO_ROW, _NO_BLOCK
        rows = self.flatten(padded, flat)
        drawing = np.concatenate((rows[:num_decodes], rows[size.num_decodes :]))
        left_over = inputs.shape[0] - flat.size - len(drawing)
        packed = np.concatenate((flat.ravel(), drawing, np.zeros(left_over, dtype=np.int64)))
        inputs.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)
        plan.update(self._cache.batches(padded))

    def _previous_row(self, chunk: ScheduledChunk) -> int:
        """Return the row of the token that ``chunk`` continues among those drawn last. After a failed launch any row
        will do, since its sequences end."""
        if chunk.previous_chunk is None:
            return _NO_ROW
        return self.row_of_chunk.get(chunk.previous_chunk, 0)


def num_leading_decodes(chunks: Sequence[ScheduledChunk]) -> int:
    """Return the number of leading chunks that have one token and draw."""
    for index, chunk in enumerate(chunks):
        if len(chunk.token_ids) != 1 or chunk.sample is None:
            return index
    return len(chunks)
