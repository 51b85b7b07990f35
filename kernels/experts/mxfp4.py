"""MXFP4 (OCP Microscaling Formats 1.0): groups of 32 elements of 4 bits, sign and E2M1, that share a power of two.

A byte holds two neighbouring elements, the first in its low half; a scale's byte ``s`` stands for ``2 ** (s - 127)``.
"""

import torch
from torch import Tensor

from splitserve.kernels.experts.spec import MXFP4_GROUP

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
QUARTER_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
"""The bits of a word, from the sign to the fraction, that hold its element of each quarter of a group."""
SCALE_SHIFT = 62
"""What is added to scales: with it, ``2 ** -126`` times an element times its scale is ``2 ** -64`` times its value."""
MAX_EXPONENT = 254
"""Of a finite number in bfloat16."""
SCALE_ALIGNMENT = 16
"""Bytes of which a row of scales has a whole number."""


def dequantised(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the elements [..., K] in ``dtype`` of ``blocks`` uint8 [..., K / 2] and ``scales`` uint8 [..., K / 32]."""
    values = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), device=blocks.device)
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [..., K]
    exponents = (scales.int() - _BIAS).repeat_interleave(MXFP4_GROUP, -1)
    return torch.ldexp(values[numbers.int()], exponents).to(dtype)


def by_quarters(blocks: Tensor) -> Tensor:
    """Return ``blocks`` uint8 [N, R, K / 2] in the order that the Triton kernels read, int16 [N, R, K / 4].

    Word ``i`` of a group has its elements ``i``, ``8 + i``, ``16 + i`` and ``24 + i``. An element of the first three
    quarters lies such that a shift and a mask leave it as a bfloat16 that is ``2 ** 126`` times too small.
    """
    ordered = torch.empty((*blocks.shape[:-1], blocks.shape[-1] // 2), dtype=torch.int16, device=blocks.device)
    for source, target in zip(blocks, ordered, strict=True):  # one matrix at a time: memory for all may not be there
        numbers = torch.stack((source & 15, source >> 4), -1).reshape(len(source), -1, 4, MXFP4_GROUP // 4)
        words = torch.zeros_like(numbers[..., 0, :], dtype=torch.int32)  # [R, K / 32, 8]
        for quarter, bits in enumerate(QUARTER_BITS):
            for place, bit in zip((3, 2, 1, 0), bits, strict=True):
                words |= (numbers[..., quarter, :].int() >> place & 1) << bit
        target.copy_(words.flatten(-2))  # the highest bit becomes the sign
    return ordered


def shifted_scales(scales: Tensor) -> Tensor:
    """Return ``scales`` uint8 [N, R, K / 32] as the Triton kernels read them: plus ``SCALE_SHIFT``, and with zeros up
    to a whole number of 16 bytes, so that each row is aligned.

    Raises ValueError for a scale above ``2 ** 65``.
    """
    if int(scales.max()) + SCALE_SHIFT > MAX_EXPONENT:
        raise ValueError(
            f"a scale of MXFP4 is 2**{int(scales.max()) - _BIAS}; at most 2**{MAX_EXPONENT - SCALE_SHIFT - _BIAS} is "
            "allowed: is this a tensor of scales?"
        )
    return torch.nn.functional.pad(scales + SCALE_SHIFT, (0, -scales.shape[-1] % SCALE_ALIGNMENT))
