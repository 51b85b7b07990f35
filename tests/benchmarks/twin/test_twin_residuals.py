"""Mistakes of a twin are named by its residuals at several loads: slow steps, a slow link, a forgotten queue."""

from functools import lru_cache

import msgspec
import pytest

from splitserve.benchmarks.twin.fit.fits import observed_twin
from splitserve.benchmarks.twin.residuals import Observed, Residual, residuals_of, verdict
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.simulation.twin.cluster import TwinCluster, TwinSpec
from splitserve.simulation.twin.models import Calibration, HostModel, LinkModel
from splitserve.simulation.twin.worker import WorkerSetup
from splitserve.workloads.synthetic import Exact, make

STEPS = StepModel(0.004, 1e-4, 1e-7, 5e-5, 0.0, 1000)
TRUE = Calibration(steps={Role.MIXED: STEPS}, link=LinkModel(bytes_per_second=2e9), host=HostModel())
LAYOUT = LayoutRecord("twin", "w", "bfloat16", 64, 8, 8, 64)
SHORT_ANSWERS, LONG_ANSWERS = Exact(700, 40), Exact(300, 150)
PAIR = (Role.PREFILL, Role.DECODE)
SLOW = pytest.mark.slow
LOADS = [6.0, pytest.param(12.0, marks=SLOW), 20.0, pytest.param(24.0, marks=SLOW)]
"""Requests per second of SHORT_ANSWERS: 23%, 47%, 78% and 94% of what the prefill worker can compute."""
SLOW_LOADS = LOADS[:3]
"""Those at which steps that are 15% slower can compute all prompts, too. Else all reads wait for each other."""


def simulated(
    calibration: Calibration, rate: float, maker: Exact = SHORT_ANSWERS, max_num_seqs: int = 64, roles=PAIR
) -> Observed:
    """Return the figures of a run on one worker of each role."""
    engine = EngineConfig(model="twin", max_num_batched_tokens=1024, max_num_seqs=max_num_seqs).on("cuda")
    setups = [
        WorkerSetup(f"{role}-{number}", role, engine, LAYOUT, (2000,), 8192, 1000, calibration.step_model(role))
        for number, role in enumerate(roles)
    ]
    result = TwinCluster(TwinSpec(setups, calibration), seed=1).run(make(maker, rate, 120, seed=2), 1)
    return observed_twin(result, setups)


@lru_cache
def real(rate: float, maker: Exact = SHORT_ANSWERS, max_num_seqs: int = 64, roles=PAIR) -> Observed:
    return simulated(TRUE, rate, maker, max_num_seqs, roles)


def named(found: Observed, twin: Observed, calibration: Calibration) -> str:
    """Return the verdict, in which all components that are off are named."""
    return verdict(residuals_of(found, twin, calibration))


def off_by(calibration: Calibration, rate: float, maker: Exact = SHORT_ANSWERS, roles=PAIR) -> str:
    return named(real(rate, maker, roles=roles), simulated(calibration, rate, maker, roles=roles), calibration)


def slower(steps: StepModel, factor: float) -> StepModel:
    return StepModel.of([factor * each for each in steps.coefficients], steps.num_steps)


def test_without_a_mistake_nothing_is_off() -> None:
    assert off_by(TRUE, 20.0) == "no component is off"


@pytest.mark.parametrize("rate", SLOW_LOADS)
def test_a_step_model_that_is_15_percent_slow_is_named(rate: float) -> None:
    words = off_by(msgspec.structs.replace(TRUE, steps={Role.MIXED: slower(STEPS, 1.15)}), rate)
    assert words.startswith("off: ") and "prefill steps" in words and "decode steps" in words
    assert not any(other in words for other in ("transfer", "hosts", "queues", "gaps"))


@pytest.mark.parametrize("rate", SLOW_LOADS)
@pytest.mark.parametrize(("role", "name"), [(Role.DECODE, "decode steps"), (Role.PREFILL, "prefill steps")])
def test_a_slow_model_of_one_role_is_told_from_the_other(rate: float, role: Role, name: str) -> None:
    steps = {each: slower(STEPS, 1.15) if each is role else STEPS for each in PAIR}
    words = off_by(msgspec.structs.replace(TRUE, steps=steps), rate)
    assert words.startswith(f"off: {name}") and "also" not in words


@pytest.mark.parametrize("rate", [4.0, 12.0])
def test_slow_steps_of_mixed_workers_are_named(rate: float) -> None:
    wrong = msgspec.structs.replace(TRUE, steps={Role.MIXED: slower(STEPS, 1.15)})
    words = off_by(wrong, rate, roles=(Role.MIXED, Role.MIXED))
    assert words.startswith("off: steps of mixed workers") and "also" not in words


@pytest.mark.parametrize("rate", LOADS)
def test_a_link_at_half_speed_is_named(rate: float) -> None:
    """The real link has half the speed of the twin's."""
    words = off_by(msgspec.structs.replace(TRUE, link=LinkModel(bytes_per_second=4e9)), rate)
    assert words.startswith("off: transfer") and "also" not in words


@pytest.mark.parametrize(
    ("maker", "rate", "max_num_seqs"),
    [(SHORT_ANSWERS, 6.0, 2), pytest.param(SHORT_ANSWERS, 12.0, 3, marks=SLOW),
     pytest.param(SHORT_ANSWERS, 20.0, 3, marks=SLOW), (SHORT_ANSWERS, 20.0, 4), (LONG_ANSWERS, 4.0, 3),
     pytest.param(LONG_ANSWERS, 8.0, 4, marks=SLOW), (LONG_ANSWERS, 8.0, 6)],
)  # fmt: skip
def test_a_forgotten_queue_is_named(maker: Exact, rate: float, max_num_seqs: int) -> None:
    """The real workers take few sequences at once, so that requests wait; the twin's take all."""
    words = named(real(rate, maker, max_num_seqs), simulated(TRUE, rate, maker), TRUE)
    assert words.startswith("off: queues") and "also" not in words


def test_time_that_the_loop_takes_between_steps_is_named() -> None:
    """Neither steps nor queues are off."""
    words = off_by(msgspec.structs.replace(TRUE, host=HostModel(step_seconds=0.002)), 6.0)
    assert words.startswith("off: gaps between tokens")


@pytest.mark.parametrize(
    ("real", "twin", "is_off"),
    [(0.100, 0.100, False), (0.100, 0.094, False), (0.115, 0.100, True), (0.0004, 0.0, False), (0.01, 0.0, True)],
)
def test_a_residual_is_off_beyond_its_tolerance(real: float, twin: float, is_off: bool) -> None:
    assert Residual("transfer", real, twin).is_off is is_off
