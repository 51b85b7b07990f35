"""Record of stored and evicted blocks by tier, from which KV events are made. No I/O.

Specified in docs/guides/kv-events.md.
"""

from collections.abc import Sequence
from typing import Literal

from splitserve.protocol.kv_event_batch import KVEvent


class KVEvents:
    """Interface of the record, and its null object: it keeps no events."""

    def stored(self, tier: str, hashes: Sequence[bytes]) -> None:
        """Record that ``tier`` holds these blocks."""

    def evicted(self, tier: str, hashes: Sequence[bytes]) -> None:
        """Record that ``tier`` no longer holds these blocks."""

    def take(self) -> list[KVEvent]:
        """Return the events since the last call."""
        return []


class KVEventLog(KVEvents):
    """Record that keeps events until :meth:`take`; adjacent events of one kind and one tier are merged."""

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
