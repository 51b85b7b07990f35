"""Records of a load's requests, and the figures computed from them. Pure.

Times are in seconds from the load's start; figures are in milliseconds where their name says so.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splitserve.common.errors import ConfigError

Seconds: TypeAlias = NDArray[np.float64]
PERCENTILES = (50, 90, 99)
MIN_VALUES_OF_P99 = 100
"""Number of values below which their 99th percentile says no more than the two highest of them do."""
NOTABLE_LAG_MS = 10.0
"""Delay of the client's own requests, at the 99th percentile, from which a bench says so."""
BUNCHED_SECONDS = 1e-4  # chunks that arrive closer than this were read from the socket together


@dataclass(slots=True)
class RequestRecord:
    """Record of one request as the client saw it."""

    due_seconds: float
    sent_seconds: float = 0.0
    end_seconds: float = 0.0
    chunk_seconds: MutableSequence[float] = field(default_factory=list)  # arrivals of the chunks that carried output
    chunk_tokens: MutableSequence[int] = field(
        default_factory=list
    )  # number of tokens in each, if the endpoint reports it
    input_tokens: int = 0
    output_ids: list[int] = field(default_factory=list, repr=False)  # if the endpoint reports them
    output_tokens: int = 0  # the endpoint's own count, if it reports one
    cached_tokens: int = 0
    finish_reason: str = ""
    error: str = ""

    @property
    def ttft_seconds(self) -> float:
        return self.chunk_seconds[0] - self.sent_seconds

    @property
    def tpot_seconds(self) -> float:
        """Mean time per output token after the first; 0 for a single token."""
        return (self.chunk_seconds[-1] - self.chunk_seconds[0]) / max(1, self.output_tokens - 1)

    @property
    def itl_seconds(self) -> list[float]:
        """Gaps between chunks."""
        return [float(gap) for gap in self.gaps]

    @property
    def gaps(self) -> Seconds:
        """The same as an array."""
        return np.diff(np.asarray(self.chunk_seconds, dtype=np.float64))

    def gap_before(self, token: int) -> float | None:
        """Return the gap before the token of this number, 2 or more; None if the answer is shorter.

        Tokens of one chunk have no gap between them. Where the endpoint doesn't say how many there are in each, one is
        assumed.
        """
        earlier, later = (self._chunk_of(number) for number in (token - 1, token))
        return None if later >= len(self.chunk_seconds) else self.chunk_seconds[later] - self.chunk_seconds[earlier]

    def _chunk_of(self, token: int) -> int:
        """Return the index of the chunk with the token of this number; one beyond all chunks if the answer is
        shorter."""
        if len(self.chunk_tokens) != len(self.chunk_seconds):
            return token - 1
        sums = enumerate(itertools.accumulate(self.chunk_tokens))
        return next((index for index, num_tokens in sums if num_tokens >= token), len(self.chunk_seconds))


@dataclass(frozen=True, slots=True)
class Objective:
    """Service-level objective: bounds in milliseconds that a request must meet; infinite for no bound."""

    ttft_ms: float = float("inf")
    tpot_ms: float = float("inf")
    itl_ms: float = float("inf")  # of the request's longest gap

    def is_met_by(self, record: RequestRecord) -> bool:
        return (
            not record.error
            and record.ttft_seconds * 1e3 <= self.ttft_ms
            and record.tpot_seconds * 1e3 <= self.tpot_ms
            and max(record.itl_seconds, default=0.0) * 1e3 <= self.itl_ms
        )


def parse_objective(bounds: Sequence[str]) -> Objective:
    """Parse an objective like ``ttft:500 tpot:30`` (milliseconds). Raises :class:`ConfigError` that names the bad
    bound."""
    values: dict[str, float] = {}
    for bound in bounds:
        name, _, text = bound.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if name not in ("ttft", "tpot", "itl") or not value > 0:
            raise ConfigError(f"SLO {bound!r}: write ttft:MS, tpot:MS or itl:MS")
        values[f"{name}_ms"] = value
    return Objective(**values)


def percentiles_ms(seconds: "Sequence[float] | Seconds") -> dict[str, float]:
    """Compute mean, percentiles and maximum in milliseconds, and the number of values; empty for no values."""
    if not len(seconds):
        return {}
    values = np.asarray(seconds) * 1e3
    figures = {"mean": float(np.mean(values))}
    figures |= {f"p{share}": float(np.percentile(values, share)) for share in PERCENTILES}
    return figures | {"max": float(np.max(values)), "count": len(values)}


