"""Samples of the workers' loads and of the router's own process, of the last half minute. Pure: time comes in."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.request import Party

WINDOW_SECONDS = 30.0
SAMPLE_SECONDS = 0.25
"""Time between samples of the router. Those of workers are taken less often, the less the more workers there are."""
LOADS_SECONDS = 1.0
WORKERS_PER_SECOND = 64


@dataclass(frozen=True, slots=True)
class RouterSample:
    at: float
    cpu_seconds: float  # of the event loop's thread, since its start
    wait_seconds: float  # in which it was runnable and had no core, likewise
    lag_seconds: float  # by which the sample's timer was late


@dataclass(frozen=True, slots=True)
class HeardLoad:
    """A worker's load, and the time of its heartbeat."""

    at: float
    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class LoadSample:
    at: float
    loads: Mapping[Party, HeardLoad]


class Samples:
    """Samples, the oldest first."""

    def __init__(self) -> None:
        self.router: deque[RouterSample] = deque()
        self.loads: deque[LoadSample] = deque()

    def add(self, sample: RouterSample) -> None:
        self.router.append(sample)
        while len(self.router) > 1 and self.router[1].at <= sample.at - WINDOW_SECONDS:
            self.router.popleft()

    def wants_loads(self, num_workers: int, now: float) -> bool:
        """Return whether another sample of the workers' loads is due."""
        seconds = max(LOADS_SECONDS, num_workers / WORKERS_PER_SECOND)
        return not self.loads or now >= self.loads[-1].at + seconds

    def add_loads(self, sample: LoadSample) -> None:
        self.loads.append(sample)
        while len(self.loads) > 1 and self.loads[1].at <= sample.at - WINDOW_SECONDS:
            self.loads.popleft()

    def shares(self) -> tuple[float, float]:
        """Return the router's processor time, and its time without a core, over the window's time."""
        if len(self.router) < 2:
            return 0.0, 0.0
        first, last = self.router[0], self.router[-1]
        seconds = max(last.at - first.at, 1e-3)
        waited = last.wait_seconds - first.wait_seconds
        return (last.cpu_seconds - first.cpu_seconds) / seconds, waited / seconds

    def lag_seconds(self) -> float:
        return max((sample.lag_seconds for sample in self.router), default=0.0)

    def before(self, party: Party) -> HeardLoad | None:
        """Return a worker's load in the oldest sample that has it."""
        return next((sample.loads[party] for sample in self.loads if party in sample.loads), None)

    def loads_of(self, party: Party) -> list[WorkerLoad]:
        return [sample.loads[party].load for sample in self.loads if party in sample.loads]
