"""Reads through a mapping that the commanding thread waits for; what it can't do itself is the reading thread's."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Event, Lock, Thread
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import torch
from msgspec.structs import replace

from host_driver import STREAM, reader_of, stand_in_for_cuda
from splitserve.kvconnector.cuda.batch_copies import CopyBatch
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.shape import runs
from splitserve.kvconnector.mapped import awaited as awaited_reads
from splitserve.kvconnector.mapped import reads as mapped_reads
from splitserve.kvconnector.mapped.awaited import AwaitedReads
from splitserve.kvconnector.nixl.connector import NixlConnector, _Peer
from splitserve.kvconnector.ranks import transfers
from splitserve.kvconnector.ranks.transfers import RankedConnector, RankLeave, RankRead, RankServes
from splitserve.kvconnector.transfer.errors import TransferError
from splitserve.kvconnector.transfer.read_choice import ReadShape
from splitserve.kvconnector.transfer.read_cost import CopyCost, LinkCost, ReadCost
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.handover.reads import ReadCommand, ReadPath, ReadResult
from splitserve.protocol.memory_records import LayoutRecord, MemoryKind, MemoryRegion, RankMemory
from splitserve.protocol.request import Party
from waiting import PATIENCE_SECONDS

NUM_BLOCKS = 32
PEER, OTHER = Party("prefill-0", 1), Party("prefill-1", 2)
INTERPRETED = pytest.mark.skipif(
    Path("/dev/nvidiactl").exists(), reason="what stands for CUDA is for machines without a GPU"
)
LAYOUT = LayoutRecord("m", "w", "float32", 4, 3, 4, 2)


class Copies:
    """Copies through a mapping, as far as their end is concerned."""

    path = ReadPath.MAPPED
    started, queued_at, ended_at = 100.0, 100.0001, 100.0009

    def __init__(self, expected_at: float = 100.001) -> None:
        self.expected_at = expected_at
        self.state: bool | Exception = False

    def has_ended(self) -> bool:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0002)
    monkeypatch.setattr(awaited_reads, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def read_of(read_id: int, peer: Party = PEER) -> ReadCommand:
    return ReadCommand(read_id, peer, [1, 2], [7, 8])


def generations(ids: Sequence[int]) -> list[int]:
    return [1000 + block_id for block_id in ids]


def test_a_read_that_has_ended_has_its_generations_at_that_time(clock: SimpleNamespace) -> None:
    left = Mock()
    reads, copies, table = AwaitedReads(left), Copies(), {7: 1, 8: 1}
    assert reads.add(read_of(1), copies, lambda ids: [table[block_id] for block_id in ids])  # type: ignore[arg-type]
    assert reads.landed() == [] and reads
    table[8] = 2
    copies.state, clock.now = True, 100.005  # when the loop looks again
    (result,) = reads.landed()
    assert (result.read_id, result.error, result.generations, result.path) == (1, None, [1, 2], ReadPath.MAPPED)
    assert result.seconds == pytest.approx(0.0009) and result.stages.copied == pytest.approx(0.0009)
    assert not reads and not left.called


def test_a_read_of_which_copies_are_missing_or_that_takes_long_is_not_awaited(clock: SimpleNamespace) -> None:
    reads = AwaitedReads(Mock())
    unqueued = Copies()
    unqueued.queued_at = 0.0
    assert not reads.add(read_of(1), unqueued, generations)  # type: ignore[arg-type]
    assert not reads.add(read_of(1), Copies(clock.now + 0.0021), generations) and not reads  # type: ignore[arg-type]
    assert reads.add(read_of(1), Copies(clock.now + 0.0019), generations)  # type: ignore[arg-type]


def raises(error: Exception) -> Callable[[Sequence[int]], list[int]]:
    return Mock(side_effect=error)


@pytest.mark.parametrize("failure", ["the device", "the table", "late"])
def test_what_is_not_as_expected_is_left_to_the_reading_thread(failure: str, clock: SimpleNamespace) -> None:
    """Which meets the same error, and reports it."""
    left: list[tuple[ReadCommand, object]] = []
    reads, copies = AwaitedReads(lambda command, read: left.append((command, read))), Copies()
    table = raises(TransferError("the peer's process has ended")) if failure == "the table" else generations
    assert reads.add(read_of(1), copies, table)  # type: ignore[arg-type]
    if failure == "late":
        clock.now = copies.expected_at + 0.0004
        assert reads.landed() == [] and left == []
        clock.now = copies.expected_at + 0.0006
    else:
        copies.state = RuntimeError("CUDA error") if failure == "the device" else True
    assert reads.landed() == [] and left == [(read_of(1), copies)] and not reads


def test_one_peers_reads_are_left_alone_or_all(clock: SimpleNamespace) -> None:
    del clock
    left: list[int] = []
    reads = AwaitedReads(lambda command, _read: left.append(command.read_id))
    for read_id, peer in enumerate((PEER, OTHER, PEER)):
        assert reads.add(read_of(read_id, peer), Copies(), generations)  # type: ignore[arg-type]
    reads.leave(PEER)
    assert left == [0, 2] and reads
    reads.leave()
    assert left == [0, 2, 1] and not reads


def test_a_read_that_another_thread_looks_at_is_still_there(clock: SimpleNamespace) -> None:
    """Otherwise this thread would sleep, or destroy the reader of its peer before it's left to it."""
    del clock
    left: list[int] = []
    reads, looked_at, go_on = AwaitedReads(lambda command, _read: left.append(command.read_id)), Event(), Event()

    class Slow(Copies):
        def has_ended(self) -> bool:
            looked_at.set()
            return not go_on.wait(PATIENCE_SECONDS)

    assert reads.add(read_of(1), Slow(), generations)  # type: ignore[arg-type]
    are_there: list[bool] = []

    def stay_awake_then_leave() -> None:
        are_there.append(bool(reads))
        reads.leave()

    looks, leaves = Thread(target=reads.landed), Thread(target=stay_awake_then_leave)
    looks.start()
    assert looked_at.wait(PATIENCE_SECONDS)
    leaves.start()
    leaves.join(0.1)  # time to find nothing, if it doesn't wait
    go_on.set()
    looks.join()
    leaves.join()
    assert are_there == [True] and left == [1] and not reads


