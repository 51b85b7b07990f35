"""The calibration for a case, fitted on measured runs of other cases; and the twin of a measured run."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from splitserve.benchmarks.common.stats import summarise
from splitserve.benchmarks.goodput.arms import parse_arm
from splitserve.benchmarks.twin.cases import Case, Measured
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
    return alike if any(worker.model.num_steps for run in alike for worker in run.workers) else []


def fitted(runs: Sequence[Measured]) -> Calibration:
    """Return the calibration that ``runs`` show: each role's fit with the most steps, and hosts and link from the runs
    with the lowest load, in which nothing waits. Raises ValueError without a fitted model."""
    steps: dict[Role, StepModel] = {}
    errors: dict[Role, float] = {}
    for run in runs:
        for worker in run.workers:
            known = steps.get(worker.role)
            if worker.model.num_steps and (known is None or known.num_steps < worker.model.num_steps):
                steps[worker.role] = worker.model
                errors[worker.role] = run.step_errors.get(worker.role, 0.0)
    if not steps:
        raise ValueError("no run has a fitted step-time model")
    lowest = min(run.case.load for run in runs)
    quiet = [run for run in runs if run.case.load == lowest]
    rates = [run.link_bytes_per_second for run in runs if run.link_bytes_per_second > 0]
    rate = statistics.median(rates) if rates else LinkModel().bytes_per_second
    calibration = Calibration(
        steps=steps,
        errors=errors,
        link=LinkModel(read_seconds=_read_seconds(quiet), bytes_per_second=rate),
        host=_host(quiet),
        source=f"fitted on {len(runs)} runs of other cases",
        is_measured=True,
    )
    return _with_loop(calibration, min(quiet, key=_rank_for_loop))


def _rank_for_loop(run: Measured) -> tuple[bool, int]:
    """Return a run's rank for the fit of the loop's time: first those with a decode worker, whose steps hold no prompts
    with an error of their own, and of these the smallest, which take the least time."""
    roles = {worker.role for worker in run.workers}
    return Role.DECODE not in roles, len(run.workers)


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


def _host(quiet: Sequence[Measured]) -> HostModel:
    def usual(stage: str) -> float:
        values = [run.usual_stages[stage] for run in quiet if stage in run.usual_stages]
        return max(0.0, statistics.median(values)) if values else 0.0

    client_ttft = statistics.median([run.figures["ttft_ms"]["p50"] / 1e3 - run.router_ttft for run in quiet])
    messages = [usual(stage) for stage in ("dispatch", "delivery", "offer") if usual(stage)]
    return HostModel(
        prepare_seconds=usual("prepare") + usual("receive"),
        message_seconds=statistics.median(messages) if messages else HostModel().message_seconds,
        deliver_seconds=max(0.0, usual("write") + client_ttft),
    )


def _with_loop(calibration: Calibration, run: Measured) -> Calibration:
    """Return the calibration with the loop's time between two steps with which the twin's gaps between tokens are those
    of a measured run.

    Gaps are means over tokens, of which large batches have the most, and batches grow with the loop's time: so the twin
    runs without it and with all that the gaps have beyond that, and the time in between is interpolated.
    """
    if not run.figures["itl_ms"]:
        return calibration
    without = _gap_of_twin(run, calibration)
    missing = _gap_seconds(run.figures) - without
    if missing <= 0:
        return calibration
    effect = _gap_of_twin(run, _of_loop(calibration, missing)) - without
    return _of_loop(calibration, missing * missing / max(effect, missing))


def _gap_of_twin(run: Measured, calibration: Calibration) -> float:
    return _gap_seconds(summary_of(simulated(run, calibration, run.seed)))


def _of_loop(calibration: Calibration, seconds: float) -> Calibration:
    host = msgspec.structs.replace(calibration.host, step_seconds=seconds)
    return msgspec.structs.replace(calibration, host=host)


def _read_seconds(quiet: Sequence[Measured]) -> float:
    waits = [run.usual_stages["wire"] for run in quiet if run.usual_stages.get("wire")]
    return statistics.median(waits) if waits else LinkModel().read_seconds
