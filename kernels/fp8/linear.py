"""Products with weights that are stored in FP8 (float8_e4m3fn), with a scale for each group of a row's elements.

If the GPU has FP8 units, both sides are in FP8: activations are quantised row by row at run time, with a scale per row,
or per group of :data:`GROUP` elements if the weight has scales of such groups. Otherwise the weight is converted once,
at load, to the model's compute dtype.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from splitserve.kernels.api import Linear, RmsNorm, SiluMul
from splitserve.kernels.fp8.weight import GROUP, Fp8Weight

_MIN_CAPABILITY = (9, 0)
_ALIGNMENT = 16  # of both dimensions of a weight, for torch._scaled_mm


Pack = Callable[[Fp8Weight], Linear]


def select_fp8(
    device: torch.device,
    dtype: torch.dtype,
    *,
    pack_linear: Callable[[Tensor], Linear],
    rms_norm: RmsNorm,
    silu_mul: SiluMul,
) -> tuple[Pack, str]:
    """Return the function that packs FP8 weights for a model that computes in ``dtype``, and a description of the
    choice."""

    def dequantise(weight: Fp8Weight) -> Linear:
        return pack_linear(weight.dequantised(dtype))

    reason = fp8_unavailable_reason(device, dtype)
    if reason is not None:
        return dequantise, f"FP8 weights are converted to {str(dtype).removeprefix('torch.')}: {reason}"
    from splitserve.kernels.fp8.triton_linear import BlockFp8Linear, RowFp8Linear

    def pack(weight: Fp8Weight) -> Linear:
        if weight.has_whole_rows and not any(size % _ALIGNMENT for size in weight.weight.shape):
            return RowFp8Linear(weight, rms_norm=rms_norm, silu_mul=silu_mul)
        if weight.group == GROUP and not weight.skipped and weight.weight.shape[1] % GROUP == 0:
            return BlockFp8Linear(weight, rms_norm=rms_norm, silu_mul=silu_mul)
        return dequantise(weight)

    return pack, "FP8 weights and activations"


def fp8_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why products can't be computed in FP8, or None."""
    if device.type != "cuda":
        return f"{device.type} has no FP8 units"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, FP8 products need 9.0"
    if dtype != torch.bfloat16:
        return f"FP8 products give bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None
