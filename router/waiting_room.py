"""New requests that no worker can take at the moment: each waits for one, in bounded number and for a bounded time."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from splitserve.router.api_error import ApiError
from splitserve.router.metrics import RouterMetrics
from splitserve.router.placement import NoWorker

RETRY_AFTER_SECONDS = 5
"""What clients are told who waited in vain: a worker that is started again takes about that long."""

Outcome = TypeVar("Outcome")


class ClientGoneError(Exception):
    """The client closed its connection while its request waited."""


class WaitingRoom:
    """``max_waiting`` requests at once."""

    def __init__(self, max_waiting: int, metrics: RouterMetrics) -> None:
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._calls: set[asyncio.Future[None]] = set()
        self._closed = False

    async def until(
        self,
        attempt: Callable[[], Outcome | NoWorker],
        deadline: float,
        watch_client: Callable[[], asyncio.Future[None]],
    ) -> Outcome:
        """Make ``attempt`` now and at each :meth:`call`, until it succeeds; return its outcome.

        ``deadline`` is a time of the event loop. ``watch_client`` is called if the request has to wait; its future is
        done when the client is gone. Raises :class:`ApiError` 503 at the deadline, or at once if too many wait, and
        :class:`ClientGoneError`.
        """
        outcome = attempt()
        if not isinstance(outcome, NoWorker):
            return outcome
        if len(self._calls) >= self._max_waiting:
            raise no_worker(f"{outcome.reason}, and {len(self._calls)} requests wait for one already")
        loop = asyncio.get_running_loop()
        gone = watch_client()
        while isinstance(outcome, NoWorker):
            left_seconds = deadline - loop.time()
            if left_seconds <= 0.0 or self._closed:
                raise no_worker(outcome.reason)
            await self._next_call(gone, left_seconds)
            outcome = attempt()
        return outcome

    def call(self) -> None:
        """Have all that wait try again: a worker has come."""
        for waiting in self._calls:
            if not waiting.done():
                waiting.set_result(None)

    def close(self) -> None:
        """No worker will come: nobody waits any longer."""
        self._closed = True
        self.call()

    async def _next_call(self, gone: asyncio.Future[None], seconds: float) -> None:
        called = asyncio.get_running_loop().create_future()
        self._calls.add(called)
        self._metrics.requests_waiting.set(len(self._calls))
        try:
            await asyncio.wait((called, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._calls.discard(called)
            self._metrics.requests_waiting.set(len(self._calls))
        if gone.done():
            raise ClientGoneError


def no_worker(reason: str) -> ApiError:
    return ApiError(503, f"{reason}: try again", code="no_worker", retry_after_seconds=RETRY_AFTER_SECONDS)
