"""Goodput from probes: the rate at which the pressure crosses 1, and intervals of it and of differences. Pure, seeded.

Pressures at one rate are averaged in the logarithm. Between the highest rate up to which the objectives hold and the
next one the logarithm of the pressure is interpolated over the rate. Where too many requests failed at that next rate,
its pressure has no size: goodput is then the middle of the two rates, and its interval reaches from one to the other.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitserve.benchmarks.goodput.objectives import MAX_PRESSURE, Objectives, Outcome

NUM_RESAMPLES = 400
INTERVAL_SHARE = 0.9
MIN_BLOCKS = 10
"""Blocks of consecutive requests in which a probe is resampled, at least: neighbours share their fate."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One load on an arm, at ``rate`` requests per second."""

    rate: float
    outcome: Outcome


QUALIFIERS = {"crossed": "", "at least": "at least ", "below": "less than "}
"""Words before a rate, by the kind of goodput: between two probes; all probes held; none held."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest rate at which the objectives hold; ``kind``, of :data:`QUALIFIERS`, says what the probes show of
    it."""

    rate: float
    kind: str

    @property
    def extent(self) -> tuple[float, float]:
        """The least and the most that the probes leave possible."""
        return 0.0 if self.kind == "below" else self.rate, math.inf if self.kind == "at least" else self.rate

    @property
    def bound(self) -> str:
        """The rate, and whether it is a bound, in words."""
        return f"{QUALIFIERS[self.kind]}{self.rate:.3g}"

    @property
    def words(self) -> str:
        return f"{self.bound} requests/s"


@dataclass(frozen=True, slots=True)
class Interval:
    """The middle :data:`INTERVAL_SHARE` of a resampled figure."""

    low: float
    high: float

    @property
    def words(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g}"


def is_order_known(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether the probes tell which of two goodputs is more, each given by the least and the most it may be."""
    (low, high), (other_low, other_high) = one, other
    are_exact = low == high and other_low == other_high
    return are_exact or low > other_high or other_low > high


def goodput_of(points: Sequence[tuple[float, float]], unknown_share: float = 0.5) -> Goodput:
    """Return the goodput from pairs of rate and pressure.

    ``unknown_share``, 0 to 1: place of the crossing between two rates where the pressure of the higher one has no size.
    """
    by_rate: dict[float, list[float]] = defaultdict(list)
    for rate, pressure in points:
        by_rate[rate].append(math.log(max(pressure, 1e-6)))
    ordered = sorted((rate, sum(logs) / len(logs)) for rate, logs in by_rate.items())
    previous: tuple[float, float] | None = None
    for rate, log_pressure in ordered:
        if log_pressure > 0:
            if previous is None:
                return Goodput(rate, "below")
            has_size = max(by_rate[rate]) < math.log(MAX_PRESSURE)
            share = -previous[1] / (log_pressure - previous[1]) if has_size else unknown_share
            return Goodput(previous[0] + share * (rate - previous[0]), "crossed")
        previous = rate, log_pressure
    return Goodput(0.0 if previous is None else previous[0], "below" if previous is None else "at least")


def measured_goodput(probes: Sequence[Probe], objectives: Objectives) -> Goodput:
    """Return the goodput that the probes of an arm show."""
    return goodput_of([(probe.rate, probe.outcome.pressure(objectives)) for probe in probes])


def resampled_goodputs(
    probes: Mapping[str, Sequence[Probe]], objectives: Objectives, seed: int, num_resamples: int = NUM_RESAMPLES
) -> dict[str, NDArray[np.float64]]:
    """Return ``num_resamples`` goodputs of each arm, from block-bootstrapped probes.

    Entry ``k`` of two arms belongs to one resample, so differences and ratios of the arrays have intervals, too.
    """
    random = np.random.default_rng(seed)
    return {arm: _resampled(found, objectives, random, num_resamples) for arm, found in probes.items()}


def interval(values: NDArray[np.float64]) -> Interval:
    """Return the interval that holds the middle :data:`INTERVAL_SHARE` of ``values``."""
    tail = 50 * (1 - INTERVAL_SHARE)
    low, high = np.percentile(values, [tail, 100 - tail])
    return Interval(float(low), float(high))


def block_indices(num_requests: int, num_loads: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return indices ``[num_loads, num_requests]`` in blocks of consecutive ones, which begin anywhere and wrap
    around."""
    length = max(1, min(round(math.sqrt(num_requests)), num_requests // MIN_BLOCKS))
    starts = random.integers(0, num_requests, size=(num_loads, math.ceil(num_requests / length)))
    found = (starts[:, :, None] + np.arange(length)).reshape(num_loads, -1) % num_requests
    return found[:, :num_requests]


def _resampled(
    probes: Sequence[Probe], objectives: Objectives, random: np.random.Generator, num_resamples: int
) -> NDArray[np.float64]:
    rates = [probe.rate for probe in probes]
    pressures = []
    for outcome in (probe.outcome for probe in probes):
        chosen = block_indices(outcome.num_requests, num_resamples, random)
        pressures.append(outcome.pressures(chosen, objectives))
    by_load = np.reshape(pressures, (len(rates), num_resamples)).T.tolist()
    shares = random.random(num_resamples).tolist()
    return np.array(
        [
            goodput_of(list(zip(rates, each, strict=True)), share).rate
            for each, share in zip(by_load, shares, strict=True)
        ]
    )
