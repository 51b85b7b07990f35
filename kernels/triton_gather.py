"""KV gather and scatter as one Triton kernel: a copy between blocks of the KV memory and a contiguous buffer.

Keys and values of adjacent heads are adjacent in a block, so each (block, layer) is one run of bytes on both sides.
Runs are copied 16 bytes per thread and access, as far as their size allows, whatever the dtype. The buffer may be in
pinned host memory, which the device reads and writes itself. Offsets are in 64 bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.kv_copy import check_kv_copy

_PROGRAM_BYTES = 16384
_NUM_WARPS = 4
# Two int64 are one access of 16 bytes. Smaller units are for heads of odd sizes, as only tests have them.
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def gather_kv(kv_cache: Tensor, block_ids: Tensor, first_head: int, out: Tensor) -> None:
    """See :class:`splitserve.kernels.api.GatherKV`."""
    check_kv_copy(kv_cache, block_ids, first_head, out)
    _copy(kv_cache, block_ids, first_head, out, gathers=True)


def scatter_kv(source: Tensor, block_ids: Tensor, first_head: int, kv_cache: Tensor) -> None:
    """See :class:`splitserve.kernels.api.ScatterKV`."""
    check_kv_copy(kv_cache, block_ids, first_head, source)
    _copy(kv_cache, block_ids, first_head, source, gathers=False)


def _copy(kv_cache: Tensor, block_ids: Tensor, first_head: int, buffer: Tensor, *, gathers: bool) -> None:
    if buffer.numel() == 0:
        return
    _, num_layers, num_heads, _, block_size, head_dim = kv_cache.shape
    head_bytes = 2 * block_size * head_dim * kv_cache.element_size()
    alignment = head_bytes | kv_cache.data_ptr() | buffer.data_ptr()
    unit = next(size for size in _UNITS if alignment % size == 0)
    head_units = head_bytes // unit
    run_units = buffer.shape[2] * head_units
    block = _PROGRAM_BYTES // unit
    _copy_kernel[(block_ids.shape[0] * num_layers, triton.cdiv(run_units, block))](
        kv_cache.view(-1).view(_UNITS[unit]),
        buffer.view(-1).view(_UNITS[unit]),
        block_ids,
        first_head,
        NUM_LAYERS=num_layers,
        NUM_HEADS=num_heads,
        HEAD_UNITS=head_units,
        RUN_UNITS=run_units,
        GATHERS=gathers,
        BLOCK=block,
        num_warps=_NUM_WARPS,
    )


@triton.jit
def _copy_kernel(
    kv_ptr,
    buffer_ptr,
    ids_ptr,
    first_head,
    NUM_LAYERS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_UNITS: tl.constexpr,
    RUN_UNITS: tl.constexpr,
    GATHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0)
    layer = run % NUM_LAYERS
    block_id = tl.load(ids_ptr + run // NUM_LAYERS)
    # Strides are constants, so that the compiler sees how well these are aligned.
    at_layer = (block_id * NUM_LAYERS + layer) * (NUM_HEADS * HEAD_UNITS)
    at_head = at_layer + first_head * HEAD_UNITS
    at_run = run.to(tl.int64) * RUN_UNITS
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < RUN_UNITS
    paged = kv_ptr + at_head + unit
    flat = buffer_ptr + at_run + unit
    if GATHERS:
        tl.store(flat, tl.load(paged, mask=inside), mask=inside)
    else:
        tl.store(paged, tl.load(flat, mask=inside), mask=inside)
