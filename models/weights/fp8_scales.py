"""The scales that stand beside FP8 weights in a checkpoint: one per tensor, or one per block of 128 by 128."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from splitserve.common.errors import CheckpointError
from splitserve.kernels.fp8.weight import Fp8Weight
from splitserve.models.layers.weight import fp8_scale_name
from splitserve.models.weights.checkpoint import TensorRecord
from splitserve.models.weights.shard import Part, Parts
from splitserve.models.weights.stored_tensors import StoredTensors

FP8 = "F8_E4M3"


class ScaleReader:
    """Scales of a checkpoint's FP8 weights, cut as the weights are."""

    def __init__(self, records: Mapping[str, TensorRecord], block: Sequence[int] | None) -> None:
        """``block``: rows and columns that share a scale; None: a tensor's all do."""
        self._records = records
        self._block = block
        self._tensors = StoredTensors(records)

    def is_fp8(self, parts: Parts) -> bool:
        """Return whether ``parts`` are stored in FP8. Raises :class:`CheckpointError` if only some of them are."""
        stored = [self._records[part.name].dtype == FP8 for part in parts]
        if any(stored) and not all(stored):
            names = ", ".join(part.name for part in parts)
            raise CheckpointError(f"{names} are computed as one: either all or none of them can be stored in FP8")
        return all(stored)

    def with_scales(self, weight: Tensor, parts: Parts) -> Fp8Weight:
        """``weight``, which holds ``parts``, with their scales, on its device."""
        scales = torch.cat([self._scales(part) for part in parts]).to(weight.device)
        start = 0 if parts[0].columns is None else parts[0].columns.start
        group = self._records[parts[0].name].shape[1] if self._block is None else self._block[1]
        return Fp8Weight(weight, scales, group, start % group)

    def close(self) -> None:
        self._tensors.close()

    def _scales(self, part: Part) -> Tensor:
        """float32 [rows of the part, groups of columns that it has a share in]."""
        num_rows, num_columns = self._records[part.name].shape
        rows, columns = part.rows or range(num_rows), part.columns or range(num_columns)
        name = fp8_scale_name(part.name, self._records, in_blocks=self._block is not None)
        scales = self._tensors.view(name).float()
        if self._block is None:
            return scales.reshape(1, 1).expand(len(rows), 1)
        block_rows, block_columns = self._block
        scales = scales[torch.arange(rows.start, rows.stop) // block_rows]
        return scales[:, columns.start // block_columns : -(-columns.stop // block_columns)]
