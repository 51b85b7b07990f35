"""FP8 products on GPUs. See :mod:`.linear`.

A block-scaled product sums one group of columns at a time in the matrix units, and scales each such sum in float32 (as
in DeepSeek-V3's technical report, section 3.3).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.api import RmsNorm, SiluMul
from splitserve.kernels.fp8.triton_quantise import quantise_rows
from splitserve.kernels.fp8.triton_row import launch_fp8_row
from splitserve.kernels.fp8.weight import GROUP, Fp8Weight
from splitserve.kernels.reference.linear import UnfusedLinear
from splitserve.kernels.tuning.linear_launch import Variant


class RowFp8Linear(UnfusedLinear):
    """Product with a scale per row of the weight and of the activations: cuBLAS or CUTLASS, through PyTorch. bfloat16
    only."""

    def __init__(self, weight: Fp8Weight, *, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        super().__init__(weight.weight.shape, rms_norm, silu_mul)
        self._weight, self._scales = weight.weight, weight.scales.view(1, -1).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        quantised, scales = quantise_rows(x, self.in_features)
        return torch._scaled_mm(
            quantised, self._weight.t(), scale_a=scales, scale_b=self._scales, out_dtype=torch.bfloat16
        )


class BlockFp8Linear(UnfusedLinear):
    """Product with a scale per :data:`GROUP` columns of a row of the weight and of the activations. That of a single
    row is one kernel (:mod:`.triton_row`)."""

    def __init__(self, weight: Fp8Weight, *, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        super().__init__(weight.weight.shape, rms_norm, silu_mul)
        self._weight, self._scales = weight.weight, weight.scales.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return self._row("plain", x)
        quantised, scales = quantise_rows(x, GROUP)
        return block_product(quantised, scales, self._weight, self._scales, x.dtype)

    def add_to(
        self, residual: Tensor, x: Tensor, norm: Tensor | None = None, eps: float = 0.0, *, bias: Tensor | None = None
    ) -> Tensor | None:
        if x.shape[0] != 1:
            return super().add_to(residual, x, norm, eps, bias=bias)
        launch_fp8_row("add", x, self._weight, self._scales, residual, bias=bias)
        return None

    def after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        if x.shape[0] != 1 or normed is not None:
            return super().after_norm(x, norm, eps, normed)
        return self._row("norm", x, norm, eps)

    def gated_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        if x.shape[0] != 1:
            return super().gated_after_norm(x, norm, eps, normed)
        return self._row("gated", x, norm, eps) if normed is None else self._row("gated", normed)

    def _row(self, variant: Variant, x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        width = self.out_features // (1 + (variant == "gated"))
        out = torch.empty((1, width), dtype=x.dtype, device=x.device)
        launch_fp8_row(variant, x, self._weight, self._scales, out, norm=norm, eps=eps)
        return out


def block_product(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` [T, K] times ``weight`` [N, K], both float8, in ``dtype`` [T, N]; scales [T, K / GROUP], [N, K /
    GROUP]."""
    rows, columns = x.shape
    out_features = weight.shape[0]
    assert columns % GROUP == 0 and x.is_contiguous() and weight.is_contiguous()
    out = torch.empty((rows, out_features), dtype=dtype, device=x.device)
    block_m = 16 if rows <= 16 else 64
    block_n = 32 if rows <= 64 else 128
    grid = (triton.cdiv(rows, block_m), triton.cdiv(out_features, block_n))
    _block_product_kernel[grid](
        x, x_scales, weight, weight_scales, out, rows, out_features, COLUMNS=columns, GROUP_COLUMNS=GROUP,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def _block_product_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
    out,
    num_rows,
    num_outputs,
    COLUMNS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_output = rows < num_rows, outputs < num_outputs
    x_rows = tl.where(has_row, rows, 0).to(tl.int64)
    weight_rows = tl.where(has_output, outputs, 0).to(tl.int64)
    within = tl.arange(0, GROUP_COLUMNS)
    x_at = x + x_rows[:, None] * COLUMNS + within[None, :]
    weight_at = weight + weight_rows[None, :] * COLUMNS + within[:, None]
    NUM_GROUPS: tl.constexpr = COLUMNS // GROUP_COLUMNS
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(NUM_GROUPS):
        part = tl.dot(tl.load(x_at + group * GROUP_COLUMNS), tl.load(weight_at + group * GROUP_COLUMNS))
        x_scale = tl.load(x_scales + x_rows * NUM_GROUPS + group)
        weight_scale = tl.load(weight_scales + weight_rows * NUM_GROUPS + group)
        total += part * x_scale[:, None] * weight_scale[None, :]
    at = rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])
