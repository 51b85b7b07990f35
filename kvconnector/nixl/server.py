"""The serving thread of a NIXL connector: the agent that peers read through."""

from splitserve.kvconnector.cuda.memory import export, make_context_current
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.agent import Agent
from splitserve.kvconnector.transfer.gather import GatherSource, NoGathers
from splitserve.kvconnector.transfer.owner_thread import OwnerThread
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.handover.reads import Readers
from splitserve.protocol.memory_records import (
    GatherMemory,
    HostTierMemory,
    MappableMemory,
    MemoryKind,
    RankMemory,
    SharedTable,
)

_IDLE_FACTOR = 10  # polls are so much rarer while peers only connect: a core would spend 6% on the usual ones


class NixlServer(OwnerThread):
    """Owner of the agent that peers read through, and of the slots gathered for them; polls while there are
    ``readers``."""

    def __init__(self, name: str, memory: KVMemory, settings: ReadSettings, host: HostTierMemory | None = None) -> None:
        super().__init__("nixl-serve", settings.serve_poll_seconds)
        self.readers = Readers.NONE
        self._gather_poll_seconds = settings.poll_seconds
        self._device = memory.device
        self._agent = Agent(f"serve/{name}")
        regions = [group.region() for group in memory.groups]
        for group, region in zip(memory.groups, regions, strict=True):
            self._agent.register(region.kind, region.blocks_address, region.num_bytes, region.device_id)
            self._agent.register(MemoryKind.DRAM, group.generations_address, group.num_blocks * 8)
        self._gather: GatherSource | NoGathers = NoGathers()
        gather: GatherMemory | None = None
        mappable: list[MappableMemory] = []
        generations: SharedTable | None = None
        if memory.layout.cache.is_simple:
            self._gather = GatherSource(memory, settings.gather_slots, settings.gather_slot_bytes)
            gather = self._gather.region()
            num_bytes = gather.slots.num_bytes
            self._agent.register(gather.slots.kind, gather.slots.blocks_address, num_bytes, gather.slots.device_id)
            self._agent.register(MemoryKind.DRAM, gather.tickets_address, gather.slots.num_blocks * 8)
            mappable = export(memory.bytes, self._gather.memory)
            generations = memory.groups[0].table.record()
        if host is not None:
            num_bytes = host.slots.num_bytes
            self._agent.register(MemoryKind.DRAM, host.slots.blocks_address, num_bytes)
            self._agent.register(MemoryKind.DRAM, host.generations_address, host.slots.num_blocks * 8)
        self.served = RankMemory(self._agent.metadata(), regions, gather, host, mappable, generations)

    @property
    def is_busy(self) -> bool:
        return self.readers is not Readers.NONE

    @property
    def poll_seconds(self) -> float:
        if self._gather.is_wanted:
            return self._gather_poll_seconds
        return super().poll_seconds * (1 if self.readers is Readers.READING else _IDLE_FACTOR)

    def begin(self) -> None:
        make_context_current(self._device)
        self._gather.prepare()

    def poll(self) -> None:
        if self.is_busy:
            for message in self._agent.progress():
                self._gather.hear(message)
            self._gather.poll()

    def finish(self) -> None:
        self._agent.destroy()
        self._gather.wait()
