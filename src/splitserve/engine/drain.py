"""The drain of a worker: the decision when it may stop. Pure: no I/O, no clock.

SERVING --begin--> DRAINING --idle for SETTLE_SECONDS, or drain_seconds are over--> gone
"""

SETTLE_SECONDS = 0.2


class Drain:
    """The state of a drain. The worker must be idle for a while: a request that the router sent before it received
    Draining is then still rejected with an answer, and the last tokens, which travel on another connection than Leave,
    arrive before it."""

    def __init__(self, drain_seconds: float) -> None:
        self._drain_seconds = drain_seconds
        self._began_at: float | None = None
        self._idle_since: float | None = None
        self.reason = ""

    @property
    def has_begun(self) -> bool:
        return self._began_at is not None

    def begin(self, now: float) -> None:
        self._began_at = now

    def is_over(self, is_idle: bool, now: float) -> bool:
        """Return whether the worker may stop; ``reason`` says why. Call it whenever idleness may have changed."""
        if self._began_at is None:
            return False
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        if self._idle_since is not None and now - self._idle_since >= SETTLE_SECONDS:
            self.reason = f"idle after {self._idle_since - self._began_at:.2f} s"
        elif now - self._began_at >= self._drain_seconds:
            self.reason = f"not idle within {self._drain_seconds:g} s"
        return bool(self.reason)

    def next_deadline(self) -> float:
        """Return the time at which :meth:`is_over` may become true without any event."""
        if self._began_at is None:
            return float("inf")
        end = self._began_at + self._drain_seconds
        return end if self._idle_since is None else min(end, self._idle_since + SETTLE_SECONDS)