class Parts:
    """A connector whose only peer's memory is mapped, without threads: ``given`` is what these would get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = stand_in_for_cuda(monkeypatch)
        monkeypatch.setattr(awaited_reads, "_LATE_SECONDS", 60.0)  # a test may be held up
        self.source, self.memory = KVMemory(LAYOUT, NUM_BLOCKS), KVMemory(LAYOUT, NUM_BLOCKS)
        self.source.blocks.copy_(torch.randn_like(self.source.blocks))
        self.given: list[tuple[object, ...]] = []
        self.woken = 0
        connector = self.connector = object.__new__(NixlConnector)
        connector._settings, connector._lock, connector._split_reads = ReadSettings.of(MemoryKind.VRAM), Lock(), {}
        connector._memory, connector._checks_digests = self.memory, False
        connector._awaited = AwaitedReads(connector._leave)
        connector._events, connector._wake = deque(), self._note_wake
        thread = SimpleNamespace(read=lambda *part: self.given.append(part), submit=lambda command: command())
        thread.disconnect = partial(self._note, "disconnect")
        connector._threads = [thread]  # type: ignore[list-item]
        self.peer = _Peer(1, 1)
        connector._peers = {PEER: self.peer}
        self.peer.mapped, self.peer.generations = reader_of(self.memory, [self.source]), generations
        link = LinkCost(1e-5, 2e-6, 390e9)
        cost = ReadCost(LinkCost(2e-5, 5e-6, 270e9), CopyCost(2e-5, 1e12), None, link)
        self.peer.learn(ReadShape(True, 1, 32, 1 << 22, 1 << 22, 16, 0, True), cost)
        self.peer.mapped.expect(cost)

    def _note_wake(self) -> None:
        self.woken += 1

    def _note(self, *what: object) -> None:
        self.given.append(what)

    def taken(self) -> list[object]:
        events, self.connector._events = list(self.connector._events), deque()
        return events


@INTERPRETED
def test_an_awaited_read_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, single blocks, and the same again, of which some are in flight before all else."""
    parts = Parts(monkeypatch)
    for read_id, remote in enumerate(([*range(4, 20)], [31, 3, 4, 5, 9, 0, 2, 17, 18], [8], [8])):
        local = [*range(len(remote))]
        for attempt in range(2):
            parts.memory.blocks.fill_(-1.0)
            parts.connector.read(ReadCommand(2 * read_id + attempt, PEER, local, remote), awaited=True)
            assert not parts.connector.is_landing(), "copies end at once here"
            (result,) = parts.taken()
            assert isinstance(result, ReadResult) and result.error is None and result.path is ReadPath.MAPPED
            assert result.generations == generations(remote) and parts.given == []
            assert torch.equal(parts.memory.blocks[local], parts.source.blocks[remote])
            assert (parts.memory.blocks[len(remote) :] == -1.0).all()
    assert parts.woken == 8 and "one" in parts.driver.calls and not parts.connector._split_reads


