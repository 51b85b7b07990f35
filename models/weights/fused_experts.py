"""Stacks of experts: checkpoints that store a layer's experts as one tensor, and conversion of those in FP8 or MXFP4.

A fused tensor is read as if each expert's matrices were tensors of their own.

``experts.gate_up_proj`` [E, 2 * inner, hidden] holds the rows of each expert's gate, then those of its up projection;
``experts.down_proj`` [E, hidden, inner] each expert's down projection. Scales of FP8 weights are stored likewise, and
biases without the last dimension. Some families store the transposed matrices, or, in MXFP4, ``..._blocks``
[E, rows, groups, 16] and ``..._scales`` [E, rows, groups] of 32 elements each.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from splitserve.common.errors import CheckpointError
from splitserve.kernels.experts.mxfp4 import dequantised
from splitserve.kernels.fp8.weight import Fp8Weight
from splitserve.models.layers.weight import Role, Weight
from splitserve.models.weights.checkpoint import ITEM_BITS, TensorRecord

_INPUTS, _OUTPUT = "gate_up_proj", "down_proj"
_ENDINGS = {"": ".weight", ".weight": ".weight", "_scale_inv": ".weight_scale_inv", "_scale": ".weight_scale"}
_ENDINGS |= {"_bias": ".bias", "_blocks": ".blocks", "_scales": ".scales"}
_MATRICES = (Role.EXPERT, Role.EXPERT_BLOCKS)


def expert_records(records: Mapping[str, TensorRecord], weights: Iterable[Weight]) -> dict[str, TensorRecord]:
    """Return ``records`` with the parts of fused tensors by the names that ``weights`` have for them.

    Raises :class:`CheckpointError` for a fused tensor of the wrong number of dimensions, experts or rows.
    """
    found = dict(records)
    for experts, matrices in _matrices(weights).items():
        for fused, own in ((_INPUTS, matrices[:-1]), (_OUTPUT, matrices[-1:])):
            for ending, own_ending in _ENDINGS.items():
                record = found.pop(f"{experts}.{fused}{ending}", None)
                if record is not None:
                    names = [f"{_projection(weight)}{own_ending}" for weight in own]
                    found |= _parts(record, experts, names, is_transposed=not ending and own[0].is_transposed)
    return found


def _matrices(weights: Iterable[Weight]) -> dict[str, list[Weight]]:
    """Return the first expert's matrices, in their order, by the name that all experts of a layer begin with."""
    found: dict[str, list[Weight]] = {}
    for weight in weights:
        if weight.role in _MATRICES and weight.expert is not None and weight.expert.index == 0:
            found.setdefault(weight.name.rsplit(".", 3)[0], []).append(weight)
    return found


def _projection(weight: Weight) -> str:
    return weight.name.rsplit(".", 2)[1]


def _parts(
    record: TensorRecord, experts: str, names: list[str], *, is_transposed: bool
) -> Iterator[tuple[str, TensorRecord]]:
    """Yield each expert's parts of a fused tensor, equal numbers of its rows, and their names."""
    needed = {".bias": 2, ".blocks": 4}.get(names[0][names[0].rindex(".") :], 3)
    if len(record.shape) != needed or record.shape[1] % len(names):
        number = {2: "two", 3: "three", 4: "four"}[needed]
        raise CheckpointError(
            f"tensor {record.name} in {record.file.name} has shape {list(record.shape)}; all experts' matrices as one "
            f"need {number} dimensions, the second a multiple of {len(names)}"
        )
    count, rows, *rest = record.shape
    rows //= len(names)
    shape = (rows, math.prod(rest)) if rest else (rows,)
    part_bytes = math.prod(shape) * ITEM_BITS.get(record.dtype, 8) // 8
    for index in range(count * len(names)):
        expert, which = divmod(index, len(names))
        yield (
            f"{experts}.{expert}.{names[which]}",
            replace(
                record,
                shape=shape[::-1] if is_transposed else shape,
                offset=record.offset + index * part_bytes,
                section=(expert, range(which * rows, (which + 1) * rows)),
                is_transposed=is_transposed,
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


def dequantised_blocks(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrices [count, rows, columns] of experts in MXFP4 in ``dtype``, likewise one at a time."""
    count, rows, half = blocks.shape
    out = torch.empty((count, rows, 2 * half), dtype=dtype, device=blocks.device)
    for index, matrix in enumerate(out):
        matrix.copy_(dequantised(blocks[index], scales[index], dtype))
    return out
