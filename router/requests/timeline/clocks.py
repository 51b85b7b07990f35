"""Clocks of workers, mapped to the router's by round trips: readings of the clocks, and requests. Pure.

A worker's clock shows w, the router's r = w - offset. A message that the router sent at r1 was received at w1 >= r1 +
offset; the answer, sent at w2, arrived at r2 >= w2 - offset. So the offset lies between w2 - r2 and w1 - r1. As in NTP
(RFC 5905, the clock filter) the shortest of many ways count; here each direction has its own shortest one, so that the
bounds are no wider than those of the best round trip, and no way ever takes less than 0 s. The middle of the bounds is
wrong by at most half their distance. Readings are exchanged all the time, so a request's own ways are measured
against an offset that it did not cause itself.
"""

import math
from dataclasses import dataclass, field

from splitserve.common.bounded import ExpiringMap
from splitserve.protocol.request import Party

WINDOW_SECONDS = 60.0
"""Age at which bounds are forgotten: clocks drift by up to some 100 us in that time."""
MAX_CLOCKS = 1024


@dataclass(slots=True)
class Bounds:
    low: float = -math.inf
    high: float = math.inf

    def narrow(self, low: float, high: float) -> None:
        self.low, self.high = max(self.low, low), min(self.high, high)
        if self.low > self.high:  # a clock has drifted, or was set: only the newest round trip counts
            self.low, self.high = low, high


@dataclass(slots=True)
class WorkerClock:
    """The offset of one worker's clock, by the round trips of the last one to two windows."""

    _bounds: Bounds = field(default_factory=Bounds)
    _next: Bounds = field(default_factory=Bounds)  # those since the middle of the window
    _next_since: float = 0.0

    def note(self, low: float, high: float, now: float) -> None:
        """Take the bounds of the offset by one round trip; an infinite one is unknown."""
        if now >= self._next_since + WINDOW_SECONDS:
            self._bounds, self._next, self._next_since = self._next, Bounds(), now
        self._bounds.narrow(low, high)
        self._next.narrow(low, high)

    @property
    def offset(self) -> float | None:
        """Return the worker's time less the router's; None before the first round trip."""
        low, high = self._bounds.low, self._bounds.high
        if math.isinf(low) or math.isinf(high):
            return None
        return (low + high) / 2


class WorkerClocks:
    """The clocks of all workers that have answered a request of late."""

    def __init__(self) -> None:
        self._clocks: ExpiringMap[Party, WorkerClock] = ExpiringMap(max_size=MAX_CLOCKS, ttl_seconds=math.inf)

    def of(self, worker: Party, now: float) -> WorkerClock:
        clock = self._clocks.get(worker, now)
        if clock is None:
            clock = WorkerClock()
            self._clocks.put(worker, clock, now)
        return clock

    def note(self, worker: Party, asked_at: float, at: float, now: float) -> None:
        """Take a reading of a worker's clock, that was asked for at ``asked_at`` and came ``now``."""
        if asked_at <= now:
            self.of(worker, now).note(at - now, at - asked_at, now)
