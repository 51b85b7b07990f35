"""Injected mistakes of a twin are named by its residuals: slow steps, a slow link, a forgotten queue."""

import msgspec
import pytest

from splitserve.benchmarks.common.stats import summarise
from splitserve.benchmarks.twin.fits import figures_of, stages_of
from splitserve.benchmarks.twin.loads import records_of
from splitserve.benchmarks.twin.residuals import Residual, residuals_of, verdict
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.simulation.twin.cluster import TwinCluster, TwinSpec
from splitserve.simulation.twin.models import Calibration, HostModel, LinkModel
from splitserve.simulation.twin.worker import WorkerSetup
from splitserve.workloads.conversation import Workload
from splitserve.workloads.synthetic import Exact, make

STEPS = StepModel(0.004, 1e-4, 1e-7, 5e-5, 0.0, 1000)
TRUE = Calibration(steps={Role.MIXED: STEPS}, link=LinkModel(bytes_per_second=2e9), host=HostModel())
LAYOUT = LayoutRecord("twin", "w", "bfloat16", 64, 8, 8, 64)
WORKLOAD = make(Exact(700, 40), 12.0, 300, seed=2)


def measured(calibration: Calibration, max_num_seqs: int = 64, workload: Workload = WORKLOAD) -> dict[str, float]:
    """Return the mean seconds of stages and gaps of a run on one prefill and one decode worker."""
    engine = EngineConfig(model="twin", max_num_batched_tokens=1024, max_num_seqs=max_num_seqs).on("cuda")
    setups = [
        WorkerSetup(f"{role}-0", role, engine, LAYOUT, (2000,), 8192, 1000, calibration.step_model(role))
        for role in (Role.PREFILL, Role.DECODE)
    ]
    result = TwinCluster(TwinSpec(setups, calibration), seed=1).run(workload, 1)
    figures = figures_of(summarise([turn.record for turn in records_of(result)], None))
    return stages_of(result.stages, figures)


def slower(steps: StepModel, factor: float) -> StepModel:
    return StepModel.of([factor * each for each in steps.coefficients], steps.num_steps)


def off_by(twin: dict[str, float]) -> str:
    return verdict(residuals_of(measured(TRUE), twin))


def test_without_a_mistake_nothing_is_off() -> None:
    assert off_by(measured(TRUE)) == "no component is off"


def test_a_step_model_that_is_15_percent_slow_is_named() -> None:
    wrong = msgspec.structs.replace(TRUE, steps={Role.MIXED: slower(STEPS, 1.15)})
    words = off_by(measured(wrong))
    assert words.startswith("off: ") and "steps" in words.partition(":")[2].partition(":")[0]
    assert "prefill steps" in words and "decode steps" in words
    assert "transfer" not in words and "queues" not in words


def test_a_slow_model_of_one_role_is_told_from_the_other() -> None:
    wrong = msgspec.structs.replace(TRUE, steps={Role.DECODE: slower(STEPS, 1.15), Role.PREFILL: STEPS})
    assert off_by(measured(wrong)).startswith("off: decode steps")


def test_a_link_at_half_speed_is_named() -> None:
    """The real link has half the speed of the twin's."""
    wrong = msgspec.structs.replace(TRUE, link=LinkModel(bytes_per_second=4e9))
    words = off_by(measured(wrong))
    assert words.startswith("off: transfer") and "also" not in words


def test_a_forgotten_queue_is_named() -> None:
    """The real workers take few sequences at once; the twin's take all, so that nothing waits for a grant."""
    workload = make(Exact(300, 150), 4.0, 200, seed=2)  # prompts seldom meet, answers always do
    real, twin = measured(TRUE, max_num_seqs=3, workload=workload), measured(TRUE, workload=workload)
    words = verdict(residuals_of(real, twin))
    assert words.startswith("off: queues") and "also" not in words


@pytest.mark.parametrize(
    ("real", "twin", "is_off"),
    [(0.100, 0.100, False), (0.100, 0.094, False), (0.115, 0.100, True), (0.0004, 0.0, False), (0.01, 0.0, True)],
)
def test_a_residual_is_off_beyond_its_tolerance(real: float, twin: float, is_off: bool) -> None:
    assert Residual("transfer", real, twin).is_off is is_off
