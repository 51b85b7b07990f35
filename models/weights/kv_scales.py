"""Scales of keys and values that are kept in FP8: a checkpoint's scales, folded into its weights.

A key is stored divided by its layer's scale, and queries are multiplied by it, so that scores stay what they are; a
value is stored divided by its scale, and the output projection multiplies by it. All of that is linear in weights that
come right before or after (the norms of queries and keys, where there are any, else the projections), so it is done
once, at load, and costs no step anything. Scales are rounded up to powers of two, which changes no digit of a weight.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.common.errors import CheckpointError
from splitserve.kernels.fp8.weight import Fp8Weight
from splitserve.models.weights.checkpoint import TensorRecord
from splitserve.models.weights.stored_tensors import StoredTensors


@dataclass(frozen=True, slots=True)
class KVScales:
    """One layer's scales: powers of two."""

    key: float = 1.0
    value: float = 1.0


def read_kv_scales(
    records: Mapping[str, TensorRecord], key_names: Sequence[str], value_names: Sequence[str]
) -> KVScales:
    """Return a layer's scales by the first of the names that the checkpoint has: 1 where it has none.

    Raises :class:`CheckpointError` for a tensor that is no scale.
    """
    return KVScales(_read_first(records, key_names), _read_first(records, value_names))


def _read_first(records: Mapping[str, TensorRecord], names: Sequence[str]) -> float:
    for name in names:
        if name in records:
            scale = _read(records, name)
            if not (math.isfinite(scale) and scale > 0.0):
                raise CheckpointError(f"tensor {name} is {scale}; a scale is a positive number")
            return float(2.0 ** math.ceil(math.log2(scale)))
    return 1.0


def _read(records: Mapping[str, TensorRecord], name: str) -> float:
    shape = records[name].shape
    if math.prod(shape) != 1:
        raise CheckpointError(f"tensor {name} has shape {list(shape)}; a scale for the whole is needed")
    return float(StoredTensors(records).view(name).float().item())


def scaled_rows(weight: Tensor, factors: Sequence[tuple[int, float]]) -> Tensor:
    """``weight`` [N, ...], each of the (number of rows, factor) times its factor; itself if all of those are 1."""
    if all(factor == 1.0 for _, factor in factors):
        return weight
    rows = torch.cat([torch.full((count,), factor) for count, factor in factors]).to(weight.device, weight.dtype)
    return weight * rows.view(-1, *[1] * (weight.dim() - 1))


def scaled_fp8_rows(weight: Fp8Weight, factors: Sequence[tuple[int, float]]) -> Fp8Weight:
    """Scale rows as :func:`scaled_rows` does, through the weight's scales."""
    return Fp8Weight(weight.weight, scaled_rows(weight.scales, factors), weight.group, weight.skipped)
