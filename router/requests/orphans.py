"""Attempts that a lost worker may still compute; they are aborted if it is linked again. Pure."""

from splitserve.common.bounded import ExpiringMap
from splitserve.protocol.request import Party, RequestKey
from splitserve.router.links.membership import MAX_WORKERS


class Orphans:
    """Orphaned attempts, kept for ``ttl_seconds`` after a worker's last one: by then a lost worker has ended them."""

    def __init__(self, ttl_seconds: float) -> None:
        self._keys: ExpiringMap[Party, list[RequestKey]] = ExpiringMap(max_size=MAX_WORKERS, ttl_seconds=ttl_seconds)

    def add(self, worker: Party, key: RequestKey, now: float) -> None:
        keys = self._keys.get(worker, now) or []
        keys.append(key)
        self._keys.put(worker, keys, now)

    def take(self, worker: Party, now: float) -> list[RequestKey]:
        """Return the orphans of a worker that is back, and forget them."""
        return self._keys.pop(worker, now) or []
