"""A process with blocks to read, and a reader of this process: what the tests of NIXL share. Not a test module."""

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from forked_processes import fork_context
from nixl_source import NUM_BLOCKS, PATTERN, SOURCE, make_memory, serve_blocks
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.connector import NixlConnector
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party
from stopping import stop_process
from waiting import PATIENCE_SECONDS

ME = Party("decode-0", 22)


class Source:
    """The process that is read from."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        context = fork_context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve_blocks, args=(theirs, num_blocks), daemon=True)
        self.process.start()
        theirs.close()
        self.welcome: PeerWelcome = receive(self.pipe)

    def tell(self, command: str) -> None:
        self.pipe.send(command)
        assert receive(self.pipe) == "done"

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        if number == signal.SIGSTOP:
            stop_process(self.process.pid)
        else:
            os.kill(self.process.pid, number)

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send("end")
            self.process.join(PATIENCE_SECONDS)
        self.process.kill()
        self.process.join(PATIENCE_SECONDS)
        self.pipe.close()


def receive(pipe: "Connection[object, object]") -> object:
    assert pipe.poll(2 * PATIENCE_SECONDS), "the source process doesn't answer"
    return pipe.recv()


class Reader:
    """A connector of this process, with the events that came out of it."""

    def __init__(self, me: Party = ME, num_blocks: int = NUM_BLOCKS, settings: ReadSettings | None = None) -> None:
        self.memory: KVMemory = make_memory(num_blocks)
        self.woken = threading.Event()
        self.connector = NixlConnector(me, self.memory, self.woken.set, settings=settings)
        self.events: list[ReadResult | PeerConnected] = []

    def wait(self, is_done: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
        deadline = time.monotonic() + seconds
        while not is_done() and time.monotonic() < deadline:
            self.woken.wait(0.05)
            self.woken.clear()
            self.events += self.connector.events()
        return is_done()

    def connect(self, source: Source, peer: Party = SOURCE) -> None:
        self.connector.connect(peer, source.welcome)
        assert self.wait(lambda: bool(self._connected(peer))), self.events
        (event,) = self._connected(peer)
        assert event.error is None, event.error
        self.events.remove(event)

    def _connected(self, peer: Party) -> list[PeerConnected]:
        return [event for event in self.events if isinstance(event, PeerConnected) and event.peer == peer]

    def result(self, read_id: int, seconds: float = PATIENCE_SECONDS) -> ReadResult | None:
        self.wait(lambda: any(isinstance(e, ReadResult) and e.read_id == read_id for e in self.events), seconds)
        found = [e for e in self.events if isinstance(e, ReadResult) and e.read_id == read_id]
        assert len(found) <= 1, "a read ended twice"
        return found[0] if found else None

    def read(self, read_id: int, local: list[int], remote: list[int], peer: Party = SOURCE) -> None:
        self.connector.read(ReadCommand(read_id, peer, local, remote))

    def assert_holds(self, local: list[int], remote: list[int]) -> None:
        for local_id, remote_id in zip(local, remote, strict=True):
            assert bool((self.memory.blocks[local_id] == PATTERN + remote_id).all()), (local_id, remote_id)


def changed(welcome: PeerWelcome, **changes: object) -> PeerWelcome:
    """With other facts about the memory of its only rank."""
    (rank,) = welcome.ranks
    ours = {name: value for name, value in changes.items() if name == "generations_addresses"}
    of_rank = {name: value for name, value in changes.items() if name == "metadata"}
    of_region = {name: value for name, value in changes.items() if name not in ours | of_rank}
    region = msgspec.structs.replace(rank.region, **of_region)
    return msgspec.structs.replace(welcome, ranks=[msgspec.structs.replace(rank, regions=[region], **of_rank)], **ours)
