"""Steps of a mixture of experts in the twin, before any were measured: they read the experts that their tokens hit."""

from pathlib import Path

import pytest

from splitserve.benchmarks.twin.calibration import of_roofline
from splitserve.models.config import load_model_config
from splitserve.models.demo.checkpoint import write_demo_model
from splitserve.models.expert_reads import FEW_SEQUENCES, MANY_SEQUENCES
from splitserve.models.roofline import ATTAINED, DEVICE_RATES
from splitserve.models.step_costs import decode_bytes, head_flops, token_flops
from splitserve.protocol.placement.step_model import StepWork
from splitserve.protocol.request import Role
from splitserve.simulation.twin.step_times import StepTimes

RATES = DEVICE_RATES["H200"]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("num_decodes", [1, 3, 400])
def test_a_step_reads_the_experts_that_its_sequences_hit(tmp_path: Path, num_decodes: int, role: Role) -> None:
    write_demo_model(tmp_path, shape="tiny-experts")
    config = load_model_config(tmp_path)
    assert config.experts is not None
    router = config.experts.router
    hit = router.num_experts * (1 - (1 - router.top_k / router.num_experts) ** num_decodes)
    if num_decodes == 1:
        assert hit == pytest.approx(router.top_k)
    calibration = of_roofline(config, "H200")
    times = StepTimes(calibration.step_model(role), calibration.law(role))
    read = decode_bytes(config, 0, 0, 2, hit) / RATES.bytes_per_second
    computed = num_decodes * (token_flops(config) + head_flops(config)) / RATES.flops_per_second
    expected = RATES.overhead_seconds + (read + computed) / ATTAINED
    assert times.seconds(StepWork(num_decodes)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_decodes", [FEW_SEQUENCES, MANY_SEQUENCES])
def test_the_models_line_is_exact_at_its_two_batches(tmp_path: Path, num_decodes: int) -> None:
    write_demo_model(tmp_path, shape="tiny-experts")
    calibration = of_roofline(load_model_config(tmp_path), "H200")
    assert calibration.expert_reads is not None
    assert calibration.expert_reads.seconds_beyond(Role.MIXED, StepWork(num_decodes)) == pytest.approx(0.0, abs=1e-12)


def test_steps_of_a_dense_model_are_as_its_model_says(tmp_path: Path) -> None:
    write_demo_model(tmp_path, shape="tiny")
    assert of_roofline(load_model_config(tmp_path), "H200").law(Role.MIXED) is None
