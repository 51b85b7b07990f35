"""KV gather and scatter as one Triton kernel: a copy between blocks of the KV memory and a contiguous buffer.

Keys and values of adjacent heads are adjacent in a block, so each (block, layer) is one run of bytes on both sides.
Runs are copied 16 bytes per thread and access, as far as their size allows, whatever the dtype. The buffer may be in
pinned host memory, which the device reads and writes itself. Offsets are in 64 bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.reference.kv_copy import check_kv_copy
from splitserve.kernels.triton.launch import overlapped, wait

_PROGRAM_BYTES = 16384
_NUM_WARPS = 4
# Two int64 are one access of 16 bytes. Smaller units are for heads of odd sizes, which only tests have.
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
    _, num_layers, num_heads, *head_shape = kv_cache.shape
    head_bytes = math.prod(head_shape) * kv_cache.element_size()
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
    # Strides are constants, so that the compiler can derive their alignment.
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


def gather_tokens(kv_layer: Tensor, tiles: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [num_tokens, G, D] of one layer ``kv_layer`` [num_blocks, G, 2, B, D].

    ``tiles`` int32 [3, N] on the device: block, first row of the result, number of tokens used from the block.
    """
    _, num_kv_heads, _, block_size, head_dim = kv_layer.shape
    assert kv_layer.stride()[1:] == (2 * block_size * head_dim, block_size * head_dim, head_dim, 1)
    keys, values = (
        torch.empty((num_tokens, num_kv_heads, head_dim), dtype=kv_layer.dtype, device=kv_layer.device)
        for _ in range(2)
    )
    num_tiles = tiles.shape[1]
    _gather_tokens_kernel[(num_tiles, num_kv_heads)](
        kv_layer,
        tiles,
        keys,
        values,
        num_tiles,
        BLOCK_STRIDE=kv_layer.stride(0),
        KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        TOKENS=triton.next_power_of_2(block_size),
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
        **overlapped(kv_layer.device),
    )
    return keys, values


@triton.jit(do_not_specialize=["num_tiles"])
def _gather_tokens_kernel(
    kv_ptr,
    tiles_ptr,
    keys_ptr,
    values_ptr,
    num_tiles,
    BLOCK_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    block = tl.load(tiles_ptr + tile).to(tl.int64)
    first = tl.load(tiles_ptr + num_tiles + tile).to(tl.int64)
    count = tl.load(tiles_ptr + 2 * num_tiles + tile)
    token, column = tl.arange(0, TOKENS), tl.arange(0, DIM)
    mask = (token < count)[:, None] & (column < HEAD_DIM)[None, :]
    source = kv_ptr + block * BLOCK_STRIDE + head * (2 * BLOCK_SIZE * HEAD_DIM)
    source += token[:, None] * HEAD_DIM + column[None, :]
    target = ((first + token)[:, None] * KV_HEADS + head) * HEAD_DIM + column[None, :]
    wait(OVERLAPPED)
    keys = tl.load(source, mask=mask)
    values = tl.load(source + BLOCK_SIZE * HEAD_DIM, mask=mask)
    tl.store(keys_ptr + target, keys, mask=mask)
    tl.store(values_ptr + target, values, mask=mask)
