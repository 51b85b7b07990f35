"""Mixtures of experts in plain PyTorch: the default on CPU, and the definition that other backends are tested against.

Signatures and shapes are those of :mod:`splitserve.kernels.api`.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from splitserve.kernels.experts.shared_expert import SharedExpert
from splitserve.kernels.experts.spec import GatedActivation, GroupScore, RouterSpec, Score
from splitserve.kernels.experts.weights import ExpertWeights

_SMALLEST_SUM = 1e-20  # of weights to divide by


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
}


def route(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """See :class:`splitserve.kernels.api.Route`."""
    wide = logits.float()
    scores = wide
    if spec.score is Score.SOFTMAX:
        scores = wide.softmax(-1)
    elif spec.score is Score.SIGMOID:
        scores = wide.sigmoid()
    ranked = scores if bias is None else scores + bias
    experts = _within_kept_groups(ranked, spec).topk(spec.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if spec.score is Score.SOFTMAX_OF_TOP:
        weights = weights.softmax(-1)
    if spec.normalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=_SMALLEST_SUM)
    return experts.int(), weights * spec.scale


def _within_kept_groups(ranked: Tensor, spec: RouterSpec) -> Tensor:
    """Return ``ranked`` [T, E] with minus infinity for the experts of groups that are not kept."""
    if spec.num_groups == spec.kept_groups:
        return ranked
    grouped = ranked.view(-1, spec.num_groups, spec.group_size)
    best = grouped.topk(1 if spec.group_score is GroupScore.MAX else 2, -1).values.sum(-1)  # [T, groups]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(spec.kept_groups, -1).indices, value=True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).view_as(ranked)


def activate(gate_up: Tensor, activation: GatedActivation) -> Tensor:
    """Return the activation [T, inner] of ``gate_up`` [T, 2 * inner]."""
    if activation.interleaved:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, -1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.sigmoid_factor != 1.0:
        gate = gate * (gate * activation.sigmoid_factor).sigmoid()
    else:
        gate = FUNCTIONS[activation.function](gate)
    return gate * (up + activation.up_offset if activation.up_offset else up)


class LoopedExperts:
    """A loop over the experts that are hit. See :class:`splitserve.kernels.experts.weights.Experts`."""

    def __init__(self, weights: ExpertWeights) -> None:
        self.weights = weights

    def __call__(self, x: Tensor, experts: Tensor, factors: Tensor, shared: SharedExpert | None = None) -> Tensor:
        own, out = self.weights, torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in torch.unique(experts).tolist():
            index = expert - own.first
            if not 0 <= index < own.num_experts:
                continue
            rows, choices = torch.where(experts == expert)
            product = self._mlp(x[rows], index).float()
            out.index_add_(0, rows, product * factors[rows, choices].unsqueeze(1))
        return out if shared is None else out.add_(shared(x))

    def add_to(
        self, residual: Tensor, x: Tensor, experts: Tensor, factors: Tensor, shared: SharedExpert | None = None
    ) -> None:
        """See :class:`splitserve.kernels.experts.weights.Experts`."""
        if shared is not None:
            shared.add_to(residual, x)
        residual.add_(self(x, experts, factors).to(residual.dtype))

    def _mlp(self, x: Tensor, index: int) -> Tensor:
        own = self.weights
        gate_up_bias = None if own.gate_up_bias is None else own.gate_up_bias[index]
        down_bias = None if own.down_bias is None else own.down_bias[index]
        inner = activate(F.linear(x, own.gate_up[index], gate_up_bias), own.activation)
        return F.linear(inner, own.down[index], down_bias)
