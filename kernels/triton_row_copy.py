"""Rows of bytes from places of one memory to places of another, as one Triton kernel.

The kernel's device reads the one and writes the other, whoever's they are: its own, a peer's that is mapped, pinned
memory of the host. For rows that copy engines are slow with: of tens of kilobytes between GPUs, since a copy engine
takes each row for itself, and of small blocks from the host, since it takes a few microseconds for each copy. A bounded
number of programs keeps enough bytes under way for the link, and leaves the rest of the device to the steps that run
beside. Offsets are in 64 bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK_BYTES = 16384
_MAX_PROGRAMS = 32
_NUM_WARPS = 4
_NUM_STAGES = 4
"""A program has as many chunks under way but one: 1.5 MiB in all. What the kernel is worth:
``splitserve bench handover --tp 4:2 --one-rank --path kernel mapped``."""
_UNITS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class Rows(NamedTuple):
    """``num_rows`` of ``width`` bytes. Each begins a pitch, in bytes, after the one before."""

    num_rows: int
    width: int
    target_pitch: int
    source_pitch: int


def copy_rows(
    device: torch.device, targets: Sequence[int], sources: Sequence[int], rows: Rows, address_bits: int
) -> None:
    """``rows`` from each address of ``sources`` to the one of ``targets``, on the current stream of ``device``.

    ``address_bits``: those that are set in any of the addresses, whose lowest tells how well all are aligned.
    """
    assert len(targets) == len(sources)
    if not targets:
        return
    num_rows, width, target_pitch, source_pitch = rows
    alignment = next(size for size in _UNITS if (address_bits | width | target_pitch | source_pitch) % size == 0)
    unit_bytes = min(alignment, 8)
    chunk_bytes = min(_CHUNK_BYTES, triton.next_power_of_2(width))
    num_chunks = triton.cdiv(width, chunk_bytes)
    total = len(targets) * num_rows * num_chunks
    _copy_kernel[(min(total, _MAX_PROGRAMS),)](
        _on_device(device, targets, sources),
        len(targets),
        total,
        num_rows,
        num_chunks,
        width // unit_bytes,
        target_pitch // unit_bytes,
        source_pitch // unit_bytes,
        UNIT=_UNITS[alignment],
        CHUNK=chunk_bytes // unit_bytes,
        IS_EVEN=width % chunk_bytes == 0,
        ALIGNMENT=alignment,
        NUM_STAGES=_NUM_STAGES,
        num_warps=_NUM_WARPS,
    )


def _on_device(device: torch.device, targets: Sequence[int], sources: Sequence[int]) -> Tensor:
    """int64 [2 * n]. Both its memory and the pinned one that it comes from are reused in the order of streams only."""
    addresses = torch.frombuffer(array("q", (*targets, *sources)), dtype=torch.int64)
    return addresses.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else addresses


@triton.jit(do_not_specialize=["num_pieces", "total"])
def _copy_kernel(
    addresses_ptr,
    num_pieces,
    total,
    num_rows,
    num_chunks,
    width,
    target_pitch,
    source_pitch,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    for number in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=NUM_STAGES):
        row_of_all = number // num_chunks
        piece = row_of_all // num_rows
        row = (row_of_all % num_rows).to(tl.int64)
        unit = (number % num_chunks) * CHUNK + tl.arange(0, CHUNK)
        target = tl.load(addresses_ptr + piece).to(tl.pointer_type(UNIT))
        source = tl.load(addresses_ptr + num_pieces + piece).to(tl.pointer_type(UNIT))
        target = tl.multiple_of(target, ALIGNMENT) + row * target_pitch
        source = tl.multiple_of(source, ALIGNMENT) + row * source_pitch
        if IS_EVEN:
            tl.store(target + unit, tl.load(source + unit))
        else:
            inside = unit < width
            tl.store(target + unit, tl.load(source + unit, mask=inside), mask=inside)
