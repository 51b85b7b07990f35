"""Fits on whole loads: a known machine is simulated, and its calibration is found again from what its loads show."""

from dataclasses import replace

import msgspec
import pytest

from splitserve.benchmarks.twin.cases import Case, Measured
from splitserve.benchmarks.twin.comparison import compare
from splitserve.benchmarks.twin.fit.fits import fitted, observed_twin, simulated, summary_of, with_steps_off
from splitserve.benchmarks.twin.fit.totals import LoopFit, fit_loop, fit_steps, totals_of
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.placement.step_model import StepModel, StepWork
from splitserve.protocol.request import Role
from splitserve.simulation.twin.models import Calibration, HostModel
from splitserve.simulation.twin.worker import WorkerSetup
from twin_runs import measured

STEPS = StepModel(0.008, 3e-4, 5e-7, 1.2e-4, 2e-8, 1000)
HOST = HostModel(
    prepare_seconds=0.0007,
    message_seconds=0.0009,
    deliver_seconds=0.0003,
    offer_seconds=0.0014,
    verify_seconds=0.0011,
    step_seconds=0.0005,
    sequence_seconds=4e-5,
    token_seconds=1e-6,
)
TRUE = Calibration(steps={Role.MIXED: STEPS}, host=HOST)
ARMS = {"1P1D": (Role.PREFILL, Role.DECODE), "2M": (Role.MIXED, Role.MIXED)}
RATES = {0.5: 6.0, 0.8: 10.0, 1.2: 16.0}
LAYOUT = LayoutRecord("twin", "w", "bfloat16", 64, 8, 8, 64)


def run_of(arm: str, load: float, true: Calibration, repeat: int = 0, seconds: float = 40.0) -> Measured:
    """Return a load on the machine ``true``, whose workers have fitted :data:`STEPS`."""
    engine = EngineConfig(model="twin", max_num_seqs=32).on("cuda")
    workers = [
        WorkerSetup(f"{role}-{number}", role, engine, LAYOUT, (4000,), 8192, 1000, STEPS)
        for number, role in enumerate(ARMS[arm])
    ]
    case = Case(device="paced", arm=arm, workload="512/64", load=load)
    rate = RATES[load]
    run = msgspec.structs.replace(
        measured(case, rate), rate=rate, num_requests=round(seconds * rate), workers=workers, repeat=repeat, seed=repeat
    )
    result = simulated(run, true, seed=1)
    seen, figures = observed_twin(result, workers), summary_of(result)
    at_router = figures["ttft_ms"]["p50"] / 1e3 - true.host.deliver_seconds
    return msgspec.structs.replace(
        run, figures=figures, stages=dict(seen.stages), step_totals=dict(seen.steps), router_ttft=at_router
    )


@pytest.fixture(scope="module")
def loads() -> list[Measured]:
    """Loads of both arrangements on the true machine, whose workers know their steps."""
    return [run_of(arm, load, TRUE) for arm in ARMS for load in RATES]


def believing(run: Measured, model: StepModel) -> Measured:
    """Return the same load with workers that have fitted ``model``."""
    return msgspec.structs.replace(run, workers=[replace(worker, model=model) for worker in run.workers])


def scaled(base: float, work: float) -> StepModel:
    """Return the steps with other factors of the seconds per step and of those of the work."""
    own = STEPS.coefficients
    return StepModel.of([base * own[0], *(work * each for each in own[1:])], STEPS.num_steps)


