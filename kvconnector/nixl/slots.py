"""Reads from a peer's host tier: from host memory there into local blocks, wherever they are. Used by one thread
only."""

from collections.abc import Callable, Iterator

import numpy as np

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.agent import HERE, Agent, BlockIds, PreparedList
from splitserve.kvconnector.transfer.device_copies import Done, Pending
from splitserve.kvconnector.transfer.read_plan import region_rows
from splitserve.kvconnector.transfer.staging import Staging
from splitserve.protocol.cache_layout import HeadSpan
from splitserve.protocol.memory_records import HostTierMemory, MemoryKind

LANDING_BYTES = 64 << 20


class _Until:
    """Pending operation that ends when a condition holds."""

    due_at = 0.0

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over

    def is_done(self) -> bool:
        return self._is_over()


class HostSlotReader:
    """Reader of whole slots of one peer.

    ``lands_first``: slots land in local pinned memory and are copied from there to the device; None: chosen by the kind
    of local memory. Raises NIXL's exceptions if the peer hasn't registered the memory that it declared.
    """

    def __init__(
        self, agent: Agent, memory: KVMemory, host: HostTierMemory, remote_name: str, lands_first: bool | None = None
    ) -> None:
        self._agent = agent
        self._memory = memory
        self._remote = agent.prepare(remote_name, MemoryKind.DRAM, region_rows(host.slots))
        self._lands_first = memory.kind is MemoryKind.VRAM if lands_first is None else lands_first
        self._landing: Staging | None = None
        self._places: PreparedList | None = None
        self._is_free = True

    def read(self, local_blocks: PreparedList, local: BlockIds, slots: BlockIds) -> Iterator[Pending]:
        """Yield the steps of a read of ``slots`` into local blocks ``local``."""
        if not self._lands_first:
            yield self._agent.read_prepared(local_blocks, local, self._remote, slots)
            return
        yield _Until(lambda: self._is_free)  # one after another: they share the landing area
        self._is_free = False
        try:
            yield from self._read_through(*self._prepared(), local, slots)
        finally:
            self._is_free = True

    def wait(self) -> None:
        """Wait until no copy is in flight."""
        if self._landing is not None:
            self._landing.wait()

    def _prepared(self) -> tuple[Staging, PreparedList]:
        if self._landing is None or self._places is None:
            half_bytes = max(LANDING_BYTES // 2, self._memory.block_bytes)
            self._landing = Staging(self._memory, self._memory.layout.block_layout, half_bytes, on_host=True)
            region = self._landing.region()
            self._agent.register(region.kind, region.blocks_address, region.num_bytes)
            self._places = self._agent.prepare(HERE, region.kind, region_rows(region))
        return self._landing, self._places

    def _read_through(
        self, landing: Staging, places: PreparedList, local: BlockIds, slots: BlockIds
    ) -> Iterator[Pending]:
        """Read into one half while the other is copied to the device."""
        size, whole = landing.slots_per_half, HeadSpan(0, 0, 0, self._memory.layout.block_layout.heads_per_rank())
        copies: list[Pending] = [Done(), Done()]
        for number, first in enumerate(range(0, len(slots), size)):
            half, part = number % 2, slots[first : first + size]
            yield copies[half]
            into = np.arange(half * size, half * size + len(part), dtype=np.int32)
            yield self._agent.read_prepared(places, into, self._remote, part)
            copies[half] = landing.scatter_pieces(half, local[first : first + size].tolist(), whole)
        yield from copies
