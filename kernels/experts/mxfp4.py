"""MXFP4 (OCP Microscaling Formats 1.0): groups of 32 elements of 4 bits, sign and E2M1, that share a power of two.

A byte holds two neighbouring elements, the first in its low half; a scale's byte ``s`` stands for ``2 ** (s - 127)``.
"""

import torch
from torch import Tensor

from splitserve.kernels.experts.spec import MXFP4_GROUP

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_GROUP_BYTES = MXFP4_GROUP // 2


def dequantised(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the elements [..., K] in ``dtype`` of ``blocks`` uint8 [..., K / 2] and ``scales`` uint8 [..., K / 32]."""
    values = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), device=blocks.device)
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [..., K]
    exponents = (scales.int() - _BIAS).repeat_interleave(MXFP4_GROUP, -1)
    return torch.ldexp(values[numbers.int()], exponents).to(dtype)


def by_halves(blocks: Tensor) -> Tensor:
    """Return ``blocks`` uint8 [N, R, K / 2] in the order that the Triton kernels read: the bytes of a group have its
    first half in their low halves, its second half in their high ones, so that a run of bytes meets two runs of a
    vector."""
    ordered = torch.empty_like(blocks)
    for source, target in zip(blocks, ordered, strict=True):  # one matrix at a time: memory for all may not be there
        groups = source.unflatten(-1, (-1, _GROUP_BYTES))
        numbers = torch.stack((groups & 15, groups >> 4), -1).flatten(-2)  # [R, K / 32, 32]
        target.copy_((numbers[..., :_GROUP_BYTES] | numbers[..., _GROUP_BYTES:] << 4).flatten(-2))
    return ordered
