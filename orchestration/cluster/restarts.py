"""Policy for the restart of workers that died. Pure: time and chance are arguments.

A worker that had served for a while is started again at once. One that dies again and again soon after its start waits,
each time twice as long, with jitter, so that several workers don't restart in step; in the end it is abandoned.
"""

import random
from dataclasses import dataclass, field

import msgspec

SOON_SECONDS = 10.0
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
MAX_QUICK_DEATHS = 12


class StartTimes(msgspec.Struct, frozen=True):
    """Steps of a worker's last start, in seconds of one clock; None: not reached.

    From ``lost_at`` to ``asked_at`` the restart policy waits, to ``placed_at`` a node is found and a process started on
    it, to ``ready_at`` the worker loads its model.
    """

    lost_at: float | None = None  # the end of its predecessor was noticed; None at a first start
    asked_at: float | None = None  # the host was asked to start it
    placed_at: float | None = None  # a process of it runs on its node
    ready_at: float | None = None  # it takes requests

    def moved(self, seconds: float) -> "StartTimes":
        """Return the same steps on a clock that is ``seconds`` ahead."""
        times = (self.lost_at, self.asked_at, self.placed_at, self.ready_at)
        return StartTimes(*(None if at is None else at + seconds for at in times))


class AbandonedWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker that ended and isn't started again."""

    name: str
    pool: str
    last_words: str  # reason of its end


@dataclass(slots=True)
class RestartPolicy:
    """History of one worker's deaths."""

    num_quick_deaths: int = 0  # in a row

    def on_death(self, seconds_ready: float | None, chosen: random.Random) -> float | None:
        """Return the seconds until the next start, or None to abandon the worker. ``seconds_ready``: time for which it
        had been ready, None if it never was."""
        if seconds_ready is not None and seconds_ready >= SOON_SECONDS:
            self.num_quick_deaths = 0
            return 0.0
        self.num_quick_deaths += 1
        if self.num_quick_deaths > MAX_QUICK_DEATHS:
            return None
        if seconds_ready is not None and self.num_quick_deaths == 1:
            return 0.0
        backoff_seconds = FIRST_BACKOFF_SECONDS * 2.0 ** (self.num_quick_deaths - 1)
        return chosen.uniform(0.5, 1.0) * min(MAX_BACKOFF_SECONDS, backoff_seconds)


@dataclass(slots=True)
class Revival:
    """Restart of a process that others can do without."""

    due_at: float = float("inf")  # time of the next start, infinity for none
    ready_since: float | None = None
    _policy: RestartPolicy = field(default_factory=RestartPolicy)
    _chosen: random.Random = field(default_factory=random.Random)

    @property
    def is_ready(self) -> bool:
        return self.ready_since is not None

    def on_ready(self, now: float) -> None:
        self.ready_since = now

    def on_exit(self, now: float) -> None:
        """Schedule the restart of a process that has ended or couldn't be started."""
        seconds = None if self.ready_since is None else now - self.ready_since
        self.ready_since = None
        delay_seconds = self._policy.on_death(seconds, self._chosen)
        self.due_at = float("inf") if delay_seconds is None else now + delay_seconds