@INTERPRETED
def test_events_have_the_awaited_reads_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that runs steps asks for nothing else; it needs no wake-up to find them."""
    parts = Parts(monkeypatch)
    parts.connector._server = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
    parts.connector._threads[0].check = lambda: None  # type: ignore[method-assign]
    parts.connector.read(ReadCommand(1, PEER, [1], [5]), awaited=True)
    (result,) = parts.connector.events()
    assert isinstance(result, ReadResult) and result.error is None and parts.woken == 0
    assert parts.connector.events() == [] and not parts.connector.is_landing() and parts.given == []


@INTERPRETED
@pytest.mark.parametrize("why", ["not awaited", "digests", "generations by NIXL", "refused", "a slot of the host tier"])
def test_other_reads_go_to_the_threads(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    command = ReadCommand(1, PEER, [1, 2], [5, NUM_BLOCKS if why == "a slot of the host tier" else 6])
    parts.connector._checks_digests = why == "digests"
    if why == "generations by NIXL":
        parts.peer.generations = None
    if why == "refused":
        assert parts.peer.mapped is not None
        monkeypatch.setattr(parts.peer.mapped._copier, "start_blocks", lambda *_arguments: 700)
    parts.connector.read(command, awaited=why != "not awaited")
    ((given, path, _first),) = parts.given
    assert given == command and path is ReadPath.MAPPED
    assert not parts.connector.is_landing() and parts.taken() == []


@INTERPRETED
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (4, 1), (1, 2)])
def test_the_first_runs_are_in_flight_before_all_else(
    prefill: int, decode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of each of the ranks read from come first; the rest follows, and nothing is copied twice."""
    stand_in_for_cuda(monkeypatch)
    handles = iter([STREAM, STREAM + 1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: SimpleNamespace(cuda_stream=next(handles)))
    sources = [KVMemory(replace(LAYOUT, tensor_parallel_size=prefill), NUM_BLOCKS) for _ in range(prefill)]
    memory = KVMemory(replace(LAYOUT, tensor_parallel_size=decode), NUM_BLOCKS)
    reader = reader_of(memory, sources)
    queued: list[tuple[int, int]] = []

    def note(batches: Sequence[CopyBatch], stream: int) -> int:
        queued.extend((stream, target) for copies in batches for target in copies.targets)
        return 0

    monkeypatch.setattr(reader._copier, "start", note)
    monkeypatch.setattr(reader._copier, "start_one", lambda target, *_,: note([one(target)], STREAM))
    monkeypatch.setattr(reader._copier, "start_blocks", lambda pieces, found, stream: note([pieces.of(found)], stream))
    is_whole = prefill == decode
    count = 4 if is_whole else 12
    local, remote = list(range(24)), list(range(24))[::-1]
    assert reader.begin(local, [NUM_BLOCKS, *remote[1:]]) == 0 and queued == [], "a slot of the host tier"
    assert reader.begin(local, remote) == count
    assert len(queued) == count * prefill
    assert {stream for stream, _ in queued} == {STREAM if is_whole else STREAM + 1}, (
        "a kernel would be on the first one"
    )
    rest = runs(local[count:], remote[count:])
    read = reader.start(rest, 24, ReadPath.MAPPED, 100.0, whole=True, num_queued=count)
    assert read is not None and read.queued_at and read.num_queued == 24
    targets = [target for _, target in queued]
    assert len(targets) == len(set(targets)) == 24 * prefill
    queued.clear()
    assert reader.begin(range(3, 20), range(5, 22)) == 17 and len(queued) == prefill, "one run"
    if prefill > 1:
        assert {stream for stream, _ in queued} == {STREAM, STREAM + 1}, "nothing else is to come"


def one(target: int) -> CopyBatch:
    return CopyBatch([target], [0], [1], 1, 1, 1)


@INTERPRETED
def test_a_read_that_has_begun_stays_with_the_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many runs its blocks turn out to be: by another path it could end before the copies do."""
    parts = Parts(monkeypatch)
    parts.peer.learn(ReadShape(False, 2, 32, 1 << 22, 1 << 21, 16, 0, True), parts.peer.cost)
    local, apart = list(range(6)), list(range(0, 12, 2))
    parts.connector.read(ReadCommand(1, PEER, local, list(range(6, 12))), awaited=True)
    assert not parts.connector.is_landing()
    monkeypatch.setattr("splitserve.kvconnector.nixl.connector.choose_path", lambda *_: ReadPath.STAGED)
    parts.connector.read(ReadCommand(2, PEER, local, apart), awaited=True)
    assert not parts.connector.is_landing() and parts.given == []
    assert [result.path for result in parts.taken()] == [ReadPath.MAPPED] * 2  # type: ignore[attr-defined]
    assert torch.equal(parts.memory.blocks[local], parts.source.blocks[apart])
    parts.connector.read(ReadCommand(3, PEER, local, apart), awaited=True)
    assert parts.given[-1][1] is ReadPath.STAGED, "the next one is another matter"


@INTERPRETED
def test_a_read_that_was_refused_as_it_began_stays_with_the_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its copies may be in flight, and write to blocks that a read by another path would have verified."""
    parts, local = Parts(monkeypatch), list(range(6))
    parts.peer.learn(ReadShape(False, 2, 32, 1 << 22, 1 << 21, 16, 0, True), parts.peer.cost)
    assert parts.peer.mapped is not None
    parts.connector.read(ReadCommand(1, PEER, local, list(range(6, 12))), awaited=True)
    monkeypatch.setattr("splitserve.kvconnector.nixl.connector.choose_path", lambda *_: ReadPath.STAGED)
    monkeypatch.setattr(parts.peer.mapped._copier, "start_one", lambda *_arguments: 700)
    monkeypatch.setattr(parts.peer.mapped._copier, "start_blocks", lambda *_arguments: 700)
    parts.connector.read(ReadCommand(2, PEER, local, list(range(0, 12, 2))), awaited=True)
    assert [given[1:] for given in parts.given] == [(ReadPath.MAPPED, None)]


@INTERPRETED
def test_an_error_of_cuda_while_a_read_is_commanded_is_the_reading_threads_to_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine loop would end by it."""
    parts = Parts(monkeypatch)
    monkeypatch.setattr(mapped_reads.MappedRead, "all_queued", Mock(side_effect=RuntimeError("CUDA error")))
    parts.connector.read(ReadCommand(1, PEER, [1], [5]), awaited=True)
    assert parts.given[0][1:] == (ReadPath.MAPPED, None) and not parts.connector.is_landing()


@INTERPRETED
def test_of_a_long_read_only_the_first_copies_are_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """It doesn't wait for it, and has other things to do than to queue hundreds of copies."""
    parts = Parts(monkeypatch)
    assert parts.peer.mapped is not None
    parts.peer.mapped.bytes_per_second[ReadPath.MAPPED] = 24 * parts.memory.block_bytes / 0.0021
    parts.connector.read(ReadCommand(1, PEER, list(range(24)), list(range(24))[::-1]), awaited=True)
    ((_, path, first),) = parts.given
    assert path is ReadPath.MAPPED and isinstance(first, mapped_reads.MappedRead)
    assert first.num_queued == 20 and not first.queued_at and not parts.connector.is_landing()


@INTERPRETED
@pytest.mark.parametrize("how", ["leave", "disconnect"])
def test_awaited_reads_are_left_before_their_peer_is(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    monkeypatch.setattr(mapped_reads.MappedRead, "has_ended", lambda _read: False)
    command = ReadCommand(1, PEER, [1], [5])
    parts.connector.read(command, awaited=True)
    assert parts.connector.is_landing() and parts.given == []
    if how == "leave":
        parts.connector.leave()
    else:
        parts.connector.disconnect(PEER)
    assert parts.given[0][:2] == (command, ReadPath.MAPPED) and parts.given[1:] == [("disconnect", PEER)] * (
        how == "disconnect"
    )
    assert not parts.connector.is_landing()


def test_other_ranks_await_their_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 stays awake for them, for a while; a step ends that on all ranks."""
    here, there = Pipe()
    there.send_bytes(msgspec.msgpack.encode(RankServes(parts_of_rank(), {})))
    local = Mock(spec=["name", "served", "read", "is_landing", "leave", "events"])
    local.served.return_value = SimpleNamespace(ranks=[parts_of_rank()], generations_addresses=[1])
    local.is_landing.return_value, local.events.return_value = True, []
    connector = RankedConnector(local, [here])
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    heard = msgspec.msgpack.Decoder(RankRead | RankLeave)
    connector.leave()
    assert not there.poll(), "nothing is awaited"
    connector.read(read_of(1), awaited=True)
    assert heard.decode(there.recv_bytes()) == RankRead(read_of(1), awaited=True)
    local.read.assert_called_once_with(read_of(1), awaited=True)
    assert connector.is_landing()
    local.is_landing.return_value = False
    local.events.return_value = [ReadResult(1, None, [5, 6])]
    assert connector.events() == [] and connector.is_landing(), "the other rank's part is missing"
    local.events.return_value = []
    clock.now += 0.0021
    assert not connector.is_landing(), "it takes too long"
    clock.now -= 0.002
    there.send_bytes(msgspec.msgpack.encode(ReadResult(1, None, [5, 6])))
    assert not connector.is_landing() and [event.generations for event in connector.events()] == [[5, 6]]  # type: ignore[union-attr]
    connector.read(read_of(2), awaited=True)
    connector.leave()
    local.leave.assert_called_once_with()
    assert [heard.decode(there.recv_bytes()) for _ in range(2)] == [RankRead(read_of(2), awaited=True), RankLeave()]
    connector.read(read_of(3), awaited=True)
    assert not connector.is_landing(), "rank 0's part isn't awaited, as nobody's is where nothing is mapped"
    connector.leave()
    assert [heard.decode(there.recv_bytes()) for _ in range(2)] == [RankRead(read_of(3), awaited=True), RankLeave()]
    there.close()
    here.close()


def parts_of_rank() -> RankMemory:
    return RankMemory(b"x", [MemoryRegion(MemoryKind.DRAM, 0, 4096, NUM_BLOCKS, 64)])
