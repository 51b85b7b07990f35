"""Virtual time: actions in the order of their times, those of the same time in the order in which they were set."""

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """A clock that moves from one action to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Do ``action`` at ``time``; now, if that is over."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Do ``action`` after ``seconds``."""
        self.at(self.now + seconds, action)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Do what is due, one action after another, until ``is_over``, or until nothing is left."""
        while self._queue and not is_over():
            self.now, _, action = heapq.heappop(self._queue)
            action()
