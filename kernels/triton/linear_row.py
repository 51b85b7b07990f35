"""The product of a single row with a weight: weights go straight to registers, and RMS norm is a scale of the sum."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.triton.launch import overlapped, prefetch, wait
from splitserve.kernels.tuning.linear_launch import LinearLaunch


def launch_row(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    params: LinearLaunch,
    *,
    norm: Tensor | None,
    eps: float,
    gated: bool,
    adds: bool,
    bias: Tensor | None,
) -> None:
    num_columns = out.shape[1]
    _row_kernel[(triton.cdiv(num_columns, params.block_n),)](
        x,
        weight,
        x if norm is None else norm,
        x if bias is None else bias,
        out,
        eps,
        N=num_columns,
        K=x.shape[1],
        HAS_NORM=norm is not None,
        GATED=gated,
        ADDS=adds,
        HAS_BIAS=bias is not None,
        BLOCK_N=params.block_n,
        BLOCK_K=params.block_k,
        PREFETCH=params.prefetch,
        num_warps=params.num_warps,
        **overlapped(x.device),
    )


@triton.jit
def _row_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    bias_ptr,
    out_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < N
    k = tl.arange(0, BLOCK_K)
    rows_at = weight_ptr + column.to(tl.int64)[:, None] * K  # [BLOCK_N, 1]
    weight = row_tile(rows_at, k, is_column, N, K, BLOCK_N, BLOCK_K)
    if GATED:
        up = row_tile(rows_at + N * K, k, is_column, N, K, BLOCK_N, BLOCK_K)
    if PREFETCH > 0 and OVERLAPPED:
        fetched_at = weight_ptr + tl.minimum(column, N - 1).to(tl.int64) * K
        prefetch(fetched_at, BLOCK_K, K, PREFETCH)
        if GATED:
            prefetch(fetched_at + N * K, BLOCK_K, K, PREFETCH)
    wait(OVERLAPPED)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.static_range(0, K, BLOCK_K):
        if first > 0:
            weight = row_tile(rows_at, first + k, is_column, N, K, BLOCK_N, BLOCK_K)
            if GATED:
                up = row_tile(rows_at + N * K, first + k, is_column, N, K, BLOCK_N, BLOCK_K)
        x = tl.load(x_ptr + first + k, mask=first + k < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + first + k, mask=first + k < K, other=0.0).to(tl.float32)
        acc += weight.to(tl.float32) * x[None, :]
        if GATED:
            acc_up += up.to(tl.float32) * x[None, :]
    total = tl.sum(acc, 1)
    total_up = tl.sum(acc_up, 1) if GATED else total
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares) / K + eps)
        total *= scale
        total_up *= scale
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    store_product(total, total_up, out_ptr + column, is_column, GATED, ADDS)


@triton.jit
def row_tile(rows_at, k, is_column, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load [BLOCK_N, BLOCK_K] of the weight; it is read once, so it may be evicted from the cache first."""
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        return tl.load(rows_at + k[None, :], eviction_policy="evict_first")
    mask = is_column[:, None] & (k < K)[None, :]
    return tl.load(rows_at + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def store_product(total, up, out_at, mask, GATED: tl.constexpr, ADDS: tl.constexpr):
    """Store the product after the operation that follows it: the gate, or the addition to the output's present
    content."""
    narrow = out_at.dtype.element_ty
    if GATED:
        gate = total.to(narrow).to(tl.float32)
        total = (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32) * up.to(narrow).to(tl.float32)
    if ADDS:
        total += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(narrow), mask=mask)
