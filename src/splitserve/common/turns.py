"""Pieces of work on an event loop, one per turn of it, so that the loop looks at its sockets between them.

A burst of requests otherwise has all its pieces of work in one turn, while what has come for the requests that wait
longest stays in the sockets. For use on the loop's thread.
"""

import asyncio
import heapq
import itertools


class Turns:
    """Order of the pieces of work that are ready: what belongs to the earliest request comes first."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_taken = False
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def take(self, arrived_at: float) -> None:
        """Return when a piece of work may begin, for a request that arrived at this time. At once if it is the only
        one."""
        if not self._is_taken:
            self._is_taken = True
            self._loop.call_soon(self._next)
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        heapq.heappush(self._waiting, (arrived_at, next(self._numbers), waiter))
        await waiter

    def _next(self) -> None:
        while self._waiting:
            waiter = heapq.heappop(self._waiting)[2]
            if not waiter.done():  # else its task was cancelled
                waiter.set_result(None)
                self._loop.call_soon(self._next)
                return
        self._is_taken = False
