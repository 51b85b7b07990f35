"""Connectors that stand for the ranks of a tensor-parallel worker, in one process; and such a process to read from."""

import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.connector import NixlConnector
from splitserve.kvconnector.ranks.transfers import RankedConnector, RankTransfers
from splitserve.kvconnector.transfer import gather
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.handover.reads import Readers
from splitserve.protocol.memory_records import LayoutRecord, MemoryKind
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party

NUM_BLOCKS = 40
FIRST_GENERATION = 7000
SOURCE = Party("prefill-0", 11)
SETTINGS = ReadSettings.of(
    MemoryKind.DRAM, staging_bytes=1 << 15, split_bytes=1 << 14, gather_slots=3, gather_slot_bytes=1 << 13
)  # several rounds, two threads


def layout_of(num_heads: int, num_ranks: int) -> LayoutRecord:
    return LayoutRecord("m", "w", "float32", 4, 3, num_heads, 8, tensor_parallel_size=num_ranks)


def content(block_id: int, layout: LayoutRecord, rank: int) -> torch.Tensor:
    """``[layer, heads of the rank, 2, token, head_dim]``: a number that says which block, layer and head it is of."""
    layers = torch.arange(layout.num_layers).view(-1, 1, 1, 1, 1) * 100
    heads = torch.tensor(list(layout.block_layout.heads(rank))).view(1, -1, 1, 1, 1)
    rest = torch.arange(2 * layout.block_size * layout.head_dim).view(1, 1, 2, layout.block_size, layout.head_dim) / 128
    return (block_id * 1000 + layers + heads + rest).float()


class RankedWorker:
    """All ranks of one worker; ``connector`` is what its engine loop would have. ``wake`` is called for rank 0's
    events; ``channels`` have those of the others."""

    def __init__(self, me: Party, layout: LayoutRecord, wake: Callable[[], None], settings: ReadSettings = SETTINGS):
        self.layout = layout
        self.memories = [KVMemory(layout, NUM_BLOCKS) for _ in range(layout.tensor_parallel_size)]
        self.channels, self.threads = [], []
        for rank in range(1, layout.tensor_parallel_size):
            ours, theirs = Pipe()
            self.channels.append(ours)
            self.threads.append(threading.Thread(target=self._run_rank, args=(me, rank, settings, theirs)))
            self.threads[-1].start()
        local = NixlConnector(me, self.memories[0], wake, settings=settings)
        self.connector = RankedConnector(local, self.channels)

    def _run_rank(self, me: Party, rank: int, settings: ReadSettings, channel: Connection) -> None:
        memory = self.memories[rank]
        RankTransfers(lambda wake: NixlConnector(me, memory, wake, rank=rank, settings=settings), channel).run()

    def fill(self) -> None:
        for rank, memory in enumerate(self.memories):
            for block_id in range(NUM_BLOCKS):
                memory.blocks[block_id] = content(block_id, self.layout, rank)
        self.memories[0].generations[:] = FIRST_GENERATION + np.arange(NUM_BLOCKS, dtype=np.uint64)

    def welcome(self) -> PeerWelcome:
        served = self.connector.served()
        return PeerWelcome(self.layout, served.connector, list(served.generations_addresses), list(served.ranks))

    def close(self) -> None:
        self.connector.close()
        for thread in self.threads:
            thread.join(10.0)
            assert not thread.is_alive()


def serve_ranks(pipe: Connection) -> None:
    """Workers to read from. ("start", heads, ranks) answers with a :class:`PeerWelcome`; ("take", heads, ranks, block)
    rewrites a block on the last rank; None ends it. For all workers, ("lease", milliseconds, 0) sets how long slots are
    kept, and ("deaf", 0, 0) that readers' requests for them are not heard."""
    workers: dict[tuple[int, int], RankedWorker] = {}
    while (command := pipe.recv()) is not None:
        name, num_heads, num_ranks, *block_ids = command
        if name in ("lease", "deaf"):
            if name == "lease":
                gather.LEASE_SECONDS = num_heads / 1e3
            else:
                gather.GatherSource.hear = lambda self, message: None
            pipe.send(b"")
            continue
        if name == "start":
            worker = RankedWorker(SOURCE, layout_of(num_heads, num_ranks), lambda: None)
            worker.fill()
            worker.connector.serve(Readers.READING)
            workers[num_heads, num_ranks] = worker
        for block_id in block_ids:
            worker = workers[num_heads, num_ranks]
            worker.memories[0].generations[block_id] += 1
            worker.memories[-1].blocks[block_id].fill_(-1.0)
        pipe.send(msgspec.msgpack.encode(workers[num_heads, num_ranks].welcome()))
    for worker in workers.values():
        worker.close()
