"""Estimates of step times against figures worked out by hand."""

import pytest
import torch

from splitserve.models.demo.checkpoint import shape_config
from splitserve.models.roofline import ATTAINED, DEVICE_RATES, DeviceRates, device_rates, estimate_steps
from splitserve.protocol.placement.step_model import StepWork

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


def test_ranks_share_the_work() -> None:
    config = shape_config("llama-3.1-8b")
    one, two = (estimate_steps(config, DEVICE_RATES["H200"], 2, ranks) for ranks in (1, 2))
    work = StepWork(64, 64_000, 512, 131_328)
    assert one.seconds(work) / 2 < two.seconds(work) < one.seconds(work)


def test_cores_have_rates() -> None:
    one, many = (device_rates(torch.device("cpu"), threads) for threads in (1, 64))
    assert many.flops_per_second == 64 * one.flops_per_second
    assert many.bytes_per_second == 8 * one.bytes_per_second
