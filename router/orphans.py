"""Attempts that a lost worker may still compute: aborted, should its link come up again. Pure."""

from splitserve.bounded import ExpiringMap
from splitserve.request import Party, RequestKey
from splitserve.router.membership import MAX_WORKERS


class Orphans:
    """Remembered for ``ttl_seconds`` from the worker's last one on: a worker that is gone for longer has ended them."""

    def __init__(self, ttl_seconds: float) -> None:
        self._keys: ExpiringMap[Party, list[RequestKey]] = ExpiringMap(max_size=MAX_WORKERS, ttl_seconds=ttl_seconds)

    def add(self, worker: Party, key: RequestKey, now: float) -> None:
        self._keys.put(worker, [*(self._keys.get(worker, now) or ()), key], now)

    def take(self, worker: Party, now: float) -> list[RequestKey]:
        """Return those of a worker that is back, and forget them."""
        return self._keys.pop(worker, now) or []
