"""Comparison of measured runs with their twins, case by case: errors, intervals, bounds, residuals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.benchmarks.twin.cases import Case, Measured
from splitserve.benchmarks.twin.fit.fits import (
    Figures,
    figures_of,
    fitted,
    observed,
    observed_twin,
    others_of,
    simulated,
    summary_of,
    with_steps_off,
)
from splitserve.benchmarks.twin.residuals import Residual, residuals_of, verdict

NOISE_FACTOR = 1.5
"""An error up to this multiple of the difference of the two repeats counts as within the bound."""
INTERVAL_FACTOR = 1.645  # of a standard deviation: 90% of a normal distribution
DEVIATIONS = (2**0.5, -(2**0.5), 0.0)
"""Further twins of a case, each fitted on another part of the other cases' runs, by how many standard deviations of the
loads' step times their steps are off: with the twin itself, by one in the mean square."""
MIN_SPREAD = 0.01


@dataclass(frozen=True, slots=True)
class Prediction:
    """One figure of a case. ``bound`` None: reported without a bound."""

    figure: str
    real: float  # mean of the repeats
    noise: float  # relative difference of the repeats
    twin: float  # mean of the twins of the repeats: each replays the same requests
    low: float
    high: float
    bound: float | None

    @property
    def error(self) -> float:
        return self.twin / self.real - 1 if self.real else 0.0

    @property
    def holds(self) -> bool | None:
        if self.bound is None:
            return None
        return abs(self.error) <= max(self.bound, NOISE_FACTOR * self.noise)

    @property
    def is_inside(self) -> bool:
        return self.low <= self.real <= self.high


@dataclass(frozen=True, slots=True)
class Compared:
    """A case and its twin."""

    case: Case
    rate: float
    predictions: list[Prediction]
    residuals: list[Residual]
    num_runs: int  # among which those were that the twin is fitted on

    @property
    def verdict(self) -> str:
        return verdict(self.residuals)


def bound_of(figure: str, load: float) -> float | None:
    """Return the largest relative error that a figure may have at a load; None: none is set."""
    if figure == "requests/s":
        return 0.03 if load > 1 else None
    if load > 0.8:
        return None
    if figure == "TTFT p99":
        return 0.15 if load == 0.8 else None
    return {"TPOT mean": 0.04, "TPOT p99": 0.08, "TTFT mean": 0.05 if load <= 0.5 else 0.10}[figure]


def compare(case: Case, runs: Sequence[Measured]) -> Compared | None:
    """Compare a case with its twin; None if it has no run, or no other case's runs can be fitted."""
    repeats, others = [run for run in runs if run.case == case], others_of(case, runs)
    if not repeats or not others:
        return None
    predictions, residuals = _compare(case, repeats, others)
    return Compared(case, repeats[0].rate, predictions, residuals, len(runs))


def _compare(
    case: Case, repeats: Sequence[Measured], others: Sequence[Measured]
) -> tuple[list[Prediction], list[Residual]]:
    calibration, noise = fitted(others), _usual_noise(others)
    results = [simulated(run, calibration, run.repeat) for run in repeats]
    twins = [figures_of(summary_of(each)) for each in results]
    ratios: list[Figures] = []  # of what the same load has when it is fitted otherwise
    for number, part in enumerate(part for part in _parts(others) if others_of(case, part)):
        index = number % len(repeats)
        off = simulated(repeats[index], with_steps_off(fitted(part), DEVIATIONS[number]), repeats[index].repeat)
        figures = figures_of(summary_of(off))
        ratios.append({name: figures[name] / twins[index][name] for name in figures if twins[index].get(name)})
    real = [figures_of(run.figures) for run in repeats]
    predictions = [
        _predicted(
            name,
            [each[name] for each in real],
            statistics.fmean(each[name] for each in twins),
            [1.0, *(each[name] for each in ratios if name in each)],
            bound=bound_of(name, case.load),
            noise=noise.get(name, 0.0),
        )
        for name in real[0]
        if all(name in each for each in twins)
    ]
    return predictions, residuals_of(observed(repeats[0]), observed_twin(results[0], repeats[0].workers), calibration)


def _predicted(
    name: str, real: Sequence[float], twin: float, ratios: Sequence[float], *, bound: float | None, noise: float
) -> Prediction:
    """Return the prediction with its interval: the spread of twins that are fitted otherwise, by their ``ratios`` to
    the twin, and what repeats of other cases differ by."""
    middle = statistics.fmean(ratios)
    spread = statistics.pstdev(ratios) / middle if middle else 0.0
    width = INTERVAL_FACTOR * math.hypot(max(spread, MIN_SPREAD), noise) * middle
    return Prediction(
        figure=name,
        real=statistics.fmean(real),
        noise=difference(real),
        twin=twin,
        low=twin * (middle - width),
        high=twin * (middle + width),
        bound=bound,
    )


def difference(values: Sequence[float]) -> float:
    """Return the difference of repeats, relative to their mean."""
    mean = statistics.fmean(values)
    return (max(values) - min(values)) / mean if mean else 0.0


def _usual_noise(others: Sequence[Measured]) -> Figures:
    """Return each figure's standard deviation between repeats, relative to it: the median over the other cases."""
    by_case: dict[Case, list[Measured]] = {}
    for run in others:
        by_case.setdefault(run.case, []).append(run)
    found: dict[str, list[float]] = {}
    for repeats in by_case.values():
        if len(repeats) > 1:
            figures = [figures_of(run.figures) for run in repeats]
            for name in figures[0]:
                found.setdefault(name, []).append(difference([each[name] for each in figures]) / math.sqrt(2))
    return {name: statistics.median(values) for name, values in found.items()}


def _parts(others: Sequence[Measured]) -> list[list[Measured]]:
    """Return thirds of the other cases' runs, each of which misses some of them."""
    return [[run for index, run in enumerate(others) if index % 3 != number] for number in range(3)]


def plain(compared: Compared) -> dict[str, Any]:
    """Return what a kept result holds of a comparison."""
    return {
        "case": compared.case.name,
        "device": compared.case.device,
        "arm": compared.case.arm,
        "workload": compared.case.workload,
        "load": compared.case.load,
        "rate": compared.rate,
        "predictions": [
            {
                "figure": each.figure,
                "real": each.real,
                "repeats_differ_by": each.noise,
                "twin": each.twin,
                "interval": [each.low, each.high],
                "is_inside": each.is_inside,
                "error": each.error,
                "bound": each.bound,
                "holds": each.holds,
            }
            for each in compared.predictions
        ],
        "residuals": [
            {"component": each.component, "real_ms": 1e3 * each.real, "twin_ms": 1e3 * each.twin, "is_off": each.is_off}
            for each in compared.residuals
        ],
        "verdict": compared.verdict,
    }
