"""Products with a matrix of each head as a Triton kernel for few tokens, and the parts of a context joined."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.triton.launch import overlapped, wait

MAX_ROWS = 64  # with more, cuBLAS is better
_MIN_DOT = 16  # least extent of a matrix instruction
_ELEMENTS = 8192  # of a program's weights
_COLUMNS = 128  # that a program joins


def head_products(x: Tensor, weight: Tensor) -> Tensor:
    """Return the products [T, H, N] of ``x`` [T, H, K], whose last dimension is dense, with ``weight`` [H, N, K]."""
    num_rows, num_heads, in_size = x.shape
    out_size = weight.shape[1]
    if num_rows > MAX_ROWS:
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1).contiguous()
    assert x.stride(2) == 1
    out = torch.empty((num_rows, num_heads, out_size), dtype=x.dtype, device=x.device)
    block_k = max(_MIN_DOT, triton.next_power_of_2(in_size))
    block_n = max(_MIN_DOT, min(_ELEMENTS // block_k, triton.next_power_of_2(out_size)))
    _product_kernel[(triton.cdiv(out_size, block_n), num_heads, triton.cdiv(num_rows, _MIN_DOT))](
        x, weight, out, num_rows, x.stride(0), x.stride(1), HEAD_STRIDE=weight.stride(0), N_STRIDE=weight.stride(1),
        K_STRIDE=weight.stride(2), HEADS=num_heads, N=out_size, K=in_size, BLOCK_M=_MIN_DOT, BLOCK_N=block_n,
        BLOCK_K=block_k, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, **overlapped(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    row_stride,
    x_head_stride,
    HEAD_STRIDE: tl.constexpr,
    N_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    column, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + head * HEAD_STRIDE + k[:, None] * K_STRIDE + column[None, :] * N_STRIDE
    weight = tl.load(weight_at, mask=(k < K)[:, None] & (column < N)[None, :], other=0.0)
    wait(OVERLAPPED)
    x_at = x_ptr + head * x_head_stride + row.to(tl.int64)[:, None] * row_stride + k[None, :]
    x = tl.load(x_at, mask=(row < num_rows)[:, None] & (k < K)[None, :], other=0.0)
    product = tl.dot(x, weight, input_precision=PRECISION)
    out_at = out_ptr + (row.to(tl.int64)[:, None] * HEADS + head) * N + column[None, :]
    tl.store(out_at, product.to(out_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < N)[None, :])


def join_parts(partial: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the parts ``partial`` float32 [T, H, P, R] joined by ``lse`` float32 [T, H, P], logarithms to base 2 ->
    [T, H, R]. A part without tokens has minus infinity, and its memory is not read."""
    num_rows, num_heads, num_parts, rank = partial.shape
    out = torch.empty((num_rows, num_heads, rank), dtype=dtype, device=partial.device)
    _join_kernel[(num_rows * num_heads, triton.cdiv(rank, _COLUMNS))](
        partial, lse, out, PARTS=num_parts, PARTS_PADDED=triton.next_power_of_2(num_parts), RANK=rank, BLOCK=_COLUMNS,
        num_warps=4, **overlapped(partial.device),
    )  # fmt: skip
    return out


@triton.jit
def _join_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    head = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, PARTS_PADDED), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lse = tl.load(lse_ptr + head * PARTS + part, mask=part < PARTS, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    at = (head * PARTS + part[:, None]) * RANK + column[None, :]
    read = (lse > float("-inf"))[:, None] & (column < RANK)[None, :]
    total = tl.sum(tl.load(partial_ptr + at, mask=read, other=0.0) * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + head * RANK + column, total.to(out_ptr.dtype.element_ty), mask=column < RANK)
