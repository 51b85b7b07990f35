"""The first copies of a read through a mapping, which the thread that commands it queues, and the wait for its end."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from host_driver import CONTEXT, STREAM, Event, reader_of, stand_in_for_cuda
from splitserve.kvconnector.cuda.batch_copies import BlockPieces, CopyBatch
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.shape import Run, runs
from splitserve.kvconnector.mapped import reads as mapped_reads
from splitserve.kvconnector.mapped.reads import MappedRead
from splitserve.kvconnector.nixl.connector import NixlConnector, _Peer
from splitserve.kvconnector.transfer.errors import TransferError
from splitserve.kvconnector.transfer.read_choice import ReadShape
from splitserve.kvconnector.transfer.read_cost import CopyCost, LinkCost, ReadCost
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.handover.reads import ReadCommand, ReadPath
from splitserve.protocol.memory_records import LayoutRecord, MemoryKind
from splitserve.protocol.request import Party

NUM_BLOCKS = 32
MIB = 1 << 20
PEER = Party("prefill-0", 1)
POSTED, COPY = LinkCost(2e-5, 5e-6, 270e9), CopyCost(2e-5, 1e12)
MAPPED = LinkCost(1e-5, 2e-6, 390e9)
INTERPRETED = pytest.mark.skipif(
    Path("/dev/nvidiactl").exists(), reason="what stands for CUDA is for machines without a GPU"
)


def layout(num_ranks: int) -> LayoutRecord:
    return LayoutRecord("m", "w", "float32", 4, 3, 4, 2, tensor_parallel_size=num_ranks)


@INTERPRETED
@pytest.mark.parametrize("prefill", [1, 2])
def test_the_thread_that_commands_a_read_queues_its_first_copies(prefill: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = stand_in_for_cuda(monkeypatch)
    sources = [KVMemory(layout(prefill), NUM_BLOCKS) for _ in range(prefill)]
    for source in sources:
        source.blocks.copy_(torch.randn_like(source.blocks))
    memory = KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, sources)
    reader.expect(ReadCost(POSTED, COPY, None, LinkCost(0.0, 0.0, memory.block_bytes)))
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(mapped_reads.time, "monotonic", lambda: clock.now)
    chosen = random.Random(prefill)
    local, remote = (chosen.sample(range(NUM_BLOCKS), 24) for _ in range(2))
    found = list(runs(local, remote))
    assert len(found) == 24, "no two blocks are adjacent on both sides"
    whole = torch.cat([source.blocks[remote] for source in sources], dim=2)
    memory.blocks.fill_(-1.0)
    first = reader.start(iter(found), 24, ReadPath.MAPPED, clock.now)
    assert first is not None and first.num_queued == 20 and driver.context == CONTEXT
    assert torch.equal(memory.blocks[local[:20]], whole[:20]) and (memory.blocks[local[20:]] == -1.0).all()
    assert len(driver.calls) == 2 * prefill
    clock.now += 1.0
    pending = reader.read(local, remote, ReadPath.MAPPED, first)
    assert torch.equal(memory.blocks[local], whole) and len(driver.calls) == 3 * prefill
    assert pending.due_at == pytest.approx(112.0), "all of them, since the first ones were queued"
    few = reader.start(iter(found[:5]), 5, ReadPath.MAPPED, clock.now)
    assert few is not None and few.queued_at == clock.now, "all of them"
    assert reader.read(local[:5], remote[:5], ReadPath.MAPPED, few) is few and len(driver.calls) == 5 * prefill
    assert reader.has_blocks([3, NUM_BLOCKS - 1]) and not reader.has_blocks([3, NUM_BLOCKS]), "a slot of the host tier"
    with reader._lock:
        assert reader.start(iter(found), 24, ReadPath.MAPPED, clock.now) is None, "it waits for nothing"
    reader.close()
    assert reader.start(iter(found), 24, ReadPath.MAPPED, clock.now) is None and len(driver.calls) == 5 * prefill


@INTERPRETED
def test_the_thread_that_commands_a_read_queues_adjacent_blocks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = stand_in_for_cuda(monkeypatch)
    sources, memory = [KVMemory(layout(2), NUM_BLOCKS) for _ in range(2)], KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, sources)
    read = reader.start([(0, 0, NUM_BLOCKS)], NUM_BLOCKS, ReadPath.MAPPED, 100.0)
    assert read is not None and read.queued_at and driver.calls == ["batch of rows"] * 2, "one for each rank"


@INTERPRETED
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (1, 1), (2, 1), (4, 1)])
def test_rows_are_copied_on_several_streams(prefill: int, decode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece once: those of several ranks each on a stream, those of one rank in turn."""
    stand_in_for_cuda(monkeypatch)
    handles = iter([STREAM, STREAM + 1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: SimpleNamespace(cuda_stream=next(handles)))
    sources = [KVMemory(layout(prefill), NUM_BLOCKS) for _ in range(prefill)]
    memory = KVMemory(layout(decode), NUM_BLOCKS)
    reader = reader_of(memory, sources)
    queued: dict[int, list[int]] = {}

    def start(batches: Sequence[CopyBatch], stream: int) -> int:
        queued.setdefault(stream, []).extend(target for copies in batches for target in copies.targets)
        return 0

    def start_blocks(pieces: BlockPieces, found: Sequence[Run], stream: int) -> int:
        return start([pieces.of(found)], stream)

    monkeypatch.setattr(reader._copier, "start", start)
    monkeypatch.setattr(reader._copier, "start_blocks", start_blocks)
    local = range(2 * NUM_BLOCKS - 2, -1, -2)
    found = [(block // 2, block // 2, 1) for block in local]
    assert reader.start(found, NUM_BLOCKS, ReadPath.MAPPED, 100.0) is not None
    reader.read([], [], ReadPath.MAPPED, MappedRead(reader, found, NUM_BLOCKS, ReadPath.MAPPED, 100.0))
    together = [target for targets in queued.values() for target in targets]
    size = memory.block_bytes
    assert len(together) == (20 + NUM_BLOCKS) * prefill and len(set(together)) == NUM_BLOCKS * prefill
    assert {(target - memory.region().blocks_address) // size for target in together} == set(range(NUM_BLOCKS))
    if (prefill, decode) == (1, 1):
        assert list(queued) == [STREAM], "whole blocks"
    else:
        assert len(queued[STREAM]) == len(queued[STREAM + 1])


@INTERPRETED
def test_the_thread_that_commands_a_read_launches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that takes no time: it is compiled, and the device has room."""
    pytest.importorskip("triton")
    driver = stand_in_for_cuda(monkeypatch)
    sources = [KVMemory(layout(2), NUM_BLOCKS) for _ in range(2)]
    for source in sources:
        source.blocks.copy_(torch.randn_like(source.blocks))
    memory = KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, sources)
    found = [(1, 2, 1), (4, 7, 2), (9, 3, 1)]
    assert reader.start(found, 4, ReadPath.KERNEL, 100.0) is None, "it is not compiled"
    reader.read([0], [0], ReadPath.KERNEL)
    (copier,) = reader._row_copiers.values()
    with monkeypatch.context() as patch:
        patch.setattr(copier, "is_ready", lambda num_pieces: num_pieces != 4 * 2)
        assert reader.start(found, 4, ReadPath.KERNEL, 100.0) is None, "the device has no room"
        patch.undo()
        patch.setattr(copier, "start", Mock(side_effect=RuntimeError("no")))
        assert reader.start(found, 4, ReadPath.KERNEL, 100.0) is None, "the other thread reports it"
    with monkeypatch.context() as patch:
        patch.setattr(mapped_reads, "_MOST_FIRST_PIECES", 7)
        assert reader.start(found, 4, ReadPath.KERNEL, 100.0) is None, "it takes too long"
    memory.blocks.fill_(-1.0)
    read = reader.start(found, 4, ReadPath.KERNEL, 100.0)
    assert read is not None and read.queued_at and driver.calls == []
    whole = torch.cat([source.blocks[[2, 7, 8, 3]] for source in sources], dim=2)
    assert torch.equal(memory.blocks[[1, 4, 5, 9]], whole)
    with monkeypatch.context() as patch:
        patch.setattr(copier, "start", Mock(side_effect=RuntimeError("not twice")))
        assert reader.read([1, 4, 5, 9], [2, 7, 8, 3], ReadPath.KERNEL, read) is read


@INTERPRETED
def test_first_copies_that_cuda_refuses_are_left_to_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_cuda(monkeypatch)
    memory = KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, [memory])
    monkeypatch.setattr(reader._copier, "start_blocks", lambda _pieces, _found, _stream: 700)
    monkeypatch.setattr(reader._copier, "start_one", lambda *_arguments: 700)
    assert reader.begin([1], [2]) == 0
    assert reader.start([(1, 2, 1)], 1, ReadPath.MAPPED, 100.0) is None
    with pytest.raises(TransferError, match="700"):
        reader.read([1], [2])


@INTERPRETED
def test_a_read_that_is_due_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU says when it is over; polls in between would come too late."""
    stand_in_for_cuda(monkeypatch)
    clock, waits = SimpleNamespace(now=100.0), []

    def wait() -> None:
        waits.append(clock.now)
        clock.now = 100.00031

    event = SimpleNamespace(record=lambda _stream: None, query=lambda: False, synchronize=wait)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_options: event)
    monkeypatch.setattr(mapped_reads.time, "monotonic", lambda: clock.now)
    memory = KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, [memory])
    speed = memory.block_bytes / 0.0004
    reader.expect(ReadCost(POSTED, COPY, None, LinkCost(0.0, 0.0, speed)))
    pending = reader.read([1], [2])
    assert pending.due_at == pytest.approx(100.0001), "earlier than a thread wakes up late"
    clock.now = 100.00005
    assert not pending.is_done() and waits == []
    clock.now = 100.00025
    assert pending.is_done() and waits == [100.00025]
    assert reader.bytes_per_second[ReadPath.MAPPED] == pytest.approx(memory.block_bytes / 0.00031)


@INTERPRETED
def test_a_link_that_was_measured_too_slow_is_known_after_two_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that is over when it is looked at tells only that the link is at least so fast."""
    stand_in_for_cuda(monkeypatch)
    clock, block = SimpleNamespace(now=0.0), 1.0  # seconds that a block really takes
    ends: list[float] = []

    class Event:
        def record(self, _stream: object) -> None:
            self.end = ends[-1]

        def query(self) -> bool:
            return clock.now >= self.end

        def synchronize(self) -> None:
            clock.now = max(clock.now, self.end)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(mapped_reads.time, "monotonic", lambda: clock.now)
    memory = KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, [memory])
    ends.append(0.0)
    reader.expect(ReadCost(POSTED, COPY, None, LinkCost(0.0, 0.0, memory.block_bytes / (3 * block))))
    noticed = []
    for _ in range(3):
        ends.append(clock.now + 10 * block)
        read, began = reader.read(range(10), range(10, 20)), clock.now
        clock.now = read.due_at
        assert read.is_done()
        noticed.append(clock.now - began)
    assert noticed == pytest.approx([15.0, 10.0, 10.0])
    assert reader.bytes_per_second[ReadPath.MAPPED] == pytest.approx(memory.block_bytes)


@INTERPRETED
def test_a_read_that_is_looked_at_early_says_nothing_about_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one that is in flight when it is due shows that the link isn't faster than it was measured."""
    stand_in_for_cuda(monkeypatch)
    clock, event = SimpleNamespace(now=100.0), SimpleNamespace(record=lambda _stream: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(mapped_reads.time, "monotonic", lambda: clock.now)
    memory = KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, [memory])
    reader.expect(ReadCost(POSTED, COPY, None, LinkCost(0.0, 0.0, memory.block_bytes / 0.001)))
    read = reader.start([(1, 2, 1)], 1, ReadPath.MAPPED, clock.now, whole=True)
    assert read is not None and read.due_at == pytest.approx(100.0005)
    assert not read.has_ended() and not reader.paths_known
    clock.now = 100.0006
    assert not read.has_ended() and reader.paths_known == {ReadPath.MAPPED}


@INTERPRETED
@pytest.mark.parametrize(
    ("seen", "noticed", "end"), [(0.0, 0.02, 0.001), (0.0, 0.0008, 0.0008), (0.0013, 0.02, 0.0013)]
)
def test_a_read_whose_end_is_noticed_late_ended_when_it_was_expected_to(
    seen: float, noticed: float, end: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it was seen in flight after that."""
    stand_in_for_cuda(monkeypatch)
    clock, has_ended = SimpleNamespace(now=100.0), [False, True]
    event = SimpleNamespace(record=lambda _stream: None, query=lambda: has_ended.pop(0))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(mapped_reads.time, "monotonic", lambda: clock.now)
    memory = KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, [memory])
    reader.expect(ReadCost(POSTED, COPY, None, LinkCost(0.0, 0.0, memory.block_bytes / 0.001)))
    read = reader.start([(1, 2, 1)], 1, ReadPath.MAPPED, clock.now, whole=True)
    assert read is not None
    clock.now = 100.0 + seen
    assert not read.has_ended()
    clock.now = 100.0 + noticed
    assert read.has_ended() and read.ended_at == pytest.approx(100.0 + end, abs=1e-9)


@INTERPRETED
def test_events_are_used_again_once_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_cuda(monkeypatch)
    made: list[object] = []

    class Counted(Event):
        def __init__(self) -> None:
            made.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Counted)
    memory = KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, [memory])
    first, second = reader.read([1], [2]), reader.read([3], [4])
    assert len(made) == 2, "one may still be awaited while the other read begins"
    assert first.is_done() and first.is_done() and second.is_done() and len(reader.unused_events) == 2
    for _ in range(3):
        assert reader.read([1], [2]).is_done()
    assert len(made) == 2


def test_a_read_through_a_mapping_begins_where_it_is_commanded() -> None:
    """Others begin on the threads that own the agents."""
    peer, submitted = _Peer(1, 1), []
    read = ReadCommand(1, PEER, range(64), range(63, -1, -1))
    begun: list[tuple[list[Run], int, ReadPath]] = []
    first = object()

    def start(
        found: Iterable[Run], num_blocks: int, path: ReadPath, _started: float, *, whole: bool, num_queued: int
    ) -> object:
        assert submitted == [] and not whole and num_queued == 0
        begun.append((list(found), num_blocks, path))
        return first

    connector = object.__new__(NixlConnector)
    connector._settings, connector._lock, connector._split_reads = ReadSettings.of(MemoryKind.VRAM), Lock(), {}
    connector._checks_digests = False
    connector._memory = SimpleNamespace(groups=[SimpleNamespace(block_bytes=4 * MIB)])  # type: ignore[assignment]
    thread = SimpleNamespace(read=lambda *_arguments: None, submit=submitted.append)
    connector._threads, connector._peers = [thread], {PEER: peer}  # type: ignore[list-item]
    peer.mapped = SimpleNamespace(start=start, has_blocks=lambda remote: max(remote) < 64)  # type: ignore[assignment]
    connector.read(read)
    peer.learn(ReadShape(True, 1, 32, 4 * MIB, 4 * MIB, 16, 0, True), ReadCost(POSTED, COPY, None, MAPPED))
    assert submitted.pop().args == (read, ReadPath.DIRECT, None) and begun == []
    connector.read(read)
    assert submitted.pop().args == (read, ReadPath.MAPPED, first)
    apart = [(block, 63 - block, 1) for block in range(64)]
    assert begun.pop() == (apart, 64, ReadPath.MAPPED)
    slow = LinkCost(1e-5, 1e-4, 390e9)
    peer.learn(ReadShape(False, 2, 32, 4 * MIB, 2 * MIB, 16, 0, True), ReadCost(POSTED, COPY, None, slow, MAPPED))
    connector.read(read)
    assert submitted.pop().args == (read, ReadPath.KERNEL, first) and begun == [(apart, 64, ReadPath.KERNEL)]
    from_tier = ReadCommand(2, PEER, [1, 2], [3, 64])
    connector.read(from_tier)
    assert submitted.pop().args[2] is None and len(begun) == 1, "a slot of the host tier"
