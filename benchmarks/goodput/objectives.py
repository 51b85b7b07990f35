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
        return self.pressure_of(np.arange(self.num_requests), objectives)

    def pressure_of(self, chosen: NDArray[np.int64], objectives: Objectives) -> float:
        """Return the pressure of the requests with these indices, which may repeat."""
        ratios = (self.ratio(chosen, objectives, "ttft"), self.ratio(chosen, objectives, "itl"))
        return min(MAX_PRESSURE, max(ratios))

    def judged_ms(self, objectives: Objectives) -> dict[str, float | None]:
        """Return the percentiles of TTFT and of the gaps that the objectives bound; None: too many failed."""
        everything = np.arange(self.num_requests)
        ttft = self.ratio(everything, objectives, "ttft") * objectives.ttft_ms
        itl = self.ratio(everything, objectives, "itl") * objectives.itl_ms
        return {name: value if math.isfinite(value) else None for name, value in (("ttft_ms", ttft), ("itl_ms", itl))}

    def ratio(self, chosen: NDArray[np.int64], objectives: Objectives, which: str) -> float:
        """Return the percentile of ``which``, "ttft" or "itl", over its objective."""
        if which == "ttft":
            return percentile(self.ttft_ms[chosen], objectives.percentile) / objectives.ttft_ms
        gaps = [self.gaps_ms[index] for index in chosen]
        return percentile(np.concatenate(gaps) if gaps else np.empty(0), objectives.percentile) / objectives.itl_ms


def percentile(values: NDArray[np.float64], share: float) -> float:
    """Return the smallest value that at least ``share`` percent of ``values`` don't exceed; 0 for none.

    No interpolation: an infinite value must not leak into the value below it.
    """
    if not len(values):
        return 0.0
    index = min(len(values) - 1, math.ceil(len(values) * share / 100) - 1)
    return float(np.partition(values, index)[index])
