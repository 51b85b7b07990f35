"""Comparison of measured runs with their twins, case by case: errors, intervals, bounds, residuals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.benchmarks.twin.cases import Case, Measured
from splitserve.benchmarks.twin.fits import Figures, figures_of, fitted, others_of, simulated, stages_of, summary_of
from splitserve.benchmarks.twin.residuals import Residual, residuals_of, verdict

NOISE_FACTOR = 1.5
"""An error up to this multiple of the difference of the two repeats counts as within the bound."""
INTERVAL_FACTOR = 1.645  # of a standard deviation: 90% of a normal distribution
MAX_TWINS = 4
"""Twins of a case, each fitted on another part of the other cases' runs."""
MIN_SPREAD = 0.01


@dataclass(frozen=True, slots=True)
class Prediction:
    """One figure of a case. ``bound`` None: reported without a bound."""

    figure: str
    real: float  # mean of the repeats
    noise: float  # relative difference of the repeats
    twin: float
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
    """Compare a case with its twin; None if no other case's runs can be fitted."""
    by_case: dict[Case, list[Measured]] = {}
    for run in runs:
        by_case.setdefault(run.case, []).append(run)
    others = others_of(case, runs)
    return _compare(case, by_case[case], others, _usual_noise(by_case)) if others else None


def _compare(case: Case, repeats: Sequence[Measured], others: Sequence[Measured], noise: Figures) -> Compared:
    parts = [others, *(part for part in _parts(others) if others_of(case, part))][:MAX_TWINS]
    real = [figures_of(run.figures) for run in repeats]
    twins: list[Figures] = []
    residuals: list[Residual] = []
    for number, part in enumerate(parts):
        run = repeats[number % len(repeats)]
        result = simulated(run, fitted(part), number)
        figures = figures_of(summary_of(result))
        twins.append(figures)
        if not number:
            residuals = residuals_of(stages_of(run.stages, real[0]), stages_of(result.stages, figures))
    predictions = [
        _predicted(name, [each[name] for each in real], [each[name] for each in twins if name in each], noise, case)
        for name in real[0]
        if name in twins[0]
    ]
    return Compared(case, repeats[0].rate, predictions, residuals)


def _predicted(
    name: str, real: Sequence[float], twins: Sequence[float], noise: Mapping[str, float], case: Case
) -> Prediction:
    """Return the prediction with its interval: the spread over twins, and what repeats of other cases differ by."""
    middle = statistics.fmean(twins)
    spread = statistics.pstdev(twins) / middle if middle else 0.0
    width = INTERVAL_FACTOR * math.hypot(max(spread, MIN_SPREAD), noise.get(name, 0.0)) * middle
    return Prediction(
        figure=name,
        real=statistics.fmean(real),
        noise=difference(real),
        twin=twins[0],
        low=middle - width,
        high=middle + width,
        bound=bound_of(name, case.load),
    )


def difference(values: Sequence[float]) -> float:
    """Return the difference of repeats, relative to their mean."""
    mean = statistics.fmean(values)
    return (max(values) - min(values)) / mean if mean else 0.0


def _usual_noise(by_case: Mapping[Case, Sequence[Measured]]) -> Figures:
    """Return each figure's standard deviation between repeats, relative to it: the median over the cases."""
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
        "rate": compared.rate,
        "predictions": [
            {
                "figure": each.figure,
                "real": each.real,
                "repeats_differ_by": each.noise,
                "twin": each.twin,
                "interval": [each.low, each.high],
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
