"""Experts with an MLP that every token has beside them, against the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # conftest.py chose its interpreter, if need be, before this import

from expert_cases import CLAMPED, DEVICE, NARROW, assert_same, choices, rand
from splitserve.kernels.experts.launch import ExpertLaunch
from splitserve.kernels.experts.reference import LoopedExperts
from splitserve.kernels.experts.shared import SharedMlp
from splitserve.kernels.experts.spec import GatedActivation
from splitserve.kernels.experts.triton.experts import TritonExperts
from splitserve.kernels.experts.triton.matvec import joinable
from splitserve.kernels.experts.weights import ExpertWeights
from splitserve.kernels.reference import operations
from splitserve.kernels.reference.linear import PlainLinear
from splitserve.kernels.tuning import parameters as tuning

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

HIDDEN, INNER = 52, 44  # no multiples of tiles
LAUNCH = {"block_n": 16, "block_k": 32, "down_block_n": 32, "down_block_k": 16}
PAIRS = ExpertLaunch(block_m=1)


def linear(weight: Tensor) -> PlainLinear:
    return PlainLinear(weight, rms_norm=operations.rms_norm, silu_mul=operations.silu_mul)


def shared_mlp(size: int, dtype: torch.dtype, *, has_factor: bool = False) -> SharedMlp:
    factor = linear(rand(1, HIDDEN, seed=8).to(dtype)) if has_factor else None
    return SharedMlp(
        linear(rand(2 * size, HIDDEN, seed=6, std=HIDDEN**-0.5).to(dtype)),
        linear(rand(HIDDEN, size, seed=7, std=size**-0.5).to(dtype)),
        factor,
    )


def experts_of(dtype: torch.dtype, activation: GatedActivation) -> ExpertWeights:
    gate_up = rand(6, 2 * INNER, HIDDEN, seed=1, std=HIDDEN**-0.5).to(dtype)
    return ExpertWeights(gate_up, rand(6, HIDDEN, INNER, seed=2, std=INNER**-0.5).to(dtype), activation)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(
    ("block_m", "size", "has_factor"),
    [
        (1, INNER, False),
        (1, 2 * INNER, False),
        (1, 2 * INNER, True),
        (1, INNER + 8, False),
        (16, 2 * INNER, False),
        (16, INNER, True),
    ],
)
def test_the_shared_mlp_is_in_the_sum(
    num_tokens: int, block_m: int, size: int, has_factor: bool, dtype: torch.dtype
) -> None:
    weights, shared = experts_of(dtype, GatedActivation()), shared_mlp(size, dtype, has_factor=has_factor)
    x, (experts, factors) = rand(num_tokens, HIDDEN).to(dtype), choices(num_tokens, 6, 2)
    run, plain = TritonExperts(weights), LoopedExperts(weights)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    residual = rand(num_tokens, HIDDEN, seed=9).to(dtype)
    expected = residual.clone()
    plain.add_to(expected, x, experts, factors, shared)
    with tuning.forced("experts", {**LAUNCH, "block_m": block_m}):
        assert_same(run(x, experts, factors, shared), plain(x, experts, factors, shared), tolerance)
        run.add_to(residual, x, experts, factors, shared)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2  # two roundings or one
    torch.testing.assert_close(residual, expected, rtol=tolerance, atol=tolerance)


def test_a_shared_mlp_that_is_like_more_experts_is_computed_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It isn't called by itself then."""
    weights, shared = experts_of(torch.float32, GatedActivation()), shared_mlp(2 * INNER, torch.float32)
    x, (experts, factors) = rand(2, HIDDEN), choices(2, 6, 2)
    expected = LoopedExperts(weights)(x, experts, factors, shared)
    monkeypatch.setattr(SharedMlp, "__call__", None)
    monkeypatch.setattr(SharedMlp, "add_to", None)
    with tuning.forced("experts", {**LAUNCH, "block_m": 1}):
        assert_same(TritonExperts(weights)(x, experts, factors, shared), expected, 1e-5)


def test_what_is_joinable() -> None:
    plain = experts_of(torch.float32, GatedActivation())
    assert joinable(shared_mlp(3 * INNER, torch.float32), plain, PAIRS) is not None
    assert joinable(shared_mlp(INNER, torch.float32), plain, ExpertLaunch(block_m=16)) is None
    assert joinable(shared_mlp(INNER + 4, torch.float32), plain, PAIRS) is None
    assert joinable(shared_mlp(INNER, torch.float32, has_factor=True), plain, PAIRS) is None
    assert joinable(shared_mlp(INNER, NARROW), plain, PAIRS) is None
    assert joinable(shared_mlp(INNER, torch.float32), replace(plain, activation=CLAMPED), PAIRS) is None
    biased = replace(plain, gate_up_bias=torch.zeros(6, 2 * INNER, device=DEVICE))
    assert joinable(shared_mlp(INNER, torch.float32), biased, PAIRS) is None
    scaled = replace(plain, gate_up_scales=torch.ones(6, 2 * INNER, 1, device=DEVICE))
    assert joinable(shared_mlp(INNER, torch.float32), scaled, PAIRS) is None