def few_values_notes(figures: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Return a note that names the figures, by their labels, whose 99th percentile is that of too few values."""
    least = {label: min((each["count"] for each in found if each), default=0) for label, found in figures.items()}
    few = [f"{count} of {label}" for label, count in least.items() if 0 < count < MIN_VALUES_OF_P99]
    return [f"p99 of fewer than {MIN_VALUES_OF_P99} values is close to their maximum: {', '.join(few)}"] if few else []


def mean_of_longest_tenth_ms(seconds: "Sequence[float] | Seconds") -> float:
    """Compute the mean of the longest tenth of gaps: a mean over all gaps hides stalls."""
    longest = np.sort(np.asarray(seconds, dtype=np.float64))[-max(1, len(seconds) // 10) :]
    return 1e3 * float(longest.mean()) if len(longest) else 0.0


def summarise(records: Sequence[RequestRecord], objective: Objective | None) -> dict[str, Any]:
    """Compute all figures of a load. A failed request has no latency, and misses any objective.

    ``second_token_ms``, the gap before the second token, shows a hand-over. If prefill draws that token, too, the
    hand-over shows in ``third_token_ms``, the gap before the third one. ``later_itl_ms`` are all gaps but the first.
    """
    done = [record for record in records if not record.error]
    duration = max((record.end_seconds for record in records), default=0.0)
    by_record = [record.gaps for record in done]
    gaps = _joined(by_record)
    per_second = 1.0 / duration if duration else 0.0
    figures: dict[str, Any] = {
        "requests": len(records),
        "completed": len(done),
        "failed": dict(Counter(record.error for record in records if record.error)),
        "duration_seconds": duration,
        "requests_per_second": len(done) * per_second,
        "input_tokens_per_second": sum(record.input_tokens for record in done) * per_second,
        "output_tokens_per_second": sum(record.output_tokens for record in done) * per_second,
        "input_tokens": sum(record.input_tokens for record in done),
        "cached_input_tokens": sum(record.cached_tokens for record in done),
        "output_tokens": sum(record.output_tokens for record in done),
        "ttft_ms": percentiles_ms([record.ttft_seconds for record in done]),
        "tpot_ms": percentiles_ms([record.tpot_seconds for record in done if record.output_tokens > 1]),
        "itl_ms": percentiles_ms(gaps),
        "second_token_ms": _gaps_before(2, done),
        "third_token_ms": _gaps_before(3, done),
        "later_itl_ms": percentiles_ms(_joined([each[1:] for each in by_record])),
        "itl_longest_tenth_mean_ms": mean_of_longest_tenth_ms(gaps),
        "bunched_gaps_share": int(np.count_nonzero(gaps < BUNCHED_SECONDS)) / max(1, len(gaps)),
        "e2e_ms": percentiles_ms([record.end_seconds - record.sent_seconds for record in done]),
        "tokens_per_chunk": _tokens_per_chunk(done),
        "dispatch_lag_ms": percentiles_ms([record.sent_seconds - record.due_seconds for record in records]),
    }
    if objective is not None:
        num_good = sum(objective.is_met_by(record) for record in records)
        figures["slo_attainment"] = num_good / max(1, len(records))
        figures["goodput_requests_per_second"] = num_good * per_second
    return figures


def _gaps_before(token: int, records: Sequence[RequestRecord]) -> dict[str, float]:
    """Compute the percentiles of the gap before the token of this number, of the requests that have it."""
    gaps = (record.gap_before(token) for record in records)
    return percentiles_ms([gap for gap in gaps if gap is not None])


def _tokens_per_chunk(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Compute the mean number of tokens per chunk, and the maximum if the endpoint returns token ids: above 1, gaps
    between chunks aren't gaps between tokens."""
    num_chunks = sum(len(record.chunk_seconds) for record in records)
    if not num_chunks:
        return {}
    figures = {"mean": sum(record.output_tokens for record in records) / num_chunks}
    counts = [max(record.chunk_tokens) for record in records if record.chunk_tokens]
    return figures | ({"max": float(max(counts))} if counts else {})


def _joined(gaps: Sequence[Seconds]) -> Seconds:
    return np.concatenate(gaps) if gaps else np.empty(0)
