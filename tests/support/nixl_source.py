"""A process whose KV blocks others read: block ``b`` is filled with ``PATTERN + b``; slots of its host tier count on.
Commands come over a pipe."""

from multiprocessing.connection import Connection

import numpy as np

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory
from splitserve.protocol.handover.reads import Readers
from splitserve.protocol.memory_records import HostTierMemory, LayoutRecord, MemoryKind, MemoryRegion
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party

LAYOUT = LayoutRecord("demo", "w", "float32", 16, 4, 2, 32)  # 32 KiB per block
NUM_BLOCKS = 64
NUM_SLOTS = 16
SOURCE = Party("prefill-0", 11)
PATTERN = 1000.0
FIRST_GENERATION = 2**63 + 5


def make_memory(num_blocks: int = NUM_BLOCKS) -> KVMemory:
    return KVMemory(LAYOUT, num_blocks)


def serve_blocks(pipe: Connection, num_blocks: int) -> None:
    """Sends its :class:`PeerWelcome`; "serve"/"rest" switch polling, "B" rewrites a block or a slot, "end" ends it."""
    from splitserve.kvconnector.nixl.connector import NixlConnector

    memory = make_memory(num_blocks)
    for block_id in range(num_blocks):
        memory.blocks[block_id].fill_(PATTERN + block_id)
        memory.generations[block_id] = FIRST_GENERATION + block_id
    host, generations = HostMemory(NUM_SLOTS * memory.block_bytes), np.zeros(NUM_SLOTS, dtype=np.uint64)
    slots = host.bytes.view(np.float32).reshape(NUM_SLOTS, -1)
    slots[:] = PATTERN + num_blocks + np.arange(NUM_SLOTS)[:, None]
    generations[:] = FIRST_GENERATION + num_blocks + np.arange(NUM_SLOTS, dtype=np.uint64)
    region = MemoryRegion(MemoryKind.DRAM, 0, host.address, NUM_SLOTS, memory.block_bytes)
    served_host = HostTierMemory(region, int(generations.ctypes.data))
    connector = NixlConnector(SOURCE, memory, lambda: None, host=served_host)
    connector.serve(Readers.READING)
    served = connector.served()
    pipe.send(PeerWelcome(LAYOUT, served.connector, list(served.generations_addresses), list(served.ranks)))
    while (command := pipe.recv()) != "end":
        if command in ("serve", "rest"):
            connector.serve(Readers.READING if command == "serve" else Readers.NONE)
        else:
            block_id = int(command)
            if block_id < num_blocks:
                memory.generations[block_id] += 1
                memory.blocks[block_id].fill_(-1.0)
            else:
                generations[block_id - num_blocks] += 1
                slots[block_id - num_blocks] = -1.0
        pipe.send("done")
    connector.close()
