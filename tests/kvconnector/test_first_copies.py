"""The first copies of a read through a mapping, which the thread that commands it queues, and the wait for its end."""

import random
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import pytest
import torch

from host_driver import CONTEXT, reader_of, stand_in_for_cuda
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl import mapped_reads
from splitserve.kvconnector.nixl.agent import TransferError
from splitserve.kvconnector.nixl.connector import NixlConnector, _Peer
from splitserve.kvconnector.nixl.mapped_reads import FirstCopies
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
    whole = torch.cat([source.blocks[remote] for source in sources], dim=2)
    memory.blocks.fill_(-1.0)
    first = reader.start(local, remote)
    assert first is not None and first.num_blocks == 20 and driver.context == CONTEXT
    assert torch.equal(memory.blocks[local[:20]], whole[:20]) and (memory.blocks[local[20:]] == -1.0).all()
    assert len(driver.calls) == 2 * prefill
    clock.now += 1.0
    pending = reader.read(local, remote, ReadPath.MAPPED, first)
    assert torch.equal(memory.blocks[local], whole) and len(driver.calls) == 3 * prefill
    assert pending.due_at == pytest.approx(121.6), "all of them, since the first ones were queued"
    few = reader.start([1, 2, 3, 4, 5], [5, 4, 3, 2, 1])
    assert few is not None and few.num_blocks == 5, "all of them"
    assert reader.start([1, 2], [3, NUM_BLOCKS]) is None, "a slot of the host tier"
    reader.close()
    assert reader.start(local, remote) is None and len(driver.calls) == 5 * prefill


@INTERPRETED
def test_first_copies_that_cuda_refuses_are_left_to_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_cuda(monkeypatch)
    memory = KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, [memory])
    monkeypatch.setattr(reader._copier, "start", lambda _copies, _stream: 700)
    assert reader.start([1], [2]) is None
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
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(mapped_reads.time, "monotonic", lambda: clock.now)
    memory = KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, [memory])
    speed = memory.block_bytes / 0.0003
    reader.expect(ReadCost(POSTED, COPY, None, LinkCost(0.0, 0.0, speed)))
    pending = reader.read([1], [2])
    assert pending.due_at == pytest.approx(100.0002), "earlier than a thread wakes up late"
    clock.now = 100.00015
    assert not pending.is_done() and waits == []
    clock.now = 100.00025
    assert pending.is_done() and waits == [100.00025]
    assert reader.bytes_per_second[ReadPath.MAPPED] == speed, "it took longer than expected"


def test_a_read_through_a_mapping_begins_where_it_is_commanded() -> None:
    """Others begin on the threads that own the agents."""
    peer, submitted = _Peer(1, 1), []
    read = ReadCommand(1, PEER, range(64), range(63, -1, -1))
    begun: list[tuple[Sequence[int], Sequence[int]]] = []

    def start(local: Sequence[int], remote: Sequence[int]) -> FirstCopies:
        assert submitted == []
        begun.append((local, remote))
        return FirstCopies(4, 4 * MIB, 100.0)

    connector = object.__new__(NixlConnector)
    connector._settings, connector._lock, connector._split_reads = ReadSettings.of(MemoryKind.VRAM), Lock(), {}
    connector._memory = SimpleNamespace(groups=[SimpleNamespace(block_bytes=4 * MIB)])  # type: ignore[assignment]
    thread = SimpleNamespace(read=lambda *_arguments: None, submit=submitted.append)
    connector._threads, connector._peers = [thread], {PEER: peer}  # type: ignore[list-item]
    peer.mapped = SimpleNamespace(start=start)  # type: ignore[assignment]
    connector.read(read)
    peer.learn(ReadShape(True, 1, 32, 4 * MIB, 4 * MIB, 16, 0, True), ReadCost(POSTED, COPY, None, MAPPED))
    assert submitted.pop().args == (read, ReadPath.DIRECT, None) and begun == []
    connector.read(read)
    assert submitted.pop().args == (read, ReadPath.MAPPED, FirstCopies(4, 4 * MIB, 100.0))
    assert begun == [(read.local_blocks, read.remote_blocks)]
