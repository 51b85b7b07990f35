"""Whole KV blocks from places of one memory to places of another, as one Triton kernel.

Between a GPU's memory and pinned memory of the host, which the device reads and writes itself: for blocks too small for
a copy engine, which takes a few microseconds for each piece. A bounded number of programs keeps enough bytes under way
for the link, and leaves the rest of the device to the steps that run beside. Offsets are in 64 bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAM_BYTES = 8192
_MAX_PROGRAMS = 32
_NUM_WARPS = 4
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def copy_blocks(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """``target[target_ids[i]] = source[source_ids[i]]``, for uint8 ``[num_blocks, block_bytes]`` of both.

    The ids are int64 and on the device of the kernel, and so is one of the two memories; the other one may be pinned.
    """
    assert source.is_contiguous() and target.is_contiguous() and source.shape[1] == target.shape[1]
    assert source.dtype == target.dtype == torch.uint8
    assert source_ids.dtype == target_ids.dtype == torch.int64 and source_ids.shape == target_ids.shape
    if not len(source_ids):
        return
    alignment = source.shape[1] | source.data_ptr() | target.data_ptr()
    unit = next(size for size in _UNITS if alignment % size == 0)
    block_units, piece = source.shape[1] // unit, _PROGRAM_BYTES // unit
    num_pieces = len(source_ids) * triton.cdiv(block_units, piece)
    _copy_kernel[(min(num_pieces, _MAX_PROGRAMS),)](
        source.view(-1).view(_UNITS[unit]),
        target.view(-1).view(_UNITS[unit]),
        source_ids,
        target_ids,
        num_pieces,
        BLOCK_UNITS=block_units,
        PIECES=triton.cdiv(block_units, piece),
        PIECE=piece,
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_pieces"])
def _copy_kernel(
    source_ptr,
    target_ptr,
    source_ids_ptr,
    target_ids_ptr,
    num_pieces,
    BLOCK_UNITS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    for number in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        block = number // PIECES
        unit = (number % PIECES) * PIECE + tl.arange(0, PIECE)
        inside = unit < BLOCK_UNITS
        read_at = tl.load(source_ids_ptr + block) * BLOCK_UNITS
        written_at = tl.load(target_ids_ptr + block) * BLOCK_UNITS
        values = tl.load(source_ptr + read_at + unit, mask=inside)
        tl.store(target_ptr + written_at + unit, values, mask=inside)
