"""The calibration for a case, fitted on measured runs of other cases; and the twin of a measured run."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from splitserve.benchmarks.common.stats import summarise
from splitserve.benchmarks.goodput.arms import parse_arm
from splitserve.benchmarks.twin.calibration import is_measured
from splitserve.benchmarks.twin.cases import Case, Measured
from splitserve.benchmarks.twin.fit.totals import LoopFit, fit_loop, fit_steps, totals_of
from splitserve.benchmarks.twin.loads import records_of
from splitserve.benchmarks.twin.residuals import Observed, StepTotals
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.simulation.twin.cluster import TwinCluster, TwinResult, TwinSpec
from splitserve.simulation.twin.models import Calibration, HostModel, LinkModel
from splitserve.simulation.twin.worker import WorkerSetup
from splitserve.workloads.named import parse_workload

Figures = dict[str, float]
FIGURES = {
    "TTFT mean": ("ttft_ms", "mean"),
    "TTFT p99": ("ttft_ms", "p99"),
    "TPOT mean": ("tpot_ms", "mean"),
    "TPOT p99": ("tpot_ms", "p99"),
    "requests/s": ("requests_per_second",),
}


def figures_of(summary: dict[str, Any]) -> Figures:
    """Return the compared figures of a load's summary."""
    found = {}
    for name, path in FIGURES.items():
        value: Any = summary
        for key in path:
            value = value.get(key, {})
        if isinstance(value, int | float):
            found[name] = float(value)
    return found


def others_of(case: Case, runs: Sequence[Measured]) -> list[Measured]:
    """Return the runs that a case's calibration may be fitted on: those of other cases with the same device; none if
    their workers have fitted no step times."""
    alike = [run for run in runs if run.case != case and run.case.device == case.device]
    return alike if any(is_measured(worker.model) for run in alike for worker in run.workers) else []


def fitted(runs: Sequence[Measured]) -> Calibration:
    """Return the calibration that ``runs`` show: step times and the loops' time by the totals of all of them, hosts and
    link by those with the lowest load that have the stage in question, in which least waits. Raises ValueError without
    a fitted model."""
    totals = [totals_of(run) for run in runs]
    steps: dict[Role, StepModel] = {}
    errors: dict[Role, float] = {}
    scatters: dict[Role, float] = {}
    for role in Role:
        having = [run for run in runs if any(_is_fitted(worker, role) for worker in run.workers)]
        if having:
            models = [worker.model for run in having for worker in run.workers if _is_fitted(worker, role)]
            steps[role], scatters[role] = fit_steps(models, [each[role] for each in totals if role in each])
            errors[role] = statistics.fmean(run.step_errors.get(role, 0.0) for run in having)
    if not steps:
        raise ValueError("no run has a fitted step-time model")
    rates = [run.link_bytes_per_second for run in runs if run.link_bytes_per_second > 0]
    rate = statistics.median(rates) if rates else LinkModel().bytes_per_second
    return Calibration(
        steps=steps,
        errors=errors,
        scatters=scatters,
        link=LinkModel(read_seconds=_read_seconds(runs), bytes_per_second=rate),
        host=_host(runs, fit_loop(totals)),
        source=f"fitted on {len(runs)} runs of other cases",
        is_measured=True,
    )


def _is_fitted(worker: WorkerSetup, role: Role) -> bool:
    return worker.role is role and is_measured(worker.model)


def with_steps_off(calibration: Calibration, num_deviations: float) -> Calibration:
    """Return the calibration with each role's steps slower by this number of the loads' standard deviations."""
    factors = {role: 1.0 + num_deviations * calibration.scatters.get(role, 0.0) for role in calibration.steps}
    steps = {
        role: StepModel.of([factors[role] * each for each in model.coefficients], model.num_steps)
        for role, model in calibration.steps.items()
    }
    return msgspec.structs.replace(calibration, steps=steps)


def simulated(run: Measured, calibration: Calibration, seed: int) -> TwinResult:
    """Replay a measured run's very requests on its twin; ``seed`` is the router's."""
    arm = parse_arm(run.case.arm)
    workers = [replace(worker, model=calibration.step_model(worker.role)) for worker in run.workers]
    spec = TwinSpec(workers, calibration, arm.policy)
    workload = parse_workload(run.case.workload).at(run.rate, run.num_requests, run.seed)
    return TwinCluster(spec, seed).run(workload, run.seed)


def summary_of(result: TwinResult) -> dict[str, Any]:
    """Return the figures of a simulated load, as of `splitserve bench serve`."""
    return summarise([turn.record for turn in records_of(result)], None)


def observed(run: Measured) -> Observed:
    """Return the figures of a measured load that residuals are computed from."""
    return Observed(run.num_requests, run.stages, _gap_seconds(run.figures), run.reads, run.step_totals)


def observed_twin(result: TwinResult, workers: Sequence[WorkerSetup]) -> Observed:
    """Return the same of a simulated load on these workers."""
    steps: dict[Role, StepTotals] = {}
    for worker in workers:
        own = StepTotals(
            result.num_steps[worker.name], result.busy_seconds[worker.name], result.step_tokens[worker.name]
        )
        steps[worker.role] = steps.get(worker.role, StepTotals()) + own
    return Observed(
        num_requests=len(result.turns),
        stages=result.stages,
        gap_seconds=_gap_seconds(summary_of(result)),
        reads=[(each.bytes, each.reads, each.read_seconds) for each in result.handovers if each.bytes],
        steps=steps,
    )


def _gap_seconds(summary: dict[str, Any]) -> float:
    return float(summary["tpot_ms"].get("mean", 0.0)) / 1e3


def _host(runs: Sequence[Measured], loop: LoopFit) -> HostModel:
    """Return the model of hosts: of a stage, the mean over requests, the median over runs."""

    def mean(*stages: str) -> float | None:
        having = _quietest([run for run in runs if stages[0] in run.stages])
        values = [sum(run.stages.get(stage, 0.0) for stage in stages) for run in having]
        return statistics.median(values) if values else None

    known = HostModel()
    messages = [each for each in (mean("dispatch"), mean("delivery")) if each]
    message_seconds = statistics.fmean(messages) if messages else known.message_seconds
    client = [run.figures["ttft_ms"]["p50"] / 1e3 - run.router_ttft for run in _quietest(runs)]
    return HostModel(
        prepare_seconds=mean("prepare", "queue") or 0.0,
        message_seconds=message_seconds,
        deliver_seconds=max(0.0, (mean("write") or 0.0) + statistics.median(client)),
        offer_seconds=mean("offer", "post") or message_seconds,
        verify_seconds=mean("verify") or known.verify_seconds,
        step_seconds=loop.step_seconds,
        sequence_seconds=loop.sequence_seconds,
        token_seconds=loop.token_seconds,
    )


def _read_seconds(runs: Sequence[Measured]) -> float:
    waits = [run.usual_stages["wire"] for run in _quietest([run for run in runs if run.usual_stages.get("wire")])]
    return statistics.median(waits) if waits else LinkModel().read_seconds


def _quietest(runs: Sequence[Measured]) -> list[Measured]:
    """Return those of the runs that have the lowest load."""
    lowest = min((run.case.load for run in runs), default=0.0)
    return [run for run in runs if run.case.load == lowest]
