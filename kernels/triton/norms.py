"""Norms in float32 as one Triton kernel, with the addition to the residual and the norm after it.

See :mod:`splitserve.kernels.norms`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.norms import NormWeights
from splitserve.kernels.triton.launch import overlapped, wait


class TritonNorm:
    """See :class:`splitserve.kernels.norms.Norm`."""

    def __init__(self, weights: NormWeights) -> None:
        self.weights = weights

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(x, out, self.weights)
        return out

    def add_to(self, residual: Tensor, x: Tensor, following: NormWeights | None = None) -> Tensor | None:
        normed = None if following is None else torch.empty_like(residual)
        _launch(x, normed, self.weights, residual, following)
        return normed


def _launch(
    x: Tensor,
    out: Tensor | None,
    norm: NormWeights,
    residual: Tensor | None = None,
    following: NormWeights | None = None,
) -> None:
    """Normalise ``x`` [T, N] into ``out`` [T, N]; with ``residual`` [T, N] add it to that instead, and with
    ``following`` normalise the sum into ``out``."""
    num_rows, size = x.shape
    last = norm if following is None else following
    assert x.stride(1) == 1 and norm.weight.shape == last.weight.shape == (size,)
    assert out is None or (out.stride(1) == 1 and out.shape == x.shape)
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape and residual.dtype == x.dtype)
    _norm_kernel[(num_rows,)](
        x,
        norm.weight,
        norm.weight if norm.shift is None else norm.shift,
        x if residual is None else residual,
        last.weight,
        last.weight if last.shift is None else last.shift,
        x if out is None else out,
        x.stride(0),
        size if out is None else out.stride(0),
        norm.eps,
        last.eps,
        CENTRED=norm.centred,
        SHIFTED=norm.shift is not None,
        ADDS=residual is not None,
        FOLLOWED=following is not None,
        LAST_CENTRED=last.centred,
        LAST_SHIFTED=last.shift is not None,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 1024 else 1,
        **overlapped(x.device),
    )


@triton.jit(do_not_specialize=["x_stride", "out_stride"])
def _norm_kernel(
    x_ptr,
    weight_ptr,
    shift_ptr,
    residual_ptr,
    last_weight_ptr,
    last_shift_ptr,
    out_ptr,
    x_stride,
    out_stride,
    eps,
    last_eps,
    CENTRED: tl.constexpr,
    SHIFTED: tl.constexpr,
    ADDS: tl.constexpr,
    FOLLOWED: tl.constexpr,
    LAST_CENTRED: tl.constexpr,
    LAST_SHIFTED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    number = tl.program_id(0).to(tl.int64)
    weight, shift = _norm_weights(weight_ptr, shift_ptr, column, inside, SHIFTED)
    if FOLLOWED:
        last_weight, last_shift = _norm_weights(last_weight_ptr, last_shift_ptr, column, inside, LAST_SHIFTED)
    wait(OVERLAPPED)
    narrow = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + number * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    row = _normalised_wide(x, inside, weight, shift, eps, CENTRED, SIZE).to(narrow)
    if ADDS:
        at = number * SIZE + column
        row = row.to(tl.float32) + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        row = row.to(narrow)
        tl.store(residual_ptr + at, row, mask=inside)
    if FOLLOWED:
        wide = row.to(tl.float32)
        row = _normalised_wide(wide, inside, last_weight, last_shift, last_eps, LAST_CENTRED, SIZE).to(narrow)
    if FOLLOWED or not ADDS:
        tl.store(out_ptr + number * out_stride + column, row, mask=inside)


@triton.jit
def _norm_weights(weight_ptr, shift_ptr, column, inside, SHIFTED: tl.constexpr):
    """Load a norm's weight and shift: zeros without one."""
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    shift = tl.zeros_like(weight)
    if SHIFTED:
        shift = tl.load(shift_ptr + column, mask=inside, other=0.0)
    return weight, shift


@triton.jit
def _normalised_wide(x, inside, weight, shift, eps, CENTRED: tl.constexpr, SIZE: tl.constexpr):
    """Return a normalised row in float32; elements of ``x`` that aren't ``inside`` are zero, and stay so."""
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x) / SIZE, 0.0)
    return x * tl.rsqrt(tl.sum(x * x) / SIZE + eps) * weight + shift
