"""A layer's experts on the Triton kernels: a program per pair for few tokens, else sorted pairs in tiles."""

from dataclasses import replace

from torch import Tensor

from splitserve.kernels.experts.launch import expert_launch, experts_key
from splitserve.kernels.experts.mxfp4 import by_halves
from splitserve.kernels.experts.triton.grouped import grouped_down, grouped_gate_up
from splitserve.kernels.experts.triton.matvec import narrow_down, narrow_gate_up
from splitserve.kernels.experts.triton.sorting import sort_pairs
from splitserve.kernels.experts.triton.sums import add_sums, sum_choices
from splitserve.kernels.experts.weights import ExpertWeights


class TritonExperts:
    """See :class:`splitserve.kernels.api.Experts`.

    Shapes alone decide what is launched: a CUDA graph can capture it.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        assert weights.gate_up.is_contiguous() and weights.down.is_contiguous()
        if weights.is_mxfp4:
            weights = replace(weights, gate_up=by_halves(weights.gate_up), down=by_halves(weights.down))
        self.weights = weights

    def add_to(self, residual: Tensor, x: Tensor, experts: Tensor, factors: Tensor) -> None:
        """See :class:`splitserve.kernels.api.Experts`."""
        add_sums(residual, self(x, experts, factors))

    def __call__(self, x: Tensor, experts: Tensor, factors: Tensor) -> Tensor:
        own, (num_tokens, top_k) = self.weights, experts.shape
        key = experts_key(
            own.gate_up.dtype,
            num_experts=own.num_experts,
            top_k=top_k,
            hidden_size=x.shape[1],
            inner_size=own.inner_size,
        )
        launch = expert_launch(key, num_experts=own.num_experts, top_k=top_k, num_tokens=num_tokens)
        x = x.contiguous()
        if launch.block_m == 1:
            return narrow_down(narrow_gate_up(x, experts, own, launch), experts, factors, own, launch)
        ordered = sort_pairs(experts, own.first, own.num_experts, launch.block_m)
        inner = grouped_gate_up(x, ordered, top_k, own, launch)
        products = grouped_down(inner, factors, ordered, own, launch)
        return sum_choices(products, experts, own.first, own.num_experts)
