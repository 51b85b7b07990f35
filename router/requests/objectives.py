"""Whether an answer came as fast as the cluster spec wants it. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds; 0: no objective. TPOT is the mean time per output token after the first."""

    ttft_seconds: float
    tpot_seconds: float

    def judge(
        self, arrived_at: float, first_token_at: float, last_token_at: float, num_tokens: int
    ) -> Iterator[tuple[str, bool]]:
        """Each objective that there is, and whether a request that ended well met it; 0.0 as a time: no token came."""
        if self.ttft_seconds:
            yield "ttft", 0.0 < first_token_at <= arrived_at + self.ttft_seconds
        if self.tpot_seconds:
            yield "tpot", last_token_at - first_token_at <= self.tpot_seconds * max(0, num_tokens - 1)

    def missed(self) -> Iterator[tuple[str, bool]]:
        """What a request counts for that failed."""
        yield from (
            (name, False) for name, seconds in (("ttft", self.ttft_seconds), ("tpot", self.tpot_seconds)) if seconds
        )
