"""Matrix products with weights in the layout that the GEMM needs, in plain PyTorch.

:class:`OneDnnLinear` converts the weight once, at load, to oneDNN's own blocked layout; the plain copy can then be
freed. ``splitserve bench kernels --device cpu`` compares both.
"""

import os
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from splitserve.kernels.api import RmsNorm, SiluMul

# oneDNN chooses the blocked layout for a number of rows. The layout for 128 rows suits all numbers of rows; the one for
# a single row is slow for more.
_LAYOUT_ROWS = 128

# oneDNN makes a primitive for each number of rows of each weight shape: 0.55 MiB of heap on AVX-512. Two caches hold
# about half of that each, oneDNN's own and that of PyTorch's binding (ideep); both keep 1,024 by default. Making a
# primitive costs 0.35 ms, so numbers of rows beyond _EXACT_ROWS are rounded up to one of _ROW_COUNTS_PER_OCTAVE between
# powers of two: most steps then find a cached primitive.
MAX_CACHED_PRIMITIVES = 128
CACHE_SETTINGS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_EXACT_ROWS = 32
_ROW_COUNTS_PER_OCTAVE = 16


class UnfusedLinear(ABC):
    """Linear that performs norm, activation and addition as separate operations; subclasses may fuse them. See
    :class:`kernels.api.Linear`."""

    def __init__(self, shape: torch.Size, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        self.out_features, self.in_features = shape
        self._rms_norm = rms_norm
        self._silu_mul = silu_mul

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def parts(self, x: Tensor) -> Tensor:
        return self(x).unsqueeze(0)

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        norm: Tensor | None = None,  # noqa: ARG002
        eps: float = 0.0,  # noqa: ARG002
        *,
        bias: Tensor | None = None,
    ) -> Tensor | None:
        residual.add_(self(x))
        if bias is not None:
            residual.add_(bias)
        return None

    def after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        return self(self._rms_norm(x, norm, eps) if normed is None else normed)

    def parts_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        return self.after_norm(x, norm, eps, normed).unsqueeze(0)

    def gated_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        return self._silu_mul(self.after_norm(x, norm, eps, normed))


class PlainLinear(UnfusedLinear):
    """The weight unchanged, [out_features, in_features]: any device, any dtype. See :class:`kernels.api.Linear`."""

    def __init__(self, weight: Tensor, *, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        super().__init__(weight.shape, rms_norm, silu_mul)
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        norm: Tensor | None = None,  # noqa: ARG002
        eps: float = 0.0,  # noqa: ARG002
        *,
        bias: Tensor | None = None,
    ) -> Tensor | None:
        if bias is not None:
            residual.add_(bias)
        torch.addmm(residual, x, self.weight.t(), out=residual)
        return None


class OneDnnLinear(UnfusedLinear):
    """A copy of the weight, [out_features, in_features], in oneDNN's blocked layout. CPU, float32 or bfloat16.

    Rows are padded to :func:`padded_rows`, so that few primitives are made. See :class:`kernels.api.Linear`.
    """

    def __init__(self, weight: Tensor, *, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        super().__init__(weight.shape, rms_norm, silu_mul)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _LAYOUT_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        padding = padded_rows(num_rows) - num_rows
        if padding:
            x = torch.nn.functional.pad(x, (0, 0, 0, padding))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return out[:num_rows] if padding else out


def padded_rows(num_rows: int) -> int:
    """Return the number of rows that a product of ``num_rows`` is computed with: at most a sixteenth more.

    Numbers up to 2,048 are padded to one of 128 values, each further octave adds 16.
    """
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step: int = 2 ** ((num_rows - 1).bit_length() - 1) // _ROW_COUNTS_PER_OCTAVE
    return -(-num_rows // step) * step


def bound_primitive_caches() -> None:
    """Limit this process to :data:`MAX_CACHED_PRIMITIVES` of oneDNN's primitives, about 70 MiB.

    The caches read their capacity when the first primitive is made, so call this before. An operator's setting is kept.
    """
    for name in CACHE_SETTINGS:
        os.environ.setdefault(name, str(MAX_CACHED_PRIMITIVES))


def onednn_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why :class:`OneDnnLinear` can't run here, or None."""
    if device.type != "cpu":
        return f"it runs on CPU, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, not {dtype}"
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this build of PyTorch has no oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU lacks the vector instructions that oneDNN needs for bfloat16"
    return None
