"""Updates of the requests behind one HTTP request, from the dispatcher to the task that answers the client."""

import asyncio
import sys
from collections.abc import Callable

from splitserve.router.requests.state import Update


class Inbox:
    """A queue with one reader. Its length while the client is slow is bounded by the requests' max_tokens.

    ``on_end`` is called once for each request, when its last update is put. Updates of requests that the reader doesn't
    know are kept: it knows the first ``num_known`` from the beginning, others after :meth:`introduce`.
    """

    def __init__(self, num_known: int = sys.maxsize) -> None:
        self._num_known = num_known
        self._updates: list[tuple[int, Update]] = []
        self._early: list[tuple[int, Update]] = []  # of requests that the reader doesn't know yet
        self._waiter: asyncio.Future[None] | None = None
        self.on_end: Callable[[], None] | None = None

    def put(self, index: int, update: Update) -> None:
        self._add(index, update)
        if update.ended and self.on_end is not None:
            self.on_end()

    def introduce(self, num_known: int) -> None:
        """Let the reader take the updates of the first ``num_known`` requests, those that have come among them."""
        self._num_known = num_known
        early, self._early = self._early, []
        for index, update in early:
            self._add(index, update)

    def _add(self, index: int, update: Update) -> None:
        if index >= self._num_known:
            self._early.append((index, update))
            return
        self._updates.append((index, update))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[tuple[int, Update]]:
        """Return all updates since the last call, in order, each with its request's index; wait for the first."""
        if not self._updates:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        updates, self._updates = self._updates, []
        return updates
