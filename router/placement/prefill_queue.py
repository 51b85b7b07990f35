"""Queue of prompts at one worker, in predicted seconds. Pure; time is an argument."""

import math
from collections.abc import Hashable

BUSY_SECONDS = 30.0
"""Time constant of the busy share. With r prompts per second, whose times have a coefficient of variation c, the share
has a relative error of sqrt((1 + c^2) / (2 r BUSY_SECONDS)): 23% for r = 1 and c = 1.5, where 10 s would leave 40%, and
placement would follow chance. It trails a change of the load by as much."""
SURGE_SECONDS = 3.0
"""Time constant of the busy share that follows a surge of the load. After as long without a prompt a new load begins.
A router that trusts the slow share alone takes the workers of an idle cluster to have time for half a minute after the
load has come."""
SETTLED_SECONDS = 10 * BUSY_SECONDS
"""Time after which the time before a worker's first prompt is forgotten."""
_SURGES = BUSY_SECONDS / SURGE_SECONDS


class PrefillQueue:
    """Predicted seconds of the prompts that a worker was given and has not answered with a first token.

    The first prompt counts less with the time that it has been in progress, the others in full.
    """

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}  # in order of arrival
        self._total = 0.0
        self._first_since = 0.0
        self._busy = 0.0  # seconds given lately, each forgotten with BUSY_SECONDS
        self._busy_squares = 0.0  # sum of the squares of these seconds
        self._surge = 0.0  # seconds given after the first prompt since a pause, each forgotten with SURGE_SECONDS
        self._load_since = 0.0  # time of that first prompt
        self._busy_then = 0.0  # ``_busy`` right after that prompt
        self._busy_at = -math.inf
        self._used_since = 0.0
        self.was_used = False  # a prompt was added at some time

    def __len__(self) -> int:
        return len(self._seconds)

    def keys(self) -> list[Hashable]:
        """Return the keys of the prompts in the order of their arrival."""
        return list(self._seconds)

    def add(self, key: Hashable, seconds: float, now: float) -> None:
        """Add a prompt that will take ``seconds``."""
        if not self.was_used:
            self.was_used, self._used_since = True, now
        if not self._seconds:
            self._first_since = now
        self._seconds[key] = seconds
        self._total += seconds
        kept = self._kept(now)
        self._busy = kept * self._busy + seconds
        if now - self._busy_at > SURGE_SECONDS:  # a load begins; without this prompt: the share would begin at 1
            self._surge, self._load_since, self._busy_then = 0.0, now, self._busy
        else:
            self._surge = kept**_SURGES * self._surge + seconds
        self._busy_squares = kept * self._busy_squares + seconds * seconds
        self._busy_at = now

    def remove(self, key: Hashable, now: float) -> None:
        """Take a prompt off: its first token is out, or its attempt has ended. Another time is harmless."""
        if key not in self._seconds:
            return
        if next(iter(self._seconds)) == key:
            self._first_since = now
        self._total -= self._seconds.pop(key)
        if not self._seconds:
            self._total = 0.0

    def seconds(self, now: float) -> float:
        """Return the seconds until the worker has computed all of them."""
        if not self._seconds:
            return 0.0
        first, age = next(iter(self._seconds.values())), now - self._first_since
        done = 0.0 if age < 0.0 else min(first, age)
        return max(0.0, self._total - done)

    def busy_share(self, now: float) -> float:
        """Return the share of the worker's recent time that prompts took, 1 at most. Time before its first prompt
        counts: the share is low in the beginning, rather than that of a few prompts."""
        share = self._kept(now) * self._busy / BUSY_SECONDS
        return share if share < 1.0 else 1.0

    def outlook(self, now: float) -> tuple[float, float, float, float]:
        """Return all that placement predicts with, in one call since each request asks for that of all workers:
        :meth:`seconds`, :meth:`busy_share`, the share of the worker's time that prompts will take, and the mean seconds
        of the recent prompts, each weighted by its seconds: what is computed at an average moment of the busy time
        belongs to a prompt of so many.

        The third one is the largest of three shares: of the half minute or so since the first prompt of all; of the
        same time since the first prompt after a pause, which leaves the pause out; and of the last few seconds since
        that prompt, in which a new load shows at once.
        """
        seconds, busy = self.seconds(now) if self._seconds else 0.0, self._busy
        if not busy:
            return seconds, 0.0, 0.0, 0.0
        kept = self._kept(now)
        share = expected = self.busy_share(now)
        if (age := now - self._used_since) <= SETTLED_SECONDS and share:
            expected = _since(share, age, BUSY_SECONDS)
        if self._surge > 0.0:
            age = now - self._load_since
            load = max(0.0, kept * busy - self._busy_then * math.exp(-max(0.0, age) / BUSY_SECONDS))
            surge = kept**_SURGES * self._surge
            load_shares = (
                _since(load / BUSY_SECONDS, age, BUSY_SECONDS),
                _since(surge / SURGE_SECONDS, age, SURGE_SECONDS),
            )
            expected = max(expected, *load_shares)
        return seconds, share, expected, self._busy_squares / busy

    def _kept(self, now: float) -> float:
        """Return the weight that is left of what was given until the last prompt."""
        age = now - self._busy_at
        return math.exp(-age / BUSY_SECONDS) if age > 0.0 else 1.0


def _since(share: float, age: float, time_constant: float) -> float:
    """Return a share of all time as one of the last ``age`` seconds, 1 at most."""
    of_time = -math.expm1(-age / time_constant) if age > 0.0 else 0.0
    return share / of_time if share < of_time else 1.0
