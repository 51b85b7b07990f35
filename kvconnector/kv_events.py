"""What can be found where, as it changes: the record that KV events are made of. No I/O.

Specified in docs/guides/kv-events.md.
"""

from collections.abc import Sequence
from typing import Literal

from splitserve.kv_event_batch import KVEvent


class KVEvents:
    """Hears of what changes. This class itself is the null object: it keeps nothing."""

    def stored(self, tier: str, hashes: Sequence[bytes]) -> None:
        """``tier`` holds these blocks."""

    def evicted(self, tier: str, hashes: Sequence[bytes]) -> None:
        """``tier`` holds these blocks no longer."""

    def take(self) -> list[KVEvent]:
        """What changed since the last call."""
        return []


class KVEventLog(KVEvents):
    """Keeps events until :meth:`take`; adjacent ones of a kind and a tier become one."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def stored(self, tier: str, hashes: Sequence[bytes]) -> None:
        self._add("stored", tier, hashes)

    def evicted(self, tier: str, hashes: Sequence[bytes]) -> None:
        self._add("evicted", tier, hashes)

    def _add(self, kind: Literal["stored", "evicted"], tier: str, hashes: Sequence[bytes]) -> None:
        if not hashes:
            return
        last = self._events[-1] if self._events else None
        if last is not None and (last.kind, last.tier) == (kind, tier):
            last.hashes.extend(hashes)
        else:
            self._events.append(KVEvent(kind, tier, list(hashes)))

    def take(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events
