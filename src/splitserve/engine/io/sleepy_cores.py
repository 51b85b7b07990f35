"""The cores of a worker, as its loop sees them."""

from typing import Protocol


class Cores(Protocol):
    """Takes note of whether a worker has something to do."""

    def note(self, is_busy: bool, now: float) -> None:
        """Called each second or so, and as soon as there is something. ``now`` of the monotonic clock."""


class SleepyCores:
    """Cores that sleep as the platform lets them."""

    def note(self, is_busy: bool, now: float) -> None:
        pass
