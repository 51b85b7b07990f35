"""A process with a cache of two groups to read from. Commands come over a pipe: a group and a block to rewrite."""

from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.connector import NixlConnector
from splitserve.protocol.cache_layout import CacheGroup, Field, GroupKind
from splitserve.protocol.handover.reads import Readers
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party

SOURCE = Party("prefill-0", 11)
NUM_BLOCKS = (12, 7)
FIRST_GENERATIONS = (1000, 5000)
FULL = CacheGroup(GroupKind.FULL, (0, 2), 4, (Field("kv", "float32", 2, 256),))
WINDOW = CacheGroup(
    GroupKind.WINDOW, (1, 3, 5), 4, (Field("kv", "float16", 2, 512), Field("scales", "float32", 2, 16)), 40
)


def make_memory(num_ranks: int = 1) -> KVMemory:
    layout = LayoutRecord("m", "w", "float32", 4, 5, 2, 8, num_ranks, groups=(FULL, WINDOW))
    return KVMemory(layout, NUM_BLOCKS)


def fill(memory: KVMemory) -> None:
    for group, blocks in enumerate(memory.groups):
        numbers = np.random.default_rng(group).integers(0, 256, blocks.bytes.shape, dtype=np.uint8)
        blocks.bytes.copy_(torch.from_numpy(numbers))
        blocks.generations[:] = FIRST_GENERATIONS[group] + np.arange(blocks.num_blocks, dtype=np.uint64)


def serve_groups(pipe: Connection) -> None:
    memory = make_memory()
    fill(memory)
    connector = NixlConnector(SOURCE, memory, lambda: None)
    connector.serve(Readers.READING)
    served = connector.served()
    welcome = PeerWelcome(memory.layout, served.connector, list(served.generations_addresses), list(served.ranks))
    pipe.send_bytes(msgspec.msgpack.encode(welcome))
    while command := pipe.recv():  # None ends it
        group, block_id = command
        memory.groups[group].generations[block_id] += 1
        pipe.send("done")
    connector.close()