def test_hosts_and_the_loop_are_found_again(loads: list[Measured]) -> None:
    found = fitted(loads).host
    for name in ("prepare_seconds", "message_seconds", "deliver_seconds", "offer_seconds", "verify_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(HOST, name), abs=5e-5), name
    for work in (StepWork(5, 2500), StepWork(20, 10_000), StepWork(25, 12_000, 200, 50_000)):
        assert found.loop_seconds(work) == pytest.approx(HOST.loop_seconds(work), rel=0.15)
    assert found.sequence_seconds == pytest.approx(HOST.sequence_seconds, rel=0.25)


def test_a_stage_is_taken_from_the_quietest_loads_that_have_it(loads: list[Measured]) -> None:
    """The quietest load with hand-overs is not the quietest one: mixed workers have a quieter one, without any."""
    found = fitted([run for run in loads if (run.case.arm, run.case.load) != ("1P1D", 0.5)]).host
    assert found.offer_seconds == pytest.approx(HOST.offer_seconds, abs=1e-4)
    assert found.verify_seconds == pytest.approx(HOST.verify_seconds, abs=1e-4)


@pytest.mark.parametrize(("base", "work"), [(0.9, 0.9), (1.1, 0.9), (0.8, 1.05)])
def test_what_workers_believe_is_put_right_by_the_totals(loads: list[Measured], base: float, work: float) -> None:
    """Decode workers and mixed ones have steps of many sizes, from which the two factors are told apart."""
    found = fitted([believing(run, scaled(base, work)) for run in loads])
    for role in (Role.DECODE, Role.MIXED):
        for step in (StepWork(4, 2200), StepWork(25, 13_600)):
            assert found.steps[role].seconds(step) == pytest.approx(STEPS.seconds(step), rel=0.01), role
    prompt = StepWork(prefill_tokens=512, prefill_pairs=131_000)
    assert found.steps[Role.PREFILL].seconds(prompt) == pytest.approx(STEPS.seconds(prompt), rel=0.02)
    assert max(found.scatters.values()) < 0.005


def test_loads_whose_machine_was_slower_are_scatter() -> None:
    """Half of the loads had steps that took 10% longer: they deviate by 5% from the fit."""
    slow = msgspec.structs.replace(TRUE, steps={Role.MIXED: scaled(1.1, 1.1)})
    runs = [run_of("2M", load, true) for load in (0.5, 0.8) for true in (TRUE, slow)]
    found = fitted(runs)
    assert found.scatters[Role.MIXED] == pytest.approx(0.05, abs=0.01)
    off = with_steps_off(found, -1.0).steps[Role.MIXED]
    assert off.base == pytest.approx((1 - found.scatters[Role.MIXED]) * found.steps[Role.MIXED].base)


def test_the_work_of_a_load_is_that_of_its_steps(loads: list[Measured]) -> None:
    """Totals that the true model has at this work are the seconds that the steps took."""
    for run in loads:
        for role, totals in totals_of(run).items():
            seconds = STEPS.seconds(totals.work) + STEPS.base * (totals.steps.num_steps - 1)
            assert seconds == pytest.approx(totals.steps.seconds, rel=0.002), role


def test_a_worker_that_may_have_been_idle_says_nothing_about_its_loop(loads: list[Measured]) -> None:
    [run] = [run for run in loads if (run.case.arm, run.case.load) == ("1P1D", 0.8)]
    totals = totals_of(run)
    assert totals[Role.PREFILL].loop_seconds is None
    busy = totals[Role.DECODE]
    assert busy.loop_seconds is not None
    seldom = replace(busy, work=StepWork(2.0 * busy.steps.num_steps), max_num_seqs=32)
    assert seldom.loop_seconds is None and replace(seldom, max_num_seqs=4).loop_seconds is not None
    assert fit_loop([{Role.PREFILL: totals[Role.PREFILL]}]) == LoopFit()


def test_without_totals_the_mean_of_the_workers_models_counts() -> None:
    model, scatter = fit_steps([scaled(0.5, 1.0), scaled(1.5, 1.0)], [])
    assert model.coefficients == pytest.approx(STEPS.coefficients) and scatter == 0.0
    assert totals_of(measured(Case(device="paced", arm="1P1D", workload="512/64", load=0.5), 5.0)) == {}


def test_a_case_is_compared_with_the_twins_of_its_repeats(loads: list[Measured]) -> None:
    """Repeats have other arrivals, and so other waits: the twin of each has its own."""
    repeats = [run_of("1P1D", 1.2, TRUE, repeat, seconds=20.0) for repeat in range(2)]
    case = repeats[0].case
    found = compare(case, [*(run for run in loads if run.case != case), *repeats])
    assert found is not None
    by_figure = {each.figure: each for each in found.predictions}
    wait = by_figure["TTFT mean"]
    assert wait.noise > 0.3 and abs(wait.error) < 0.1
    assert all(each.is_inside for each in found.predictions)
    assert by_figure["requests/s"].holds and found.verdict == "no component is off"
