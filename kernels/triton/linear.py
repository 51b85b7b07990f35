"""Products of a few rows with a large weight, as in a decode step: bound by the bandwidth of reading the weight.

There are two kernels, each fused with the operations around the product: :mod:`.linear_row` for a single row,
:mod:`.linear_tiles` for more. Both fetch their first weights before they wait for the kernel that computes their input,
so that memory stays busy while that kernel ends. For many rows cuBLAS is better.
"""

import torch
from torch import Tensor

from splitserve.kernels.api import RmsNorm, SiluMul
from splitserve.kernels.reference.linear import PlainLinear
from splitserve.kernels.triton.linear_row import launch_row
from splitserve.kernels.triton.linear_tiles import launch_tiles
from splitserve.kernels.triton.operations import add_parts
from splitserve.kernels.tuning.linear_launch import LinearLaunch, Variant, launch_params

MAX_ROWS = 512  # with more rows, cuBLAS is never slower


class TritonLinear(PlainLinear):
    """The weight unchanged, [out_features, in_features]. See :class:`splitserve.kernels.api.Linear`."""

    def __init__(self, weight: Tensor, *, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        super().__init__(weight, rms_norm=rms_norm, silu_mul=silu_mul)
        assert weight.is_contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if (params := self._params("plain", x)) is None:
            return super().__call__(x)
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        launch(x, self.weight, out, params)
        return out

    def parts(self, x: Tensor) -> Tensor:
        params = self._params("plain", x)
        return self._apart(x, params) if params is not None and params.leaves_parts else super().parts(x)

    def add_to(
        self, residual: Tensor, x: Tensor, norm: Tensor | None = None, eps: float = 0.0, *, bias: Tensor | None = None
    ) -> Tensor | None:
        if (params := self._params("add", x)) is None:
            return super().add_to(residual, x, bias=bias)
        if norm is not None and params.leaves_parts:
            return add_parts(residual, self._apart(x, params), norm, eps, bias)
        launch(x, self.weight, residual, params, adds=True, bias=bias)
        return None

    def after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        if (params := self._params("norm", x)) is None:
            return super().after_norm(x, norm, eps, normed)
        out = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        self._launch_after_norm(x, out, norm, eps, normed, params, gated=False)
        return out

    def parts_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        params = self._params("norm", x)
        if params is not None and params.leaves_parts:
            return self._apart(self._rms_norm(x, norm, eps) if normed is None else normed, params)
        return super().parts_after_norm(x, norm, eps, normed)

    def gated_after_norm(self, x: Tensor, norm: Tensor, eps: float, normed: Tensor | None = None) -> Tensor:
        if (params := self._params("gated", x)) is None:
            return super().gated_after_norm(x, norm, eps, normed)
        out = torch.empty((x.shape[0], self.out_features // 2), dtype=x.dtype, device=x.device)
        self._launch_after_norm(x, out, norm, eps, normed, params, gated=True)
        return out

    def _apart(self, x: Tensor, params: LinearLaunch) -> Tensor:
        parts = torch.empty((params.split_k, x.shape[0], self.out_features), dtype=torch.float32, device=x.device)
        launch(x, self.weight, parts, params)
        return parts

    def _launch_after_norm(
        self,
        x: Tensor,
        out: Tensor,
        norm: Tensor,
        eps: float,
        normed: Tensor | None,
        params: LinearLaunch,
        *,
        gated: bool,
    ) -> None:
        if params.block_m == 1 and normed is None:
            launch(x, self.weight, out, params, norm=norm, eps=eps, gated=gated)
        else:  # rows that come normalised may have another norm than RMS
            normed = self._rms_norm(x, norm, eps) if normed is None else normed
            launch(normed, self.weight, out, params, gated=gated)

    def _params(self, variant: Variant, x: Tensor) -> LinearLaunch | None:
        """Return the launch parameters; None leaves the product to cuBLAS."""
        if x.shape[0] > MAX_ROWS:
            return None
        params = launch_params(variant, x.dtype, self.out_features, self.in_features, x.shape[0])
        return params if params.block_m else None


def launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    params: LinearLaunch,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    adds: bool = False,
    bias: Tensor | None = None,
) -> None:
    """Compute ``x`` [T, K] times ``weight`` [N, K] -> ``out`` [T, N]; [T, N / 2] if ``gated``; added to ``out`` if
    ``adds``, with ``bias`` [N].

    With ``out`` [``split_k``, T, N], in float32, the parts of the product stay separate. Only the kernel for one row
    takes ``norm`` [K].
    """
    assert bias is None or adds
    assert x.stride(1) == 1 and weight.shape == (out.shape[-1] * (1 + gated), x.shape[1]) and out.is_contiguous()
    if params.block_m == 1:
        assert x.shape[0] == 1
        launch_row(x, weight, out, params, norm=norm, eps=eps, gated=gated, adds=adds, bias=bias)
    else:
        assert norm is None
        launch_tiles(x, weight, out, params, gated=gated, adds=adds, bias=bias)
