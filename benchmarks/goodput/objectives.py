"""Objectives of a comparison, and how close a load came to them. Pure.

A load's *pressure* is the larger of two ratios: the percentile of TTFT over its objective, and the same of the gaps
between tokens. The objectives hold up to a pressure of 1. A request that failed counts as one with an infinite TTFT,
and each token that it lacks as an infinite gap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitserve.benchmarks.common.stats import RequestRecord
from splitserve.common.errors import ConfigError

MAX_PRESSURE = 100.0
"""Pressure of a load with more failures than the percentile allows: finite, for logarithms."""

LASTING_TTFTS = 20
"""Duration of a load in terms of the TTFT objective, at least: where requests come a twentieth faster than they can be
served, the last ones wait for as long as the objective."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Bounds of the ``percentile`` of TTFT and of the gaps between tokens, in milliseconds."""

    ttft_ms: float
    itl_ms: float
    percentile: float = 99.0

    def __post_init__(self) -> None:
        if not (self.ttft_ms > 0 and self.itl_ms > 0 and 0 < self.percentile < 100):
            raise ConfigError(
                f"objectives must be above 0 ms, at a percentile between 0 and 100; got TTFT {self.ttft_ms} ms, ITL "
                f"{self.itl_ms} ms, p{self.percentile:g}"
            )

    @property
    def lasting_seconds(self) -> float:
        """The duration of a load in which a queue that grows by a twentieth of the time shows."""
        return LASTING_TTFTS * self.ttft_ms / 1e3

    @property
    def words(self) -> str:
        return f"p{self.percentile:g} of TTFT at most {self.ttft_ms:g} ms and of ITL at most {self.itl_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Latencies of a load's requests, in the order of their arrival."""

    ttft_ms: NDArray[np.float64]  # of each request
    gaps_ms: tuple[NDArray[np.float64], ...]  # of each request, its gaps between tokens
    num_failed: int

    @classmethod
    def of(cls, records: Sequence[RequestRecord], expected_tokens: Sequence[int]) -> "Outcome":
        """Make the outcome of ``records``, which should have had ``expected_tokens`` each."""
        ttft, gaps = [], []
        for record, expected in zip(records, expected_tokens, strict=True):
            received = 1e3 * np.asarray(record.itl_seconds, dtype=np.float64)
            if record.error:
                ttft.append(math.inf)
                lacking = max(0, expected - 1 - len(received))
                received = np.concatenate([received, np.full(lacking, math.inf)])
            else:
                ttft.append(1e3 * record.ttft_seconds)
            gaps.append(received)
        return cls(np.asarray(ttft), tuple(gaps), sum(bool(record.error) for record in records))

    @property
    def num_requests(self) -> int:
        return len(self.ttft_ms)

    def pressure(self, objectives: Objectives) -> float:
        """Return the pressure of the whole load."""
        return min(MAX_PRESSURE, max(self.ratio(objectives, "ttft"), self.ratio(objectives, "itl")))

    def pressures(self, chosen: NDArray[np.int64], objectives: Objectives) -> NDArray[np.float64]:
        """Return the pressure of each row of ``chosen``, ``[loads, requests]``: indices of requests, which may repeat.

        The gaps are sorted once: in a row, each stands for as many as its request comes.
        """
        index = index_of(chosen.shape[1], objectives.percentile)
        ttft = np.partition(self.ttft_ms[chosen], index)[:, index] / objectives.ttft_ms
        gaps = np.concatenate(self.gaps_ms)
        order = np.argsort(gaps)
        owners = np.repeat(np.arange(self.num_requests), [len(each) for each in self.gaps_ms])[order]
        itl = np.zeros(len(chosen))
        for number, row in enumerate(chosen):
            ends = np.bincount(row, minlength=self.num_requests)[owners].cumsum()
            if len(ends) and ends[-1]:
                at = np.searchsorted(ends, index_of(int(ends[-1]), objectives.percentile), side="right")
                itl[number] = gaps[order[at]] / objectives.itl_ms
        return np.minimum(MAX_PRESSURE, np.maximum(ttft, itl))

    def judged_ms(self, objectives: Objectives) -> dict[str, float | None]:
        """Return the percentiles of TTFT and of the gaps that the objectives bound; None: too many failed."""
        ttft = self.ratio(objectives, "ttft") * objectives.ttft_ms
        itl = self.ratio(objectives, "itl") * objectives.itl_ms
        return {name: value if math.isfinite(value) else None for name, value in (("ttft_ms", ttft), ("itl_ms", itl))}

    def ratio(self, objectives: Objectives, which: str) -> float:
        """Return the percentile of ``which``, "ttft" or "itl", over its objective."""
        if which == "ttft":
            return percentile(self.ttft_ms, objectives.percentile) / objectives.ttft_ms
        gaps = np.concatenate(self.gaps_ms) if self.gaps_ms else np.empty(0)
        return percentile(gaps, objectives.percentile) / objectives.itl_ms


def percentile(values: NDArray[np.float64], share: float) -> float:
    """Return the smallest value that at least ``share`` percent of ``values`` don't exceed; 0 for none.

    No interpolation: an infinite value must not leak into the value below it.
    """
    if not len(values):
        return 0.0
    index = index_of(len(values), share)
    return float(np.partition(values, index)[index])


def index_of(number: int, share: float) -> int:
    """Return the index of that percentile among so many sorted values."""
    return min(number - 1, math.ceil(number * share / 100) - 1)
