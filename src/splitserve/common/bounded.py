"""Small memories with a bound in number and in time. Time comes in as an argument."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ExpiringMap(Generic[K, V]):
    """Keeps what was put in for ``ttl_seconds``, and at most ``max_size`` entries: the oldest goes first."""

    def __init__(self, *, max_size: int, ttl_seconds: float) -> None:
        self._max_size = max_size
        self._ttl_seconds = ttl_seconds
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def put(self, key: K, value: V, now: float) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (now + self._ttl_seconds, value)
        self.expire(now)
        while len(self._entries) > self._max_size:
            self._entries.popitem(last=False)

    def pop(self, key: K, now: float) -> V | None:
        """The value, which is forgotten with this; None if it was never there or has expired."""
        self.expire(now)
        entry = self._entries.pop(key, None)
        return entry[1] if entry else None

    def get(self, key: K, now: float) -> V | None:
        self.expire(now)
        entry = self._entries.get(key)
        return entry[1] if entry else None

    def take_all(self) -> list[V]:
        """Remove and return all values, also expired ones that haven't been removed yet."""
        values = [value for _, value in self._entries.values()]
        self._entries.clear()
        return values

    def expire(self, now: float) -> None:
        while self._entries:
            key = next(iter(self._entries))
            if self._entries[key][0] > now:
                return
            del self._entries[key]

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
