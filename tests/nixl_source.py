"""A process whose KV blocks others read: block ``b`` is filled with ``PATTERN + b``. Commands come over a pipe."""

from multiprocessing.connection import Connection

from splitserve.kvconnector.memory import KVMemory
from splitserve.messages import LayoutRecord, PeerWelcome
from splitserve.request import Party

LAYOUT = LayoutRecord("demo", "w", "float32", 16, 4, 2, 32)  # 32 KiB per block
NUM_BLOCKS = 64
SOURCE = Party("prefill-0", 11)
PATTERN = 1000.0
FIRST_GENERATION = 2**63 + 5


def make_memory(num_blocks: int = NUM_BLOCKS) -> KVMemory:
    return KVMemory(LAYOUT, num_blocks)


def serve_blocks(pipe: Connection, num_blocks: int) -> None:
    """Sends its :class:`PeerWelcome`; "serve"/"rest" switch polling, "take B" rewrites a block, "end" ends it."""
    from splitserve.kvconnector.nixl import NixlConnector

    memory = make_memory(num_blocks)
    for block_id in range(num_blocks):
        memory.blocks[block_id].fill_(PATTERN + block_id)
        memory.generations[block_id] = FIRST_GENERATION + block_id
    connector = NixlConnector(SOURCE, memory, lambda: None)
    connector.serve(True)
    served = connector.served()
    pipe.send(PeerWelcome(LAYOUT, served.connector, served.generations_address, list(served.ranks)))
    while (command := pipe.recv()) != "end":
        if command in ("serve", "rest"):
            connector.serve(command == "serve")
        else:
            block_id = int(command)
            memory.generations[block_id] += 1
            memory.blocks[block_id].fill_(-1.0)
        pipe.send("done")
    connector.close()
