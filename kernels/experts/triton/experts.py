"""A layer's experts on the Triton kernels: a program per pair for few tokens, else sorted pairs in tiles."""

from dataclasses import replace

import torch
from torch import Tensor

from splitserve.kernels.experts.launch import ExpertLaunch, expert_launch, experts_key
from splitserve.kernels.experts.mxfp4 import by_quarters, shifted_scales
from splitserve.kernels.experts.shared_expert import SharedExpert
from splitserve.kernels.experts.triton.grouped import grouped_down, grouped_gate_up
from splitserve.kernels.experts.triton.matvec import joined_matrices, narrow_products
from splitserve.kernels.experts.triton.packed import packed_down, packed_gate_up
from splitserve.kernels.experts.triton.sorting import sort_pairs
from splitserve.kernels.experts.triton.sums import add_sums, sum_choices
from splitserve.kernels.experts.weights import ExpertWeights


class TritonExperts:
    """See :class:`splitserve.kernels.experts.weights.Experts`.

    Shapes alone decide what is launched: a CUDA graph can capture it.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        assert weights.gate_up.is_contiguous() and weights.down.is_contiguous()
        if weights.is_mxfp4:
            weights = _as_read(weights)
        self.weights = weights

    def add_to(
        self, residual: Tensor, x: Tensor, experts: Tensor, factors: Tensor, shared: SharedExpert | None = None
    ) -> None:
        """See :class:`splitserve.kernels.experts.weights.Experts`."""
        launch = self._launch(x, experts)
        joined = joined_matrices(shared, self.weights, launch, x.shape[0])
        if shared is not None and joined is None:
            shared.add_to(residual, x)
        self._sums(launch, x, experts, factors, joined=joined, residual=residual)

    def __call__(self, x: Tensor, experts: Tensor, factors: Tensor, shared: SharedExpert | None = None) -> Tensor:
        launch = self._launch(x, experts)
        joined = joined_matrices(shared, self.weights, launch, x.shape[0])
        sums = self._sums(launch, x, experts, factors, joined=joined)
        return sums if shared is None or joined is not None else sums.add_(shared(x))

    def _launch(self, x: Tensor, experts: Tensor) -> ExpertLaunch:
        own, (num_tokens, top_k) = self.weights, experts.shape
        key = experts_key(
            own.gate_up.dtype,
            num_experts=own.num_experts,
            top_k=top_k,
            hidden_size=x.shape[1],
            inner_size=own.inner_size,
        )
        return expert_launch(
            key,
            num_experts=own.num_experts,
            top_k=top_k,
            num_tokens=num_tokens,
            dtype=own.gate_up.dtype,
            down_dtype=own.down.dtype,
            device=x.device,
        )

    def _sums(
        self,
        launch: ExpertLaunch,
        x: Tensor,
        experts: Tensor,
        factors: Tensor,
        *,
        joined: tuple[Tensor, Tensor] | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the sums, or add them to ``residual``. ``joined``: see :func:`.matvec.joined_matrices`."""
        own, x = self.weights, x.contiguous()
        ordered = None if launch.block_m == 1 else sort_pairs(experts, own.first, own.num_experts, launch.block_m)
        if own.is_mxfp4:
            inner = packed_gate_up(x, experts, ordered, own, launch)
            products = packed_down(inner, experts, factors, ordered, own, launch)
        elif ordered is None:
            sums = narrow_products(x, experts, factors, own, launch, joined=joined)
            return sums if residual is None else add_sums(residual, sums)
        else:
            inner = grouped_gate_up(x, ordered, experts.shape[1], own, launch)
            products = grouped_down(inner, factors, ordered, own, launch)
        return sum_choices(products, experts, own.first, own.num_experts, residual)


def _as_read(weights: ExpertWeights) -> ExpertWeights:
    """Return weights in MXFP4 in the order in which the kernels read them."""
    assert weights.gate_up_scales is not None and weights.down_scales is not None
    return replace(
        weights,
        gate_up=by_quarters(weights.gate_up).view(torch.uint8),
        down=by_quarters(weights.down).view(torch.uint8),
        gate_up_scales=shifted_scales(weights.gate_up_scales),
        down_scales=shifted_scales(weights.down_scales),
    )
