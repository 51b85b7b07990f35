"""Virtual time: callbacks in order of their times, those of the same time in the order in which they were set."""

import heapq
import itertools
from collections.abc import Callable
from typing import TypeAlias

Callback: TypeAlias = Callable[[], None]


class VirtualClock:
    """A clock that jumps from one callback to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Callback]] = []

    def at(self, time: float, callback: Callback) -> None:
        """Call ``callback`` at ``time``, or now if that is over."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), callback))

    def after(self, seconds: float, callback: Callback) -> None:
        """Call ``callback`` after ``seconds``."""
        self.at(self.now + seconds, callback)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Call callbacks until ``is_over`` returns True, or none is left."""
        while self._heap and not is_over():
            self.now, _, callback = heapq.heappop(self._heap)
            callback()
