"""The product of a single row with a weight in FP8 that has a scale per group of columns: one kernel, with the norm
before it and what follows it.

Both sides are rounded as for more rows: each program quantises the row for its own use. A norm's scale of the whole row
is applied to the sum; but for rounding, that changes no quantised number.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.fp8.triton_quantise import LARGEST, TINY
from splitserve.kernels.fp8.weight import GROUP
from splitserve.kernels.triton.launch import overlapped, wait
from splitserve.kernels.triton.linear_row import row_tile, store_product
from splitserve.kernels.tuning.linear_launch import Variant, launch_params


def launch_fp8_row(
    variant: Variant,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
) -> None:
    """Compute ``x`` [1, K] times ``weight`` float8 [N, K], scales float32 [N, K / GROUP], -> ``out`` [1, N].

    "gated": ``out`` [1, N / 2] is the gate's SiLU times the other half; "add": it is added to ``out``, with ``bias``
    [N]. ``norm`` [K]: ``x`` is normalised first.
    """
    is_gated, adds = variant == "gated", variant == "add"
    num_columns, size = out.shape[1], x.shape[1]
    assert x.shape[0] == 1 and x.stride(1) == 1 and out.is_contiguous() and weight.is_contiguous()
    assert weight.shape == (num_columns * (1 + is_gated), size) and (bias is None or adds)
    assert scales.is_contiguous() and scales.shape[1] * GROUP == size
    params = launch_params(variant, weight.dtype, weight.shape[0], size, 1)
    _fp8_row_kernel[(triton.cdiv(num_columns, params.block_n),)](
        x,
        weight,
        scales,
        x if norm is None else norm,
        x if bias is None else bias,
        out,
        eps,
        N=num_columns,
        K=size,
        GROUP_COLUMNS=GROUP,
        LARGEST=LARGEST,
        TINY=TINY,
        HAS_NORM=norm is not None,
        GATED=is_gated,
        ADDS=adds,
        HAS_BIAS=bias is not None,
        BLOCK_N=params.block_n,
        BLOCK_K=params.block_k,
        num_warps=params.num_warps,
        **overlapped(x.device),
    )


@triton.jit
def _fp8_row_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    norm_ptr,
    bias_ptr,
    out_ptr,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < N
    safe = tl.where(is_column, column, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    rows_at = weight_ptr + safe[:, None] * K  # [BLOCK_N, 1]
    weight = row_tile(rows_at, k, is_column, N, K, BLOCK_N, BLOCK_K)
    if GATED:
        up = row_tile(rows_at + N * K, k, is_column, N, K, BLOCK_N, BLOCK_K)
    wait(OVERLAPPED)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in tl.static_range(0, K, BLOCK_K):
        if first > 0:
            weight = row_tile(rows_at, first + k, is_column, N, K, BLOCK_N, BLOCK_K)
            if GATED:
                up = row_tile(rows_at + N * K, first + k, is_column, N, K, BLOCK_N, BLOCK_K)
        if HAS_NORM:
            plain = _row(x_ptr, norm_ptr, first + k, K, False)
            squares += plain * plain
        x = _row(x_ptr, norm_ptr, first + k, K, HAS_NORM)
        x = _quantised(x, weight_ptr.dtype.element_ty, GROUP_COLUMNS, BLOCK_K, LARGEST, TINY)
        acc += _scaled(weight, scales_ptr, safe, first, K, GROUP_COLUMNS, BLOCK_N, BLOCK_K) * x[None, :]
        if GATED:
            acc_up += _scaled(up, scales_ptr, safe + N, first, K, GROUP_COLUMNS, BLOCK_N, BLOCK_K) * x[None, :]
    total = tl.sum(acc, 1)
    total_up = tl.sum(acc_up, 1) if GATED else total
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares) / K + eps)
        total *= factor
        total_up *= factor
    if HAS_BIAS:
        total += tl.load(bias_ptr + safe).to(tl.float32)
    store_product(total, total_up, out_ptr + column, is_column, GATED, ADDS)


@triton.jit
def _row(x_ptr, norm_ptr, at, K: tl.constexpr, HAS_NORM: tl.constexpr):
    """Load elements of the row in float32, times the norm's weight; zeros beyond its end."""
    x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    if HAS_NORM:
        x *= tl.load(norm_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    return x


@triton.jit
def _quantised(
    x, narrow: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, LARGEST: tl.constexpr, TINY: tl.constexpr
):
    """Round ``x`` [BLOCK_K] to FP8 with a scale for each group."""
    groups = tl.reshape(x, (BLOCK_K // GROUP, GROUP))
    scale = tl.maximum(tl.max(tl.abs(groups), 1), TINY)[:, None] / LARGEST
    groups = tl.clamp(groups / scale, -LARGEST, LARGEST).to(narrow).to(tl.float32) * scale
    return tl.reshape(groups, (BLOCK_K,))


@triton.jit
def _scaled(
    weight, scales_ptr, rows, first, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return a tile of the weight from column ``first`` on, in float32, times the scales of its groups."""
    NUM_GROUPS: tl.constexpr = K // GROUP
    groups = first // GROUP + tl.arange(0, BLOCK_K // GROUP)
    scales_at = scales_ptr + rows[:, None] * NUM_GROUPS + groups[None, :]
    scales = tl.load(scales_at, mask=groups[None, :] < NUM_GROUPS, other=0.0)
    scales = tl.broadcast_to(scales[:, :, None], (BLOCK_N, BLOCK_K // GROUP, GROUP))
    return weight.to(tl.float32) * tl.reshape(scales, (BLOCK_N, BLOCK_K))
