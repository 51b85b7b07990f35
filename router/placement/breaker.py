"""A circuit breaker per worker: a worker that keeps failing gets no requests for a while. Pure; time is an argument."""

from dataclasses import dataclass

FAILURES_TO_OPEN = 3
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0


@dataclass(slots=True)
class Breaker:
    """A breaker, closed until ``FAILURES_TO_OPEN`` failures in a row, then open for a pause that doubles with each
    further failure.

    After the pause requests pass again; the next success closes the breaker, the next failure opens it anew.
    """

    num_failures: int = 0
    counted_at: float = float("-inf")
    open_until: float = float("-inf")

    def allows(self, now: float) -> bool:
        return now >= self.open_until

    def on_failure(self, now: float, began_at: float) -> None:
        """Count the failure of an attempt that began at ``began_at``.

        Attempts that were in flight when the last failure was counted don't count: a worker that froze and thereby
        failed ten requests failed once.
        """
        if began_at <= self.counted_at:
            return
        self.counted_at = now
        self.num_failures += 1
        excess = self.num_failures - FAILURES_TO_OPEN
        if excess >= 0:
            self.open_until = now + min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(excess, 10))

    def on_success(self) -> None:
        self.num_failures = 0
        self.open_until = float("-inf")
