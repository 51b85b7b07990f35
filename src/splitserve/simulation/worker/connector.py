"""The description of a simulated worker's memory, from which its production core is built."""

from dataclasses import dataclass, field

from splitserve.kvconnector.transfer.connector import ServedMemory
from splitserve.protocol.memory_records import HostTierMemory, LayoutRecord, MemoryKind, MemoryRegion, RankMemory
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party
from splitserve.simulation.model import LAYOUT


@dataclass
class SimConnector:
    """The part of a KV connector that a core needs at its start; :class:`SimReader` does the reads."""

    me: Party
    num_blocks: int
    name: str = "sim"
    layout: LayoutRecord = field(default=LAYOUT)
    num_slots: int = 0  # of the host tier; 0: there is none

    def served(self) -> ServedMemory:
        """Return the memory that peers may read."""
        region = MemoryRegion(MemoryKind.DRAM, 0, 0x1000, self.num_blocks, self.layout.block_bytes)
        num_groups = len(self.layout.cache.groups)
        host = None
        if self.num_slots:
            slots = MemoryRegion(MemoryKind.DRAM, 0, 0x1000, self.num_slots, LAYOUT.block_bytes)
            host = HostTierMemory(slots, 0x1000)
        rank = RankMemory(str(self.me).encode(), [region] * num_groups, host=host)
        return ServedMemory(self.name, [0x1000] * num_groups, [rank])

    def welcome(self) -> PeerWelcome:
        """Return the welcome that a peer gets."""
        served = self.served()
        return PeerWelcome(self.layout, served.connector, list(served.generations_addresses), list(served.ranks))
