"""Estimates of step times against figures worked out by hand."""

import msgspec
import pytest
import torch

from splitserve.models.demo.checkpoint import shape_config
from splitserve.models.demo.published import named_config
from splitserve.models.roofline import ATTAINED, DEVICE_RATES, DeviceRates, device_rates, estimate_steps
from splitserve.models.step_costs import decode_bytes
from splitserve.protocol.placement.step_model import StepWork
from splitserve.protocol.request import Role
from splitserve.router.placement.step_models import Known, trusted_model

RATES = DeviceRates(flops_per_second=1e14, bytes_per_second=1e12, overhead_seconds=1e-3)


def test_the_estimate_of_a_known_shape() -> None:
    config = shape_config("llama-3.1-8b")
    model = estimate_steps(config, RATES, itemsize=2)
    # 8.03e9 weights less the embedding of 0.525e9, in bf16, at 1 TB/s
    assert model.base == pytest.approx(1e-3 + 2 * 7.50e9 / (ATTAINED * 1e12), rel=0.01)
    assert model.per_context == pytest.approx(2 * 32 * 8 * 128 * 2 / (ATTAINED * 1e12))
    assert model.per_token == pytest.approx(2 * 6.98e9 / (ATTAINED * 1e14), rel=0.01)
    assert model.per_pair == pytest.approx(4 * 32 * 32 * 128 / (ATTAINED * 1e14))
    assert model.num_steps == 0
    assert 0.8 * model.per_token < model.per_token_beside < model.per_token


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_the_router_can_follow_fits_of_few_experts_and_of_all(name: str) -> None:
    """It holds the fit of a worker that is alone in its role within a factor of the estimate."""
    config = named_config(name)
    estimate = estimate_steps(config, DEVICE_RATES["H200"], itemsize=2)
    assert config.experts is not None
    router = config.experts.router
    for hit in (router.top_k, router.num_experts):  # of one sequence, of a prompt
        base = 5e-4 + decode_bytes(config, 0, 0, 2, hit) / (ATTAINED * 4.8e12)
        fit = msgspec.structs.replace(estimate, base=base, num_steps=5000)
        assert trusted_model(Known(fit, estimate), []).base == base
    reads = estimate_steps(config, DeviceRates(1e30, 1e12, 0.0), itemsize=2)
    for batch in (8, 128):
        hit = router.num_experts * (1 - (1 - router.top_k / router.num_experts) ** batch)
        expected = decode_bytes(config, batch, 4096, 2, hit) / (ATTAINED * 1e12)
        assert reads.decode_seconds(batch, batch * 4096) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_steps_of_prompts_read_all_experts(name: str) -> None:
    """A worker that only computes prompts has few steps, so its estimate counts for long."""
    config = named_config(name)
    prefill, mixed = (estimate_steps(config, RATES, 2, role=role) for role in (Role.PREFILL, Role.MIXED))
    assert prefill.base == pytest.approx(1e-3 + decode_bytes(config, 0, 0, 2) / (ATTAINED * 1e12))
    assert prefill.base > 1.3 * mixed.base
    assert prefill.per_token == mixed.per_token


def test_windows_bound_the_kv_that_a_step_reads() -> None:
    config = named_config("gemma-3-27b")
    model = estimate_steps(config, RATES, itemsize=2)
    read = decode_bytes(config, 1, 4096, 2) - decode_bytes(config, 0, 0, 2)
    assert model.per_context * 4096 == pytest.approx(read / (ATTAINED * 1e12))


def test_ranks_share_the_work() -> None:
    config = shape_config("llama-3.1-8b")
    one, two = (estimate_steps(config, DEVICE_RATES["H200"], 2, ranks) for ranks in (1, 2))
    work = StepWork(64, 64_000, 512, 131_328)
    assert one.seconds(work) / 2 < two.seconds(work) < one.seconds(work)


def test_cores_have_rates() -> None:
    one, many = (device_rates(torch.device("cpu"), threads) for threads in (1, 64))
    assert many.flops_per_second == 64 * one.flops_per_second
    assert many.bytes_per_second == 8 * one.bytes_per_second
