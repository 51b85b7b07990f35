"""Rows of bytes from and to places that the device can address, as one Triton kernel: parts of blocks of a peer's GPU.

A copy engine takes longer for many short rows than the link does. A bounded number of programs keeps enough bytes under
way for the link, and leaves the rest of the device to the steps that run beside. Offsets are in 64 bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

_PROGRAM_BYTES = 16384
_MAX_PROGRAMS = 64
_NUM_WARPS = 8
_ALIGNMENT = 16


def can_copy(*numbers: int) -> bool:
    """Whether rows with these addresses, widths and pitches are aligned well enough."""
    return not any(number % _ALIGNMENT for number in numbers)


def copy_rows(addresses: Tensor, height: int, width: int, target_pitch: int, source_pitch: int) -> None:
    """For each i: ``height`` rows of ``width`` bytes from ``addresses[1, i]`` on to ``addresses[0, i]`` on, a row
    beginning a pitch (bytes) after the one before.

    ``addresses``: int64 [2, n], contiguous, on the device of the kernel; they and all sizes as :func:`can_copy` says.
    """
    assert addresses.is_contiguous() and can_copy(width, target_pitch, source_pitch)
    num_pieces = triton.cdiv(width, _PROGRAM_BYTES)
    total = addresses.shape[1] * height * num_pieces
    _copy_rows_kernel[(max(1, min(total, _MAX_PROGRAMS)),)](
        addresses,
        addresses.shape[1],
        total,
        HEIGHT=height,
        ROW_UNITS=width // 8,
        TARGET_UNITS=target_pitch // 8,
        SOURCE_UNITS=source_pitch // 8,
        PIECES=num_pieces,
        PIECE=_PROGRAM_BYTES // 8,
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_copies", "total"])
def _copy_rows_kernel(
    addresses_ptr,
    num_copies,
    total,
    HEIGHT: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    TARGET_UNITS: tl.constexpr,
    SOURCE_UNITS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        copy = number // (HEIGHT * PIECES)
        row = number // PIECES % HEIGHT
        unit = number % PIECES * PIECE + tl.arange(0, PIECE)
        target = tl.load(addresses_ptr + copy).to(tl.pointer_type(tl.int64))
        source = tl.load(addresses_ptr + num_copies + copy).to(tl.pointer_type(tl.int64))
        into = tl.multiple_of(target, 16) + row.to(tl.int64) * TARGET_UNITS + unit
        out_of = tl.multiple_of(source, 16) + row.to(tl.int64) * SOURCE_UNITS + unit
        inside = unit < ROW_UNITS
        tl.store(into, tl.load(out_of, mask=inside), mask=inside)
