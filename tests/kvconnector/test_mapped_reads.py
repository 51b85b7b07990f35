"""CopyBatch through a mapping of a peer's memory: which bytes they move, carried out within one process; their choice.

That a GPU moves them is in test_handover_gpu.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from host_driver import STREAM, Event, HostDriver, reader_of, stand_in_for_cuda
from splitserve.kvconnector.cuda.batch_copies import BatchCopier, CopyBatch
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.shape import runs
from splitserve.kvconnector.mapped import reads as mapped_reads
from splitserve.kvconnector.mapped.pieces import Blocks, growing_parts, span_pieces
from splitserve.kvconnector.nixl.connector import NixlConnector, _Peer
from splitserve.kvconnector.nixl.link import LinkProbe
from splitserve.kvconnector.transfer.errors import TransferError
from splitserve.kvconnector.transfer.read_choice import ReadShape, choose_path, path_seconds
from splitserve.kvconnector.transfer.read_cost import CopyCost, LinkCost, ReadCost, fit_blocks
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.handover.reads import ReadCommand, ReadPath
from splitserve.protocol.memory_records import LayoutRecord, MemoryKind
from splitserve.protocol.request import Party

NUM_BLOCKS = 12
PEER = Party("prefill-0", 1)
INTERPRETED = pytest.mark.skipif(
    Path("/dev/nvidiactl").exists(), reason="what stands for CUDA is for machines without a GPU"
)


def layout(num_ranks: int, num_kv_heads: int = 4) -> LayoutRecord:
    return LayoutRecord("m", "w", "float32", 4, 3, num_kv_heads, 2, tensor_parallel_size=num_ranks)


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("decode", [1, 2, 4])
@pytest.mark.parametrize("prefill", [1, 2, 4])
def test_each_rank_gets_its_heads_and_nothing_else_changes(
    prefill: int, decode: int, num_kv_heads: int, batches: bool
) -> None:
    copier = BatchCopier(HostDriver(batches=batches))
    theirs, ours = layout(prefill, num_kv_heads), layout(decode, num_kv_heads)
    model = torch.randn(NUM_BLOCKS, 3, num_kv_heads, 2, 4, 2)
    sources = [KVMemory(theirs, NUM_BLOCKS) for _ in range(prefill)]
    for rank, source in enumerate(sources):
        heads = theirs.block_layout.heads(rank)
        source.blocks.copy_(model[:, :, heads.start : heads.stop])
    chosen = random.Random(prefill * 10 + decode)
    remote, local = [1, 2, 3, 7, *chosen.sample([4, 5, 8, 9], 3)], [5, 6, 7, 8, *chosen.sample([0, 1, 10, 11], 3)]
    for rank in range(decode):
        memory = KVMemory(ours, NUM_BLOCKS)
        memory.blocks.fill_(-1.0)
        for span in ours.block_layout.spans(rank, theirs.block_layout):
            target = Blocks(ours.block_layout, memory.region().blocks_address)
            source = Blocks(theirs.block_layout, sources[span.rank].region().blocks_address)
            assert copier.start([span_pieces(target, source, span).of(list(runs(local, remote)))], STREAM) == 0
        heads = ours.block_layout.heads(rank)
        assert torch.equal(memory.blocks[local], model[remote][:, :, heads.start : heads.stop])
        others = [block for block in range(NUM_BLOCKS) if block not in local]
        assert (memory.blocks[others] == -1.0).all()


def test_neighbours_on_both_sides_are_one_copy() -> None:
    whole, half = layout(1), layout(2)
    size = whole.block_bytes
    (span,) = whole.block_layout.spans(0, whole.block_layout)
    copies = span_pieces(Blocks(whole.block_layout, 0), Blocks(whole.block_layout, 1 << 20), span).of(
        list(runs([4, 5, 6, 8], range(4)))
    )
    assert copies.targets == [4 * size, 8 * size]
    assert copies.sources == [1 << 20, (1 << 20) + 3 * size]
    assert copies.heights == [9, 3] and copies.width == size // 3
    assert copies.is_flat
    (span,) = half.block_layout.spans(1, whole.block_layout)
    layer = size // 3
    copies = span_pieces(Blocks(half.block_layout, 0), Blocks(whole.block_layout, 1 << 20), span).of(
        list(runs([4, 5], [0, 1]))
    )
    assert (copies.targets, copies.sources) == ([2 * size], [(1 << 20) + layer // 2])
    assert (copies.heights, copies.width) == ([6], layer // 2)
    assert (copies.target_pitch, copies.source_pitch, copies.is_flat) == (layer // 2, layer, False)


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (3, [3]), (4, [4]), (5, [4, 1]), (90, [4, 16, 64, 6])])
def test_a_few_blocks_are_in_flight_first(count: int, sizes: list[int]) -> None:
    found = [(index, index, 1) for index in range(count)]
    parts = list(growing_parts(iter(found)))
    assert [len(part) for part in parts] == sizes
    assert [run for part in parts for run in part] == found


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_driver_that_refuses_batches_copies_one_by_one(is_flat: bool) -> None:
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    addresses = ([tensor.data_ptr(), tensor.data_ptr() + 32] for tensor in (target, source))
    copies = CopyBatch(*addresses, [2, 3], 4, *([4, 4] if is_flat else [8, 8]))
    driver = HostDriver(batches=True, fails=True)
    copier = BatchCopier(driver)
    for _ in range(2):
        assert copier.start([copies], STREAM) == 0
    assert driver.calls == (["batch", *["one"] * 4] if is_flat else ["batch of rows", *["rows"] * 4])
    moved = [*range(8), *range(32, 44)] if is_flat else [i for i in (*range(12), *range(32, 52)) if i % 8 < 4]
    assert torch.nonzero(target).flatten().tolist() == [i for i in moved if i]
    assert copier.start([copies], STREAM + 1) == 1


@INTERPRETED
@pytest.mark.parametrize(
    ("prefill", "path"), [(1, ReadPath.MAPPED), (2, ReadPath.MAPPED), (1, ReadPath.KERNEL), (2, ReadPath.KERNEL)]
)
def test_a_reader_starts_at_once_and_tells_when_to_look(
    prefill: int, path: ReadPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies in host memory, by what stands for CUDA here; the kernel is the real one."""
    if path is ReadPath.KERNEL:
        pytest.importorskip("triton")
    driver = stand_in_for_cuda(monkeypatch)
    theirs, ours = layout(prefill), layout(1)
    sources = [KVMemory(theirs, NUM_BLOCKS) for _ in range(prefill)]
    for source in sources:
        source.blocks.copy_(torch.randn_like(source.blocks))
    memory = KVMemory(ours, NUM_BLOCKS)
    reader = reader_of(memory, sources)
    assert driver.calls == [] and reader.read([1], [2], path).is_done()
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(mapped_reads.time, "monotonic", lambda: clock.now)
    link = LinkCost(0.0, 0.0, memory.block_bytes)
    reader.expect(ReadCost(POSTED, COPY, None, *((link, None) if path is ReadPath.MAPPED else (MAPPED, link))))
    pending = reader.read([4, 5, 8, 0, 10, 11], [7, 3, 0, 1, 9, 11], path)
    assert pending.due_at == pytest.approx(103.0) and not pending.is_done(), "the link may be twice as fast"
    clock.now = 105.5
    assert pending.is_done()
    faster = pytest.approx(6 / 5.5 * memory.block_bytes)
    assert reader.bytes_per_second[path] == faster, "the link is faster than expected"
    slow = reader.read([4], [7], path)
    clock.now += 1.0
    assert slow.is_done()
    assert reader.bytes_per_second[path] == faster, "small reads are slower"
    expected = torch.cat([source.blocks[[2, 7, 3, 0, 1, 9, 11]] for source in sources], dim=2)
    assert torch.equal(memory.blocks[[1, 4, 5, 8, 0, 10, 11]], expected)
    by_engines = {"batch"} if prefill == 1 else {"batch of rows"}
    assert set(driver.calls) == (by_engines if path is ReadPath.MAPPED else set())
    before = memory.blocks.clone()
    place = torch.full((4, memory.block_bytes), 7, dtype=torch.uint8)
    assert reader.try_kernel(place[3].data_ptr())
    reader.probe_blocks(place.data_ptr(), path, [2, 1, 0])
    whole = torch.cat([source.blocks[[2, 1, 0, 0]] for source in sources], dim=2)
    assert torch.equal(place, whole.view(4, -1).view(torch.uint8)) and torch.equal(memory.blocks, before)
    buffer = torch.zeros(64, dtype=torch.uint8)
    reader.probe(buffer.data_ptr(), 2, 16)
    read = sources[0].blocks.view(-1).view(torch.uint8)
    assert torch.equal(buffer[:16], read[:16]) and torch.equal(buffer[32:48], read[32:48])


