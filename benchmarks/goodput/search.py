"""The rates of an arm's probes, one after another: a search for its goodput, or a sweep. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_PROBES = 12
MIN_STEP, MAX_STEP = 1.4, 2.0


@dataclass(slots=True)
class Search:
    """Search for the rate at which the pressure crosses 1.

    It begins at ``first_rate``, goes up or down until two probes bracket the crossing, and halves the bracket until its
    ends are at most ``precision`` apart (0.1: 10%). Then each end is probed until it has ``num_repeats`` probes.
    ``step``: the factor between two rates before there is a bracket; None: by the pressure, ``min_step`` or more.
    """

    first_rate: float
    precision: float = 0.1
    num_repeats: int = 2
    max_probes: int = MAX_PROBES
    min_step: float = MIN_STEP
    step: float | None = None
    pressures: dict[float, list[float]] = field(default_factory=dict)  # by rate

    def note(self, rate: float, pressure: float) -> None:
        """Take the result of a probe."""
        self.pressures.setdefault(rate, []).append(pressure)

    @property
    def num_probes(self) -> int:
        return sum(map(len, self.pressures.values()))

    def next_rate(self) -> float | None:
        """Return the rate of the next probe; None when the search has ended."""
        if self.num_probes >= self.max_probes:
            return None
        if not self.pressures:
            return self.first_rate
        low, high = self.bracket()
        if low is None or high is None:
            return _rounded(self._beyond())
        if high / low > 1 + self.precision:
            return _rounded(math.sqrt(low * high))
        return min(
            (rate for rate in (low, high) if len(self.pressures[rate]) < self.num_repeats),
            key=lambda rate: len(self.pressures[rate]),
            default=None,
        )

    def bracket(self) -> tuple[float | None, float | None]:
        """Return the highest rate below the first one that failed, and that one; None where there is no such rate."""
        low = None
        for rate in sorted(self.pressures):
            if self._log_pressure(rate) > 0:
                return low, rate
            low = rate
        return low, None

    def _beyond(self) -> float:
        """Return a rate beyond all probes."""
        rate = max(self.pressures) if self.bracket()[1] is None else min(self.pressures)
        step = self.step or max(self.min_step, min(MAX_STEP, math.exp(abs(self._log_pressure(rate)))))
        return rate * step if self.bracket()[1] is None else rate / step

    def _log_pressure(self, rate: float) -> float:
        logs = [math.log(max(pressure, 1e-6)) for pressure in self.pressures[rate]]
        return sum(logs) / len(logs)


@dataclass(slots=True)
class Sweep:
    """Probes of the same rates for all arms, whatever one finds: used in place of a :class:`Search`.

    Each rate is probed ``num_repeats`` times; no two ``rates`` are the same.

    Goodput is then known at other ITL objectives, too: wherever it lies between two of the rates.
    """

    rates: Sequence[float]
    num_repeats: int = 1
    pressures: dict[float, list[float]] = field(default_factory=dict)  # by rate

    @property
    def first_rate(self) -> float:
        return self.rates[0]

    @property
    def max_probes(self) -> int:
        """Number of probes in all."""
        return len(self.rates) * self.num_repeats

    def note(self, rate: float, pressure: float) -> None:
        """Take the result of a probe."""
        self.pressures.setdefault(rate, []).append(pressure)

    @property
    def num_probes(self) -> int:
        return sum(map(len, self.pressures.values()))

    def next_rate(self) -> float | None:
        """Return the rate of the next probe: the first one of those with the fewest; None when the sweep has ended."""
        fewest = min(self.rates, key=lambda rate: len(self.pressures.get(rate, ())))
        return fewest if len(self.pressures.get(fewest, ())) < self.num_repeats else None


def _rounded(rate: float) -> float:
    """Return the rate with three digits, so that reports show what was offered."""
    return float(f"{rate:.3g}")
