"""The sum of each token's products, in the order of its choices, and its addition to the residual.

Both are kernels of their own: the compiler spoils the loop of a product that adds to the residual at its end.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.triton.launch import overlapped, wait

_BLOCK = 1024


def sum_choices(
    products: Tensor, experts: Tensor, first: int, num_experts: int, residual: Tensor | None = None
) -> Tensor:
    """Return the sum of each token's products [T * k * S, hidden], which are in S parts, -> float32 [T, hidden]; or add
    it, rounded to the dtype of ``residual`` [T, hidden], to that, and return the latter."""
    num_tokens, top_k = experts.shape
    num_parts = products.shape[0] // experts.numel()
    hidden_size = products.shape[1]
    if residual is None:
        out = torch.empty((num_tokens, hidden_size), dtype=torch.float32, device=products.device)
    else:
        assert residual.is_contiguous() and residual.shape == (num_tokens, hidden_size)
        out = residual
    block = min(_BLOCK, triton.next_power_of_2(hidden_size))
    _sum_kernel[(num_tokens, triton.cdiv(hidden_size, block))](
        products, experts, out, first, num_experts, HIDDEN=hidden_size, TOP_K=top_k,
        PARTS=num_parts, ADDS=residual is not None, BLOCK=block, num_warps=4, **overlapped(products.device),
    )  # fmt: skip
    return out


def add_sums(residual: Tensor, sums: Tensor) -> Tensor:
    """Add float32 ``sums``, each rounded to the dtype of ``residual``, to it, and return it; both are contiguous, of
    one shape."""
    assert residual.is_contiguous() and sums.is_contiguous() and residual.shape == sums.shape
    size = residual.numel()
    _add_kernel[(triton.cdiv(size, _BLOCK),)](
        residual, sums, size, BLOCK=_BLOCK, num_warps=4, **overlapped(residual.device)
    )
    return residual


@triton.jit
def _sum_kernel(
    products_ptr,
    experts_ptr,
    out_ptr,
    first,
    num_experts,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):  # loads of all choices are in flight at once
        pair = token * TOP_K + choice
        expert = tl.load(experts_ptr + pair) - first
        is_own = (expert >= 0) & (expert < num_experts)
        inside = columns < tl.where(is_own, HIDDEN, 0)
        for part in tl.static_range(PARTS):
            row = pair * PARTS + part
            total += tl.load(products_ptr + row * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
    out_at, inside = out_ptr + token * HIDDEN + columns, columns < HIDDEN
    if ADDS:
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32) + tl.load(out_at, mask=inside).to(tl.float32)
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(residual_ptr, sums_ptr, size, BLOCK: tl.constexpr, OVERLAPPED: tl.constexpr):
    wait(OVERLAPPED)
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    sums = tl.load(sums_ptr + at, mask=inside, other=0.0).to(dtype).to(tl.float32)
    total = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32) + sums
    tl.store(residual_ptr + at, total.to(dtype), mask=inside)
