"""Activity of the router over the last seconds: requests, tokens, TTFT. Pure: time comes in as an argument."""

from collections import deque
from dataclasses import dataclass

from splitserve.protocol.cluster_report import RequestRates, RequestSummary

WINDOW_SECONDS = 10.0
MAX_TTFTS = 4096


@dataclass(slots=True)
class Totals:
    """Counts since the router's start."""

    num_requests: int = 0  # that have ended
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def minus(self, before: "Totals") -> "Totals":
        return Totals(
            self.num_requests - before.num_requests,
            self.num_failed - before.num_failed,
            self.num_prompt_tokens - before.num_prompt_tokens,
            self.num_output_tokens - before.num_output_tokens,
        )

    def copy(self) -> "Totals":
        return self.minus(Totals())


class Activity:
    """Totals with samples of the last ``WINDOW_SECONDS``, for which :meth:`sample` is called each second."""

    def __init__(self, now: float) -> None:
        self.totals = Totals()
        self._samples: deque[tuple[float, Totals]] = deque([(now, Totals())])
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MAX_TTFTS)

    def note_end(self, summary: RequestSummary, now: float) -> None:
        """Count a request that has ended; its output tokens were counted as they came."""
        self.totals.num_requests += 1
        self.totals.num_failed += summary.status == "failed"
        self.totals.num_prompt_tokens += summary.num_prompt_tokens
        if summary.ttft_seconds is not None:
            self._ttfts.append((now, summary.ttft_seconds))

    def sample(self, now: float) -> None:
        """Keep the totals of now; forget those of before the window but the last."""
        self._samples.append((now, self.totals.copy()))
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()
        while self._ttfts and self._ttfts[0][0] < now - WINDOW_SECONDS:
            self._ttfts.popleft()

    def rates(self, num_in_flight: int, num_waiting: int, now: float) -> RequestRates:
        """Return the rates since the oldest sample."""
        since, before = self._samples[0]
        seconds = max(now - since, 1e-3)
        found = self.totals.minus(before)
        ttfts = sorted(ttft for at, ttft in self._ttfts if at >= since)
        return RequestRates(
            seconds=seconds,
            num_in_flight=num_in_flight,
            num_waiting=num_waiting,
            requests_per_second=found.num_requests / seconds,
            failures_per_second=found.num_failed / seconds,
            prompt_tokens_per_second=found.num_prompt_tokens / seconds,
            output_tokens_per_second=found.num_output_tokens / seconds,
            ttft_seconds_median=_quantile(ttfts, 0.5),
            ttft_seconds_p99=_quantile(ttfts, 0.99),
        )


def line_of(rates: RequestRates) -> str:
    """Return the rates as one line for people; "" if there was no load."""
    if not (rates.requests_per_second or rates.output_tokens_per_second or rates.num_in_flight):
        return ""
    parts = [
        f"{rates.requests_per_second:.1f} requests/s",
        f"{rates.prompt_tokens_per_second:.0f} prompt and {rates.output_tokens_per_second:.0f} output tokens/s",
        f"{rates.num_in_flight} in flight",
    ]
    if rates.num_waiting:
        parts.append(f"{rates.num_waiting} wait for a worker")
    if rates.failures_per_second:
        parts.append(f"{rates.failures_per_second:.1f} failures/s")
    if rates.ttft_seconds_median is not None and rates.ttft_seconds_p99 is not None:
        parts.append(f"TTFT {1e3 * rates.ttft_seconds_median:.0f} ms median, {1e3 * rates.ttft_seconds_p99:.0f} ms p99")
    return f"last {rates.seconds:.0f} s: {', '.join(parts)}"


def _quantile(ordered: list[float], share: float) -> float | None:
    """Return the value below which ``share`` of the sorted values lie; None without any."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
