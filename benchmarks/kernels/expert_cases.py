"""Cases of ``splitserve bench kernels`` with experts; shapes of models without any have those of a small mixture."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from splitserve.benchmarks.kernels.case import Call, Case, Target
from splitserve.kernels.api import Kernels
from splitserve.kernels.experts import reference
from splitserve.kernels.experts.spec import RouterSpec
from splitserve.kernels.experts.weights import Experts, ExpertWeights, Router, RouterWeights
from splitserve.kernels.tuning.tunables import num_copies
from splitserve.models.experts import ExpertsSpec

_SMALL = ExpertsSpec(RouterSpec(8, 2, normalised=True), 64)
_EPS = 1e-6


def expert_routes(target: Target, rows: int) -> Iterator[Case]:
    """Yield the choice of experts."""
    spec = (target.config.experts or _SMALL).router
    num_bytes = rows * (spec.num_experts * target.dtype.itemsize + spec.top_k * 8)
    inputs = target.copies(num_bytes, lambda: target.normal(rows, spec.num_experts))

    def make_calls(kernels: Kernels) -> list[Call]:
        return [partial(_weights, kernels, logits, spec) for logits in inputs]

    yield Case("route", f"{spec.top_k} of {spec.num_experts}", rows, num_bytes, 0, make_calls)


def expert_routers(target: Target, rows: int) -> Iterator[Case]:
    """Yield the router of a layer: norm, logits, and the choice of experts."""
    spec, hidden = (target.config.experts or _SMALL).router, target.config.hidden_size
    norm, one_bytes = target.normal(hidden), spec.num_experts * hidden * target.dtype.itemsize
    x = target.normal(rows, hidden)
    layers = [
        RouterWeights(spec, target.normal(spec.num_experts, hidden, scale=hidden**-0.5))
        for _ in range(num_copies(one_bytes, target.device))
    ]
    num_bytes = one_bytes + 2 * x.nbytes + rows * spec.top_k * 8

    def make_calls(kernels: Kernels) -> list[Call]:
        return [partial(_factors, kernels.pack_router(layer), x, norm) for layer in layers]

    label = f"{spec.top_k} of {spec.num_experts}, {hidden}"
    yield Case("pack_router", label, rows, num_bytes, 2 * rows * hidden * spec.num_experts, make_calls)


def _factors(router: Router, x: Tensor, norm: Tensor) -> Tensor:
    return router(x, norm, _EPS)[2].sort(-1).values


def _weights(kernels: Kernels, logits: Tensor, spec: RouterSpec) -> Tensor:
    return kernels.route(logits, None, spec)[1].sort(-1).values


def expert_products(target: Target, rows: int) -> Iterator[Case]:
    """Yield the experts of a layer."""
    sizes, hidden = target.config.experts or _SMALL, target.config.hidden_size
    count, top_k, inner = sizes.router.num_experts, sizes.router.top_k, sizes.inner_size
    x = target.normal(rows, hidden)
    experts, factors = reference.route(target.normal(rows, count), None, sizes.router)
    one_bytes = 3 * hidden * inner * target.dtype.itemsize
    num_bytes = int(torch.unique(experts).numel()) * one_bytes + 3 * x.nbytes
    layers = [
        ExpertWeights(
            target.normal(count, 2 * inner, hidden, scale=hidden**-0.5),
            target.normal(count, hidden, inner, scale=inner**-0.5),
            sizes.activation,
        )
        for _ in range(num_copies(count * one_bytes, target.device))
    ]

    def make_calls(kernels: Kernels) -> list[Call]:
        return [partial(_product, kernels.pack_experts(layer), x, experts, factors) for layer in layers]

    label = f"{top_k} of {count}, {hidden}->{inner}"
    yield Case(
        "pack_experts", label, rows, num_bytes, 6 * rows * top_k * hidden * inner, make_calls, can_be_captured=False
    )


def _product(layer: Experts, x: Tensor, experts: Tensor, factors: Tensor) -> Tensor:
    return layer(x, experts, factors)
