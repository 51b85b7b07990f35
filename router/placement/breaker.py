"""A circuit breaker per worker: one that keeps failing requests gets none for a while. Pure; time is an argument."""

from dataclasses import dataclass

FAILURES_TO_OPEN = 3
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0


@dataclass(slots=True)
class Breaker:
    """Closed until ``FAILURES_TO_OPEN`` failures in a row; then open for a pause that doubles with each failure
    after it.

    After the pause requests go through again; the next success closes the breaker, the next failure opens it anew.
    """

    num_failures: int = 0
    counted_at: float = float("-inf")
    open_until: float = float("-inf")

    def allows(self, now: float) -> bool:
        return now >= self.open_until

    def on_failure(self, now: float, began_at: float) -> None:
        """An attempt that began at ``began_at`` failed.

        Those that were under way when another one's failure was counted tell nothing new: a worker that was frozen, and
        failed ten requests with that, failed once.
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
