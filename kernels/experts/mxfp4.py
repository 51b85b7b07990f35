"""MXFP4 (OCP Microscaling Formats 1.0): groups of 32 elements of 4 bits, sign and E2M1, that share a power of two.

A byte holds two neighbouring elements, the first in its low half; a scale's byte ``s`` stands for ``2 ** (s - 127)``.
"""

import torch
from torch import Tensor

from splitserve.kernels.experts.spec import MXFP4_GROUP

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
ROTATIONS = (0, 4, 10, 14)
"""The rotation to the left, by quarter, that brings the bits of its elements in a pair of words to their places. The
fractions of the last quarter come by ``FRACTION_ROTATION``."""
FRACTION_ROTATION = 6
PLACES = (15, 8, 7, 6)
"""The places of an element's sign, exponent and fraction in a bfloat16 that is ``2 ** 126`` times too small."""
SCALE_SHIFT = 62
"""What is added to scales: with it, ``2 ** -126`` times an element times its scale is ``2 ** -64`` times its value."""
MAX_EXPONENT = 254
"""Of a finite number in bfloat16."""
BLOCK = 128
"""Elements of a row whose quarters lie side by side in words."""


def dequantised(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the elements [..., K] in ``dtype`` of ``blocks`` uint8 [..., K / 2] and ``scales`` uint8 [..., K / 32]."""
    values = torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), device=blocks.device)
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [..., K]
    exponents = (scales.int() - _BIAS).repeat_interleave(MXFP4_GROUP, -1)
    return torch.ldexp(values[numbers.int()], exponents).to(dtype)


def padded_size(size: int) -> int:
    """Return the elements of a row of ``size`` as the Triton kernels read it: its last block has 32, 64 or 128."""
    return size + MXFP4_GROUP if size % BLOCK == BLOCK - MXFP4_GROUP else size


def by_quarters(blocks: Tensor) -> Tensor:
    """Return ``blocks`` uint8 [N, R, K / 2] in the order that the Triton kernels read, int32 [N, R, P / 8].

    P is :func:`padded_size`; the padding is zeros. A matrix is divided into blocks of B elements of each row, 128 or
    what is left. They lie one after the other, each with all rows, whatever the shape says: so what a tile of rows
    reads at once is one piece of memory. Pair ``i`` of a row's words of 16 bits in a block has elements ``2 * i`` and
    ``2 * i + 1`` of each of the row's four quarters there. A rotation and a mask leave a quarter's two as bfloat16 in
    one register, ``2 ** 126`` times too small.
    """
    num_rows, size = blocks.shape[1], 2 * blocks.shape[-1]
    padded = padded_size(size)
    whole = padded // BLOCK * BLOCK
    ordered = torch.empty((len(blocks), num_rows * padded // 8), dtype=torch.int32, device=blocks.device)
    for source, target in zip(blocks, ordered, strict=True):  # one matrix at a time: memory for all may not be there
        numbers = torch.stack((source & 15, source >> 4), -1).flatten(-2)  # [R, K]
        numbers = torch.nn.functional.pad(numbers, (0, padded - size))
        first = num_rows * whole // 8
        target[:first] = _pairs(numbers[:, :whole], BLOCK)
        target[first:] = _pairs(numbers[:, whole:], max(padded - whole, MXFP4_GROUP))
    return ordered.view(len(blocks), num_rows, padded // 8)


def _pairs(numbers: Tensor, block: int) -> Tensor:
    """Return the pairs of words int32 [K / block * R * block / 8] of ``numbers`` [R, K], block by block."""
    quarters = numbers.reshape(len(numbers), -1, len(ROTATIONS), block // 8, 2)  # [R, K / block, 4, pairs, 2]
    pairs = torch.zeros_like(quarters[..., 0, :, 0], dtype=torch.int32)
    for quarter, rotation in enumerate(ROTATIONS):
        for half in range(2):
            element = quarters[..., quarter, :, half].int()
            for bit, place in zip((3, 2, 1, 0), PLACES, strict=True):
                is_last = quarter == len(ROTATIONS) - 1 and bit == 0
                source = (place + 16 * half - (FRACTION_ROTATION if is_last else rotation)) % 32
                pairs |= (element >> bit & 1) << source
    return pairs.transpose(0, 1).flatten()


def shifted_scales(scales: Tensor) -> Tensor:
    """Return ``scales`` uint8 [N, R, K / 32] as the Triton kernels read them, int32 [N, blocks, R].

    The bytes of a number, from the lowest one on, are the scales of its block's quarters, plus ``SCALE_SHIFT``.

    Raises ValueError for a scale above ``2 ** 65``.
    """
    if int(scales.max()) + SCALE_SHIFT > MAX_EXPONENT:
        raise ValueError(
            f"a scale of MXFP4 is 2**{int(scales.max()) - _BIAS}; at most 2**{MAX_EXPONENT - SCALE_SHIFT - _BIAS} is "
            "allowed: is this a tensor of scales?"
        )
    num_groups = scales.shape[-1]
    rest = padded_size(num_groups * MXFP4_GROUP) % BLOCK
    whole = num_groups - rest // MXFP4_GROUP
    groups = scales[..., :whole] + SCALE_SHIFT
    groups = torch.nn.functional.pad(groups, (0, -whole % 4))  # a last block of 96 is padded to 128
    if rest:
        last = scales[..., whole:] + SCALE_SHIFT
        groups = torch.cat((groups, last.repeat_interleave(BLOCK // rest, -1)), -1)
    quarters = groups.reshape(*groups.shape[:2], -1, 4)  # [N, R, blocks, 4]
    return quarters.transpose(1, 2).contiguous().view(torch.int32).squeeze(-1)
