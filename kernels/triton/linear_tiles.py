"""The product of several rows with a weight, in tiles, with matrix instructions.

With ``split_k`` the last program of a tile to finish sums the parts, in order, so that the result doesn't depend on
which one is last; or the parts are left to the consumer kernel (:meth:`splitserve.kernels.api.Linear.parts`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from splitserve.kernels.triton.launch import overlapped, prefetch, wait
from splitserve.kernels.triton.linear_row import store_product
from splitserve.kernels.tuning.linear_launch import LinearLaunch

_MAX_TILES = 1 << 16  # number of tickets


def launch_tiles(
    x: Tensor, weight: Tensor, out: Tensor, params: LinearLaunch, *, gated: bool, adds: bool, bias: Tensor | None
) -> None:
    num_rows, in_features = x.shape
    num_columns, joined = out.shape[-1], out.dim() == 2
    width = params.block_n * (1 + gated)
    num_tiles = triton.cdiv(num_rows, params.block_m) * triton.cdiv(num_columns, params.block_n)
    parts, tickets = out, out
    if not joined:
        assert out.shape[0] == params.split_k and out.dtype == torch.float32 and not gated and not adds
    elif params.split_k > 1:
        parts, tickets = _split_workspace(x.device)
        room = num_tiles * params.split_k * params.block_m * width
        assert num_tiles <= _MAX_TILES and room <= parts.shape[0], "the tuned split needs too much workspace"
    descriptor = weight
    if params.tma:
        three = weight.view(1 + gated, num_columns, in_features)
        descriptor = TensorDescriptor.from_tensor(three, [1 + gated, params.block_n, params.block_k])
    _tile_kernel[(num_tiles, params.split_k)](
        x,
        weight,
        descriptor,
        x if bias is None else bias,
        out,
        parts,
        tickets,
        num_rows,
        x.stride(0),
        N=num_columns,
        K=in_features,
        GATED=gated,
        ADDS=adds,
        HAS_BIAS=bias is not None,
        BLOCK_M=params.block_m,
        BLOCK_N=params.block_n,
        BLOCK_K=params.block_k,
        SPLIT_K=params.split_k,
        JOINED=joined,
        PREFETCH=params.prefetch,
        TMA=params.tma,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=params.num_warps,
        num_stages=params.num_stages,
        **overlapped(x.device),
    )


@functools.cache
def _split_workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a buffer for the parts of split products, float32, and tickets, which are zero between launches.

    Products of one stream share it: each waits for its predecessor.
    """
    return (
        torch.empty(1 << 23, dtype=torch.float32, device=device),
        torch.zeros(_MAX_TILES, dtype=torch.int32, device=device),
    )


# length: a third of it declares arguments.
@triton.jit(do_not_specialize=["num_rows"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    descriptor,
    bias_ptr,
    out_ptr,
    parts_ptr,
    tickets_ptr,
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    JOINED: tl.constexpr,
    PREFETCH: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    WIDTH: tl.constexpr = BLOCK_N * (1 + GATED)
    PART_K: tl.constexpr = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile, part = tl.program_id(0), tl.program_id(1)
    row = (tile % num_row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = (tile // num_row_tiles) * BLOCK_N
    first_k = part * PART_K
    inner = tl.arange(0, WIDTH)  # outputs of the tile; with a gate, followed by the same outputs of the other half
    weight_row = tl.minimum(first_column + inner % BLOCK_N, N - 1) + inner // BLOCK_N * N
    rows_at = weight_ptr + weight_row.to(tl.int64) * K
    if PREFETCH > 0 and OVERLAPPED:
        prefetch(rows_at, first_k, K, PREFETCH)
    wait(OVERLAPPED)

    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    # Rows beyond the last aren't read: if all programs read one row instead, they would wait for the same memory.
    x_rows, is_row = x_ptr + row.to(tl.int64) * x_stride, (row < num_rows)[:, None]
    for offset in range(0, PART_K, BLOCK_K):
        k = first_k + offset + tl.arange(0, BLOCK_K)
        x = _tile_input(x_rows, is_row, k, K, K % (SPLIT_K * BLOCK_K) == 0)
        if TMA:
            weight = tl.reshape(descriptor.load([0, first_column, first_k + offset]), (WIDTH, BLOCK_K))
        else:
            weight = _tile_weight(rows_at, k, K, K % (SPLIT_K * BLOCK_K) == 0)
        acc = tl.dot(x, weight.T, acc, input_precision=PRECISION)

    if JOINED and SPLIT_K > 1:
        acc, is_last = _join(acc, parts_ptr, tickets_ptr, tile, part, SPLIT_K, BLOCK_M, WIDTH)
        if not is_last:
            return
    total, up = _halves(acc, BLOCK_M, BLOCK_N) if GATED else (acc, acc)
    column = first_column + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + row.to(tl.int64)[:, None] * N + column[None, :]
    if not JOINED:
        out_at += part.to(tl.int64) * num_rows * N
    store_product(total, up, out_at, (row < num_rows)[:, None] & (column < N)[None, :], GATED, ADDS)


@triton.jit
def _tile_input(x_rows, is_row, k, K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Load the input, [BLOCK_M, BLOCK_K]. ``IS_WHOLE``: no ``k`` is beyond the last one."""
    if IS_WHOLE:
        return tl.load(x_rows[:, None] + k[None, :], mask=is_row, other=0.0)
    return tl.load(x_rows[:, None] + k[None, :], mask=is_row & (k < K)[None, :], other=0.0)


@triton.jit
def _tile_weight(rows_at, k, K: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Load the weight, [WIDTH, BLOCK_K]; it is read once, so it may be evicted from the cache first."""
    if IS_WHOLE:
        return tl.load(rows_at[:, None] + k[None, :], eviction_policy="evict_first")
    return tl.load(rows_at[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Split [BLOCK_M, 2 * BLOCK_N] into the gate's outputs and the others, [BLOCK_M, BLOCK_N] each."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))


@triton.jit
def _join(
    acc,
    parts_ptr,
    tickets_ptr,
    tile,
    part,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the sum over all parts of ``tile``, and True, in the last program of the tile to finish; its own part, and
    False, in the others."""
    SIZE: tl.constexpr = BLOCK_M * WIDTH
    at = parts_ptr + tile.to(tl.int64) * (SPLIT_K * SIZE)
    inner = tl.arange(0, BLOCK_M)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(at + part * SIZE + inner, acc)
    tl.debug_barrier()  # every thread's part is stored before the ticket is taken
    is_last = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        tl.debug_barrier()
        acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for index in tl.static_range(SPLIT_K):
            acc += tl.load(at + index * SIZE + inner, cache_modifier=".cg")
        tl.store(tickets_ptr + tile, 0)
    return acc, is_last
