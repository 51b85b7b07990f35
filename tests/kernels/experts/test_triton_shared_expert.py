"""Experts with a shared one, which every token has beside those it has chosen, against the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # conftest.py chose its interpreter, if need be, before this import

from expert_cases import CLAMPED, DEVICE, NARROW, assert_same, choices, rand
from splitserve.kernels.experts.launch import ExpertLaunch
from splitserve.kernels.experts.reference import LoopedExperts
from splitserve.kernels.experts.shared_expert import SharedExpert
from splitserve.kernels.experts.spec import GatedActivation
from splitserve.kernels.experts.triton.experts import TritonExperts
from splitserve.kernels.experts.triton.matvec import joined_matrices
from splitserve.kernels.experts.weights import ExpertWeights
from splitserve.kernels.reference import operations
from splitserve.kernels.reference.linear import PlainLinear
from splitserve.kernels.tuning import parameters as tuning

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]

HIDDEN, INNER = 100, 44  # no multiples of blocks; more blocks of the first than are loaded ahead
LAUNCH = {"block_n": 16, "block_k": 32, "down_block_n": 32, "down_block_k": 16}
PAIRS = ExpertLaunch(block_m=1)


def linear(weight: Tensor) -> PlainLinear:
    return PlainLinear(weight, rms_norm=operations.rms_norm, silu_mul=operations.silu_mul)


def shared_expert(size: int, dtype: torch.dtype, *, has_gate: bool = False) -> SharedExpert:
    own_gate = linear(rand(1, HIDDEN, seed=8).to(dtype)) if has_gate else None
    return SharedExpert(
        linear(rand(2 * size, HIDDEN, seed=6, std=HIDDEN**-0.5).to(dtype)),
        linear(rand(HIDDEN, size, seed=7, std=size**-0.5).to(dtype)),
        own_gate,
    )


def experts_of(dtype: torch.dtype) -> ExpertWeights:
    gate_up = rand(6, 2 * INNER, HIDDEN, seed=1, std=HIDDEN**-0.5).to(dtype)
    return ExpertWeights(gate_up, rand(6, HIDDEN, INNER, seed=2, std=INNER**-0.5).to(dtype), GatedActivation())


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(
    ("block_m", "size", "has_gate"),
    [
        (1, INNER, False),
        (1, 2 * INNER, False),
        (1, 2 * INNER, True),
        (1, INNER + 8, False),
        (16, 2 * INNER, False),
        (16, INNER, True),
    ],
)
def test_a_shared_expert_is_in_the_sum(
    num_tokens: int, block_m: int, size: int, has_gate: bool, dtype: torch.dtype
) -> None:
    weights, shared = experts_of(dtype), shared_expert(size, dtype, has_gate=has_gate)
    x, (experts, factors) = rand(num_tokens, HIDDEN).to(dtype), choices(num_tokens, 6, 2)
    run, plain = TritonExperts(weights), LoopedExperts(weights)
    residual = rand(num_tokens, HIDDEN, seed=9).to(dtype)
    expected = residual.clone()
    plain.add_to(expected, x, experts, factors, shared)
    with tuning.forced("experts", {**LAUNCH, "block_m": block_m}):
        sums = run(x, experts, factors, shared)
        run.add_to(residual, x, experts, factors, shared)
    assert_same(sums, plain(x, experts, factors, shared), 1e-5 if dtype == torch.float32 else 1e-2)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2  # two roundings or one
    torch.testing.assert_close(residual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # of other ranks' pairs, which nobody uses
@pytest.mark.parametrize("num_own", [3, 6])
def test_a_single_token_has_it_computed_with_its_experts(num_own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It isn't called by itself then; also on a rank that has some of the experts, of which the token chose one."""
    whole, shared = experts_of(torch.float32), shared_expert(2 * INNER, torch.float32)
    weights = replace(whole, gate_up=whole.gate_up[:num_own], down=whole.down[:num_own])
    x, factors = rand(1, HIDDEN), torch.tensor([[0.75, 0.25]], device=DEVICE)
    experts = torch.tensor([[4, 1]], dtype=torch.int32, device=DEVICE)
    expected = LoopedExperts(weights)(x, experts, factors, shared)
    monkeypatch.setattr(SharedExpert, "__call__", None)
    monkeypatch.setattr(SharedExpert, "add_to", None)
    residual = torch.zeros(1, HIDDEN, device=DEVICE)
    with tuning.forced("experts", {**LAUNCH, "block_m": 1}):
        assert_same(TritonExperts(weights)(x, experts, factors, shared), expected, 1e-5)
        TritonExperts(weights).add_to(residual, x, experts, factors, shared)
    assert_same(residual, expected, 1e-5)


def test_when_a_shared_expert_is_computed_with_the_others() -> None:
    dtype, plain = torch.float32, experts_of(torch.float32)
    assert joined_matrices(shared_expert(3 * INNER, dtype), plain, PAIRS, 1) is not None
    assert joined_matrices(None, plain, PAIRS, 1) is None
    assert joined_matrices(shared_expert(INNER, dtype), plain, PAIRS, 2) is None
    assert joined_matrices(shared_expert(INNER, dtype), plain, ExpertLaunch(block_m=16), 1) is None
    assert joined_matrices(shared_expert(INNER + 4, dtype), plain, PAIRS, 1) is None
    assert joined_matrices(shared_expert(INNER, dtype, has_gate=True), plain, PAIRS, 1) is None
    assert joined_matrices(shared_expert(INNER, NARROW), plain, PAIRS, 1) is None
    assert joined_matrices(shared_expert(INNER, dtype), replace(plain, activation=CLAMPED), PAIRS, 1) is None
    biased = replace(plain, gate_up_bias=torch.zeros(6, 2 * INNER, device=DEVICE))
    assert joined_matrices(shared_expert(INNER, dtype), biased, PAIRS, 1) is None
    scaled = replace(plain, gate_up_scales=torch.ones(6, 2 * INNER, 1, device=DEVICE))
    assert joined_matrices(shared_expert(INNER, dtype), scaled, PAIRS, 1) is None
