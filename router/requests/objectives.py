"""Objectives for the latency of answers, from the cluster spec. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from splitserve.protocol.config import RequestClass


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives in seconds; 0: none. TPOT is the mean time per output token after the first."""

    ttft_seconds: float
    tpot_seconds: float

    def judge(
        self, arrived_at: float, first_token_at: float, last_token_at: float, num_tokens: int
    ) -> Iterator[tuple[str, bool]]:
        """Yield each objective and whether a successful request met it; a token time of 0.0: no token came."""
        if self.ttft_seconds:
            yield "ttft", 0.0 < first_token_at <= arrived_at + self.ttft_seconds
        if self.tpot_seconds:
            yield "tpot", last_token_at - first_token_at <= self.tpot_seconds * max(0, num_tokens - 1)

    def missed(self) -> Iterator[tuple[str, bool]]:
        """Yield each objective as missed, for a failed request."""
        yield from (
            (name, False) for name, seconds in (("ttft", self.ttft_seconds), ("tpot", self.tpot_seconds)) if seconds
        )


NO_OBJECTIVES = Objectives(0.0, 0.0)


def objectives_of(request_class: RequestClass) -> Objectives | None:
    """Return the objectives of a class; None if it has none of its own."""
    if not (request_class.ttft_ms or request_class.itl_ms):
        return None
    return Objectives(request_class.ttft_ms / 1e3, request_class.itl_ms / 1e3)
