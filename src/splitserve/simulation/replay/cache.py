"""The prefix cache of a replayed worker: names of blocks on its device and in its host tier."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.protocol.kv_event_batch import DEVICE, KVEvent

HOST = "host"


@dataclass(frozen=True, slots=True)
class CacheMatch:
    """Leading blocks that are here; ``num_host_blocks`` of them only in the host tier."""

    num_blocks: int = 0
    num_host_blocks: int = 0


class ReplayCache:
    """Least recently used blocks leave the device for the host tier, and that for good. Changes are noted as events."""

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        self._device_blocks = device_blocks
        self._host_blocks = host_blocks
        self._device: OrderedDict[bytes, None] = OrderedDict()
        self._host: OrderedDict[bytes, None] = OrderedDict()
        self._events: list[KVEvent] = []

    def match(self, blocks: Sequence[bytes]) -> CacheMatch:
        """Return the match of a prompt's blocks."""
        num_blocks = num_host_blocks = 0
        for block in blocks:
            if block not in self._device:
                if block not in self._host:
                    break
                num_host_blocks += 1
            num_blocks += 1
        return CacheMatch(num_blocks, num_host_blocks)

    def add(self, blocks: Sequence[bytes], num_used: int = 0) -> None:
        """Keep blocks, the last ones as the first to leave. ``num_used`` blocks of the device are in use otherwise."""
        stored = []
        for block in reversed(blocks):
            if block in self._device:
                self._device.move_to_end(block)
            else:
                self._device[block] = None
                stored.append(block)
        if stored:
            self._events.append(KVEvent("stored", DEVICE, stored[::-1]))
        self.shrink(num_used)

    def shrink(self, num_used: int) -> None:
        """Let blocks leave the device until ``num_used`` others fit."""
        leaving = []
        while len(self._device) > max(0, self._device_blocks - num_used):
            leaving.append(self._device.popitem(last=False)[0])
        if leaving:
            self._to_host(leaving)
            self._events.append(KVEvent("evicted", DEVICE, leaving))

    def take_events(self) -> list[KVEvent]:
        """Return the changes since the last call."""
        events, self._events = self._events, []
        return events

    def _to_host(self, blocks: list[bytes]) -> None:
        if not self._host_blocks:
            return
        fresh = [block for block in blocks if block not in self._host]
        for block in blocks:
            self._host[block] = None
            self._host.move_to_end(block)
        dropped = []
        while len(self._host) > self._host_blocks:
            dropped.append(self._host.popitem(last=False)[0])
        self._events.append(KVEvent("stored", HOST, fresh))
        if dropped:
            self._events.append(KVEvent("evicted", HOST, dropped))
