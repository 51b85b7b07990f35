"""Ranks' events: rank 0 may send any number of commands before it receives one, and all arrive, in order."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from splitserve.kvconnector.ranks.event_sender import DIRECT_BYTES, EventSender
from splitserve.kvconnector.ranks.transfers import RankedConnector, RankTransfers
from splitserve.kvconnector.transfer.connector import PeerConnected, ServedMemory
from splitserve.protocol.handover.reads import ReadCommand, Readers, ReadResult
from splitserve.protocol.memory_records import MemoryKind, MemoryRegion, RankMemory
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party
from waiting import PATIENCE_SECONDS

SOURCE = Party("prefill-0", 11)
NUM_READS, NUM_BLOCKS = 600, 64  # more than the two sockets' buffers hold


class InstantConnector:
    """A connector without memory, whose reads end at once."""

    name = "instant"
    awaits_beside_steps = True

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._results: deque[ReadResult] = deque()

    def served(self) -> ServedMemory:
        return ServedMemory(self.name, [1], [RankMemory(b"", [MemoryRegion(MemoryKind.DRAM, 0, 1, 1, 1)])])

    def connect(self, peer: Party, welcome: PeerWelcome) -> None:
        pass

    def disconnect(self, peer: Party) -> None:
        pass

    def read(self, command: ReadCommand, *, awaited: bool = False) -> None:
        self._results.append(ReadResult(command.read_id, None, [2**62] * len(command.remote_blocks)))
        self._wake()

    def is_landing(self) -> bool:
        return False

    def leave(self) -> None:
        pass

    def serve(self, readers: Readers) -> None:
        pass

    def events(self) -> list[ReadResult | PeerConnected]:
        results: list[ReadResult | PeerConnected] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def close(self) -> None:
        pass


def test_many_reads_are_commanded_before_a_result_is_received() -> None:
    ours, theirs = Pipe()
    rank = threading.Thread(target=lambda: RankTransfers(InstantConnector, theirs).run(), daemon=True)
    rank.start()
    connector = RankedConnector(InstantConnector(lambda: None), [ours])
    results: list[ReadResult | PeerConnected] = []

    def read() -> None:
        for read_id in range(NUM_READS):
            connector.read(ReadCommand(read_id, SOURCE, range(NUM_BLOCKS), range(NUM_BLOCKS)))
        while len(results) < NUM_READS:
            results.extend(connector.events())

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(PATIENCE_SECONDS)
    assert not reading.is_alive(), "rank 0 and the other rank wait for each other"
    assert [result.read_id for result in results if isinstance(result, ReadResult)] == list(range(NUM_READS))
    connector.close()
    rank.join(PATIENCE_SECONDS)
    assert not rank.is_alive()


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.timeout(PATIENCE_SECONDS)
def test_no_event_overtakes_another_one(ends: tuple[Connection, Connection]) -> None:
    """Long ones and those that find no room are sent by another thread than short ones."""
    rank_0, channel = ends
    sender = EventSender(channel)
    events = [bytes([number]) * (10 if number % 4 else 2 * DIRECT_BYTES) for number in range(200)]
    for event in events[:190]:
        sender.send(event)
    received = [rank_0.recv_bytes() for _ in range(150)]
    for event in events[190:]:
        sender.send(event)
    received += [rank_0.recv_bytes() for _ in range(50)]
    assert received == events
    sender.close(PATIENCE_SECONDS)


@pytest.mark.timeout(PATIENCE_SECONDS)
def test_events_that_nobody_receives_end_with_rank_0(ends: tuple[Connection, Connection]) -> None:
    rank_0, channel = ends
    sender = EventSender(channel)
    for _ in range(100):
        sender.send(bytes(2 * DIRECT_BYTES))
    rank_0.close()
    sender.close(2 * PATIENCE_SECONDS)  # more than this test may take