@INTERPRETED
def test_a_kernel_that_fails_leaves_the_copy_engines(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    triton_row_copy = pytest.importorskip("splitserve.kernels.triton.row_copy")
    monkeypatch.setattr(mapped_reads.ctypes, "CDLL", lambda _name: HostDriver(batches=True))
    waits: list[None] = []
    stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: waits.append(None))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    memory = KVMemory(layout(1), NUM_BLOCKS)
    reader = reader_of(memory, [memory])

    def fail(*_arguments: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(triton_row_copy, "RowCopier", fail)
    assert not reader.try_kernel(memory.region().blocks_address)
    assert "copy engines only" in caplog.text and "no compiler here" in caplog.text
    with pytest.raises(TransferError, match="no compiler here"):
        reader.read([1], [2], ReadPath.KERNEL)
    assert len(waits) == 2  # what was in flight by then is over


@INTERPRETED
@pytest.mark.parametrize("has_kernel", [True, False])
def test_ways_to_copy_rows_are_measured_when_connecting(has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside our blocks."""
    pytest.importorskip("triton")
    stand_in_for_cuda(monkeypatch)
    memory, sources = KVMemory(layout(1), NUM_BLOCKS), [KVMemory(layout(2), NUM_BLOCKS) for _ in range(2)]
    mapped, before = reader_of(memory, sources), memory.blocks.clone()
    monkeypatch.setattr(mapped, "try_kernel", lambda _target: has_kernel)
    shape_of_reads = SimpleNamespace(local_block_bytes=memory.block_bytes, num_spans=2)
    probe = object.__new__(LinkProbe)
    probe._access = SimpleNamespace(shape=shape_of_reads, agent=SimpleNamespace(name="a"))  # type: ignore[assignment]
    place = torch.full((5, memory.block_bytes), 7, dtype=torch.uint8)
    steps = probe._measure_rows(mapped, place.data_ptr(), 4)
    with pytest.raises(StopIteration) as over:
        while True:
            next(steps)
    assert list(over.value.value) == ([ReadPath.MAPPED, ReadPath.KERNEL] if has_kernel else [ReadPath.MAPPED])
    assert all(cost.bytes_per_second > 0 and cost.seconds_fixed > 0 for cost in over.value.value.values())
    assert torch.equal(memory.blocks, before) and (place[4] == 7).all()
    read = torch.cat([source.blocks[[3, 2, 1, 0]] for source in sources], dim=2)
    assert torch.equal(place[:4], read.view(4, -1).view(torch.uint8)), (
        "the last read was of blocks that aren't adjacent"
    )


POSTED, COPY = LinkCost(2e-5, 5e-6, 270e9), CopyCost(2e-5, 1e12)
MAPPED = LinkCost(1e-5, 2e-6, 390e9)
MIB = 1 << 20


def shape(*, is_whole: bool, is_mapped: bool) -> ReadShape:
    return ReadShape(is_whole, 1, 32, 4 * MIB, 4 * MIB if is_whole else 8 * MIB, 16, 0, is_mapped)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_mapping_is_used_where_it_is_there_and_faster(*, is_whole: bool) -> None:
    other = ReadPath.DIRECT if is_whole else ReadPath.STAGED
    mapped, unmapped = (shape(is_whole=is_whole, is_mapped=each) for each in (True, False))
    assert choose_path(mapped, ReadCost(POSTED, COPY, None, MAPPED), 64) is ReadPath.MAPPED
    assert choose_path(mapped, ReadCost(POSTED, COPY, None, LinkCost(1e-5, 2e-6, 20e9)), 64) is other
    assert choose_path(mapped, ReadCost(POSTED, COPY), 64) is other
    as_good = path_seconds(mapped, ReadCost(POSTED, COPY), 64)[other]
    for share, expected in ((1.2, ReadPath.MAPPED), (1.3, other)):  # of the other path's time
        slower = LinkCost(share * as_good, 0.0, 1e18)
        assert choose_path(mapped, ReadCost(POSTED, COPY, None, slower), 64) is expected
    assert choose_path(unmapped, ReadCost(POSTED, COPY, None, MAPPED), 64) is other
    assert ReadCost(POSTED, COPY, None, MAPPED).bytes_per_second == 390e9


def test_a_kernel_is_used_where_it_saves_enough() -> None:
    rows = shape(is_whole=False, is_mapped=True)
    engines = LinkCost(1e-5, 0.0, 140e9)
    for gain, expected in ((1.05, ReadPath.MAPPED), (1.2, ReadPath.KERNEL)):
        kernel = LinkCost(1e-5, 0.0, gain * engines.bytes_per_second)
        assert choose_path(rows, ReadCost(POSTED, COPY, None, engines, kernel), 64) is expected
    assert choose_path(rows, ReadCost(POSTED, COPY, None, engines, LinkCost(1e-5, 0.0, 20e9)), 64) is ReadPath.MAPPED
    assert choose_path(rows, ReadCost(POSTED, COPY, None, LinkCost(1e-5, 0.0, 1e9), None), 64) is ReadPath.STAGED
    unmapped = shape(is_whole=False, is_mapped=False)
    assert choose_path(unmapped, ReadCost(POSTED, COPY, None, engines, engines), 64) is ReadPath.STAGED


@pytest.mark.parametrize("num_spans", [1, 2, 4])
def test_what_blocks_take_is_fitted_to_three_reads(num_spans: int) -> None:
    """And what the model then says of reads is what they would take."""
    true, size = LinkCost(5e-5, 3e-6, 350e9), 4 * MIB

    def seconds(num_runs: int, num_blocks: int) -> float:
        return true.seconds(1, num_runs * num_spans, num_blocks * size)

    reads = seconds(1, 1), seconds(1, 16), seconds(16, 16)
    fitted = fit_blocks(*reads, 16, size, num_spans=num_spans)
    for name in ("seconds_per_descriptor", "bytes_per_second"):
        assert getattr(fitted, name) == pytest.approx(getattr(true, name))
    rows = replace(shape(is_whole=False, is_mapped=True), num_spans=num_spans)
    cost = ReadCost(POSTED, COPY, None, replace(fitted, seconds_fixed=true.seconds_fixed))
    for num_runs in (1, 10, 64):
        assert path_seconds(rows, cost, 64, num_runs)[ReadPath.MAPPED] == pytest.approx(seconds(num_runs, 64))
    assert path_seconds(rows, cost, 64)[ReadPath.MAPPED] == pytest.approx(seconds(64, 64))
    held_up = fit_blocks(1.0, *reads[1:], 16, size, num_spans=num_spans)  # another thread's doing
    assert true.bytes_per_second / 2 < held_up.bytes_per_second < 2 * 16 * size / reads[1]
    odd = fit_blocks(reads[0], reads[2], reads[1], 16, size, num_spans=num_spans)
    assert 0 < odd.seconds_per_descriptor < 1e-8, "blocks that are adjacent took longer: by chance"


def read_of(remote: Sequence[int]) -> ReadCommand:
    return ReadCommand(1, PEER, range(64), remote)


def test_adjacent_blocks_are_left_to_copy_engines() -> None:
    """Copy engines copy them at once; a kernel takes as long for all blocks."""
    peer = _Peer(1, 1)
    engines, kernel = LinkCost(1e-5, 1e-5, 380e9), LinkCost(1e-5, 0.0, 350e9)
    peer.learn(shape(is_whole=False, is_mapped=True), ReadCost(POSTED, COPY, None, engines, kernel))
    assert [peer.path(64, num_runs, None) for num_runs in (1, 2)] == [ReadPath.MAPPED] * 2
    assert peer.path(64, 64, None) is ReadPath.KERNEL
    peer.learn(None, ReadCost(POSTED, COPY, None, engines))
    assert peer.path(64, 64, None) is ReadPath.MAPPED


@pytest.mark.parametrize("is_whole", [True, False])
def test_threads_share_what_is_posted_but_not_what_is_copied_through_a_mapping(*, is_whole: bool) -> None:
    peer, read = _Peer(1, 1), read_of(range(63, -1, -1))
    connector = object.__new__(NixlConnector)
    connector._settings, connector._lock, connector._split_reads = ReadSettings.of(MemoryKind.VRAM), Lock(), {}
    given: list[tuple[Sequence[int], ReadPath]] = []

    def read_part(part: ReadCommand, path: ReadPath, _first: None) -> None:
        given.append((part.remote_blocks, path))

    thread = SimpleNamespace(read=read_part, submit=lambda command: command())
    connector._threads = [thread, thread]  # type: ignore[list-item]
    connector._memory = SimpleNamespace(groups=[SimpleNamespace(block_bytes=4 * MIB)])  # type: ignore[assignment]
    halves = [range(63, 31, -1), range(31, -1, -1)]

    def blocks(known: _Peer | None) -> list[tuple[Sequence[int], ReadPath]]:
        connector._peers = {} if known is None else {PEER: known}
        connector.read(read)
        found = list(given)
        given.clear()
        return found

    assert blocks(None) == blocks(peer) == [(half, ReadPath.DIRECT) for half in halves]
    peer.learn(shape(is_whole=is_whole, is_mapped=True), ReadCost(POSTED, COPY, None, MAPPED))
    assert blocks(peer) == [(range(63, -1, -1), ReadPath.MAPPED)]
    peer.learn(shape(is_whole=is_whole, is_mapped=False), None)
    assert blocks(peer) == [(half, ReadPath.DIRECT if is_whole else ReadPath.STAGED) for half in halves]


def test_a_path_that_is_asked_for_is_taken_if_it_can_be() -> None:
    peer = _Peer(1, 1)
    assert peer.path(64, 1, ReadPath.MAPPED) is ReadPath.DIRECT  # nothing is known yet
    peer.learn(shape(is_whole=True, is_mapped=True), ReadCost(POSTED, COPY, None, MAPPED))
    assert [peer.path(64, 1, path) for path in ReadPath] == [
        ReadPath.DIRECT, ReadPath.MAPPED, ReadPath.MAPPED, ReadPath.MAPPED, ReadPath.MAPPED, ReadPath.MAPPED,
    ]  # fmt: skip
    peer.learn(shape(is_whole=False, is_mapped=False), None)
    assert peer.path(64, 1, ReadPath.LAYERS) is ReadPath.LAYERS
    assert peer.path(64, 1, ReadPath.MAPPED) is ReadPath.STAGED
