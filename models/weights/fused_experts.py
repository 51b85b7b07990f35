"""Stacks of experts: checkpoints that store a layer's experts as one tensor, and conversion of those in FP8.

A fused tensor is read as if each expert's matrices were tensors of their own.

``experts.gate_up_proj`` [E, 2 * inner, hidden] holds the rows of each expert's gate, then those of its up projection;
``experts.down_proj`` [E, hidden, inner] each expert's down projection. Scales of FP8 weights are stored likewise.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from splitserve.common.errors import CheckpointError
from splitserve.kernels.fp8.weight import Fp8Weight
from splitserve.models.layers.weight import Role, Weight
from splitserve.models.weights.checkpoint import ITEM_BITS, TensorRecord

_INPUTS, _OUTPUT = "gate_up_proj", "down_proj"
_ENDINGS = {"": ".weight", ".weight": ".weight", "_scale_inv": ".weight_scale_inv", "_scale": ".weight_scale"}


def expert_records(records: Mapping[str, TensorRecord], weights: Iterable[Weight]) -> dict[str, TensorRecord]:
    """Return ``records`` with the parts of fused tensors by the names that ``weights`` have for them.

    Raises :class:`CheckpointError` for a fused tensor of the wrong number of dimensions, experts or rows.
    """
    found = dict(records)
    for experts, projections in _projections(weights).items():
        inputs, output = projections[:-1], projections[-1:]
        for fused, names in ((_INPUTS, inputs), (_OUTPUT, output)):
            for ending, own_ending in _ENDINGS.items():
                record = found.pop(f"{experts}.{fused}{ending}", None)
                if record is not None:
                    found |= _parts(record, experts, [f"{name}{own_ending}" for name in names])
    return found


def _projections(weights: Iterable[Weight]) -> dict[str, list[str]]:
    """Return the names of an expert's matrices, in their order, by the name that all experts of a layer begin with."""
    found: dict[str, list[str]] = {}
    for weight in weights:
        if weight.role is Role.EXPERT and weight.expert is not None and weight.expert.index == 0:
            experts, _, name, _ = weight.name.rsplit(".", 3)
            found.setdefault(experts, []).append(name)
    return found


def _parts(record: TensorRecord, experts: str, names: list[str]) -> Iterator[tuple[str, TensorRecord]]:
    """Yield each expert's parts of a fused tensor, equal numbers of its rows, and their names."""
    if len(record.shape) != 3 or record.shape[1] % len(names):
        raise CheckpointError(
            f"tensor {record.name} in {record.file.name} has shape {list(record.shape)}; all experts' matrices as one "
            f"need three dimensions, the second a multiple of {len(names)}"
        )
    count, rows, columns = record.shape
    rows //= len(names)
    part_bytes = rows * columns * ITEM_BITS.get(record.dtype, 8) // 8
    for index in range(count * len(names)):
        expert, which = divmod(index, len(names))
        yield (
            f"{experts}.{expert}.{names[which]}",
            replace(
                record,
                shape=(rows, columns),
                offset=record.offset + index * part_bytes,
                section=(expert, range(which * rows, (which + 1) * rows)),
            ),
        )


def dequantised_experts(weight: Fp8Weight, count: int, dtype: torch.dtype) -> Tensor:
    """Return the matrices [count, rows, columns] of a stack in ``dtype``: one at a time, since their float32 forms
    together would be several times as large."""
    rows, columns = weight.weight.shape[0] // count, weight.weight.shape[1]
    out = torch.empty((count, rows, columns), dtype=dtype, device=weight.weight.device)
    for index, matrix in enumerate(out):
        own = slice(index * rows, (index + 1) * rows)
        matrix.copy_(replace(weight, weight=weight.weight[own], scales=weight.scales[own]).dequantised(dtype))
    return out
