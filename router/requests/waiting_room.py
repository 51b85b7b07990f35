"""The queue of newcomers (requests, and questions about limits) that no worker can serve yet, bounded in number, memory
and time. Pure."""

from collections.abc import Callable
from typing import Generic, TypeVar

from splitserve.router.http.api_error import ApiError
from splitserve.router.placement.policies import NoWorker
from splitserve.router.requests.effects import CancelTimer, Outbox, Refuse, SetTimer
from splitserve.router.requests.events import Timer, TimerKind

RETRY_AFTER_SECONDS = 5
"""Retry-After for clients that waited in vain: about the time in which a worker restarts."""

T = TypeVar("T")


class WaitingRoom(Generic[T]):
    """A queue of at most ``max_waiting`` newcomers, each for ``wait_seconds`` from its arrival, in order of arrival.

    Together they keep at most ``max_bytes`` of bodies and prompts; a single newcomer may keep more. ``serve`` serves a
    newcomer, or returns the reason why no worker can.
    """

    def __init__(
        self,
        max_waiting: int,
        max_bytes: int,
        wait_seconds: float,
        outbox: Outbox,
        serve: Callable[[str, T, float], NoWorker | None],
    ) -> None:
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._wait_seconds = self.patience_seconds = wait_seconds
        self._outbox = outbox
        self._serve = serve
        self._waiting: dict[str, tuple[T, int, float]] = {}  # by id: a newcomer, its bytes, its arrival
        self._num_bytes = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def in_line(self) -> list[tuple[str, T]]:
        """Return the waiting newcomers with their ids."""
        return [(newcomer_id, newcomer) for newcomer_id, (newcomer, *_) in self._waiting.items()]

    def arrive(self, newcomer_id: str, newcomer: T, num_bytes: int, arrived_at: float, now: float) -> None:
        """Serve a newcomer now, let it wait, or refuse it. ``num_bytes``: memory that it keeps while it waits."""
        lacking = self._serve(newcomer_id, newcomer, now)
        if lacking is not None:
            self.keep(newcomer_id, newcomer, num_bytes, lacking, since=arrived_at, now=now)

    def keep(
        self, newcomer_id: str, newcomer: T, num_bytes: int, lacking: NoWorker, *, since: float, now: float
    ) -> None:
        """Let a newcomer that no worker can serve wait, or refuse it. ``since``: the beginning of its wait."""
        wait_until = since + self.patience_seconds
        if len(self._waiting) >= self._max_waiting:
            reason = f"{lacking.reason}, and {len(self._waiting)} requests wait for one already"
            self._outbox.put(Refuse(newcomer_id, reason))
        elif self._waiting and self._num_bytes + num_bytes > self._max_bytes:
            self._outbox.put(Refuse(newcomer_id, f"{lacking.reason}, and large requests wait for one already"))
        elif self._is_closed or wait_until <= now:
            self._outbox.put(Refuse(newcomer_id, lacking.reason))
        else:
            self._waiting[newcomer_id] = newcomer, num_bytes, since
            self._num_bytes += num_bytes
            self._outbox.put(SetTimer(Timer(TimerKind.WAIT, newcomer_id), wait_until))

    def serve_all(self, now: float) -> None:
        """Serve the newcomers that workers can serve now: a worker has become ready."""
        for newcomer_id, newcomer in self.in_line():
            if self._serve(newcomer_id, newcomer, now) is None:
                self.leave(newcomer_id)

    def wait_for(self, seconds: float | None, now: float) -> None:
        """Let newcomers, those that wait included, wait for so long from their arrival; None: as at first, but those
        that wait begin anew."""
        self.patience_seconds = self._wait_seconds if seconds is None else seconds
        for newcomer_id, (_, _, arrived_at) in self._waiting.items():
            begun_at = now if seconds is None else arrived_at
            self._outbox.put(SetTimer(Timer(TimerKind.WAIT, newcomer_id), max(now, begun_at + self.patience_seconds)))

    def leave(self, newcomer_id: str) -> bool:
        """Remove a newcomer; return False if it wasn't waiting."""
        if self._pop(newcomer_id) is None:
            return False
        self._outbox.put(CancelTimer(Timer(TimerKind.WAIT, newcomer_id)))
        return True

    def on_timer(self, newcomer_id: str, now: float) -> None:
        """Serve a newcomer that has waited long enough, or refuse it."""
        newcomer = self._pop(newcomer_id)
        lacking = None if newcomer is None else self._serve(newcomer_id, newcomer, now)
        if lacking is not None:
            self._outbox.put(Refuse(newcomer_id, lacking.reason))

    def close(self, reason: str) -> None:
        """Refuse all newcomers, now and later, with ``reason``."""
        self._is_closed = True
        for newcomer_id, _ in self.in_line():
            self.leave(newcomer_id)
            self._outbox.put(Refuse(newcomer_id, reason))

    def _pop(self, newcomer_id: str) -> T | None:
        newcomer, num_bytes, _ = self._waiting.pop(newcomer_id, (None, 0, 0.0))
        self._num_bytes -= num_bytes
        return newcomer

    def check_invariants(self) -> None:
        kept = sum(num_bytes for _, num_bytes, _ in self._waiting.values())
        assert self._num_bytes == kept, f"{self._num_bytes} bytes are counted where {kept} are kept"
        assert len(self._waiting) <= self._max_waiting, f"{len(self._waiting)} wait where {self._max_waiting} may"


def no_worker(reason: str) -> ApiError:
    """Return the error for a client whose request no worker took."""
    return ApiError(503, f"{reason}: try again", code="no_worker", retry_after_seconds=RETRY_AFTER_SECONDS)
