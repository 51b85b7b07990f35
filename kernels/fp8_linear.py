"""Products with weights that are stored in FP8 (float8_e4m3fn), each group of a row's elements with a scale.

Where the GPU has FP8 units, both sides are in FP8: activations are quantised row by row as they come, with a scale per
row, or per group of :data:`GROUP` elements where the weight has scales of such groups. Elsewhere the weight becomes one
of the dtype that the model computes in, once, at load.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from splitserve.kernels.api import Linear, RmsNorm, SiluMul
from splitserve.kernels.fp8_weight import GROUP, Fp8Weight

_MIN_CAPABILITY = (9, 0)
_ALIGNMENT = 16  # of both sizes of a weight, for torch._scaled_mm


Pack = Callable[[Fp8Weight], Linear]


def select_fp8(
    device: torch.device,
    dtype: torch.dtype,
    *,
    pack_linear: Callable[[Tensor], Linear],
    rms_norm: RmsNorm,
    silu_mul: SiluMul,
) -> tuple[Pack, str]:
    """How FP8 weights are packed for a model that computes in ``dtype``, and in words what becomes of them."""

    def dequantise(weight: Fp8Weight) -> Linear:
        return pack_linear(weight.dequantised(dtype))

    reason = fp8_unavailable_reason(device, dtype)
    if reason is not None:
        return dequantise, f"FP8 weights are computed with in {str(dtype).removeprefix('torch.')}: {reason}"
    from splitserve.kernels.triton_fp8 import BlockFp8Linear, RowFp8Linear

    def pack(weight: Fp8Weight) -> Linear:
        if weight.has_whole_rows and not any(size % _ALIGNMENT for size in weight.weight.shape):
            return RowFp8Linear(weight, rms_norm=rms_norm, silu_mul=silu_mul)
        if weight.group == GROUP and not weight.skipped and weight.weight.shape[1] % GROUP == 0:
            return BlockFp8Linear(weight, rms_norm=rms_norm, silu_mul=silu_mul)
        return dequantise(weight)

    return pack, "FP8 weights and activations"


def fp8_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why products can't be in FP8, or None."""
    if device.type != "cuda":
        return f"{device.type} has no FP8 units"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, FP8 products need 9.0"
    if dtype != torch.bfloat16:
        return f"FP8 products give bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None
