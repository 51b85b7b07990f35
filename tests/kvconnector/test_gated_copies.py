"""Loads by groups of layers: their copies, carried out within host memory."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from host_driver import HostDriver
from splitserve.kvconnector.cuda import host_store as cuda_host_store
from splitserve.kvconnector.cuda.batch_copies import BatchCopier
from splitserve.kvconnector.cuda.host_store import CudaHostStore
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.tiers.load_gates import LayerGroup, LoadGates
from splitserve.protocol.memory_records import LayoutRecord

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.on_gpu]
COPY_ID = 7
NUM_LAYERS = 8


class Event:
    """An event of a stream that does everything at once."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


def make_store(
    monkeypatch: pytest.MonkeyPatch, memory: KVMemory, num_slots: int, gates: LoadGates, driver: HostDriver | None
) -> CudaHostStore:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    store = object.__new__(CudaHostStore)
    store._device, store._gates, store.way = memory.device, gates, "engine"
    store._blocks = memory.blocks.view(-1).view(torch.uint8).view(memory.num_blocks, memory.block_bytes)
    store._slots = torch.randint(0, 255, (num_slots, memory.block_bytes), dtype=torch.uint8)
    store._up = SimpleNamespace(cuda_stream=77)  # type: ignore[assignment]
    store._rows = None if driver is None else BatchCopier(driver)  # type: ignore[arg-type]
    return store


class FailingDriver(HostDriver):
    def rows(self, copy: Any, stream: int) -> int:
        super().rows(copy, stream)
        return 801


@pytest.mark.parametrize("piece_bytes", [1, 5 << 10, 1 << 20])
@pytest.mark.parametrize("driver", [HostDriver, FailingDriver, None])
def test_layers_come_group_by_group(monkeypatch: pytest.MonkeyPatch, driver: Any, piece_bytes: int) -> None:
    """Each group is here in all blocks when its event is told of, and no later one is anywhere."""
    monkeypatch.setattr(cuda_host_store, "PIECE_BYTES", piece_bytes)
    memory, gates = KVMemory(LayoutRecord("m", "w", "float32", 2, NUM_LAYERS, 2, 4), 12), LoadGates(NUM_LAYERS)
    store = make_store(monkeypatch, memory, 9, gates, driver(batches=False) if driver else None)
    memory.blocks.fill_(-1.0)
    before = store._blocks.clone()
    block_ids, slots = [4, 5, 6, 1, 9, 8], [2, 3, 4, 0, 7, 8]
    by_layer = [each.view(-1, NUM_LAYERS, memory.block_bytes // NUM_LAYERS) for each in (store._blocks, store._slots)]
    groups: list[LayerGroup] = []

    def queued(self: LoadGates, copy_id: int, group: LayerGroup, event: Any) -> None:
        assert copy_id == COPY_ID and isinstance(event, Event) and COPY_ID in self._events
        groups.append(group)
        end = group.first_layer + group.num_layers
        assert torch.equal(by_layer[0][block_ids, :end], by_layer[1][slots, :end])
        assert torch.equal(by_layer[0][:, end:], before.view(by_layer[0].shape)[:, end:])

    monkeypatch.setattr(LoadGates, "queued", queued)
    told: list[bool] = []

    def tell_near_end() -> None:
        told.append(torch.equal(by_layer[0][block_ids[0], 0], by_layer[1][slots[0], 0]))

    store.load_gated(COPY_ID, block_ids, slots, tell_near_end)
    assert groups == gates.groups and told == [True], "it's told once, when the first copies are in flight"
    others = [block for block in range(12) if block not in block_ids]
    assert torch.equal(store._blocks[others], before[others])
    assert gates.event(COPY_ID, 0) is None, "it's over"


def test_the_near_end_is_told_when_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, gates = KVMemory(LayoutRecord("m", "w", "float32", 2, NUM_LAYERS, 2, 4), 12), LoadGates(NUM_LAYERS)
    monkeypatch.setattr(cuda_host_store, "PIECE_BYTES", 1)
    monkeypatch.setattr(cuda_host_store, "NEAR_END_BYTES", memory.block_bytes)
    store = make_store(monkeypatch, memory, 9, gates, HostDriver(batches=False))
    done: list[LayerGroup] = []
    monkeypatch.setattr(LoadGates, "queued", lambda self, copy_id, group, event: done.append(group))
    told: list[int] = []
    store.load_gated(COPY_ID, [1, 2, 3, 4], [1, 2, 3, 4], lambda: told.append(len(done)))
    assert told == [3], "six of eight layers of four blocks are copied"


def test_a_load_that_fails_lets_launches_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, gates = KVMemory(LayoutRecord("m", "w", "float32", 2, NUM_LAYERS, 2, 4), 12), LoadGates(NUM_LAYERS)
    store = make_store(monkeypatch, memory, 9, gates, None)
    with pytest.raises(IndexError):
        store.load_gated(COPY_ID, [1, 99], [1, 2], lambda: None)
    assert gates.event(COPY_ID, 0) is None


def test_little_is_queued_and_never_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []

    class Waited(Event):
        def synchronize(self) -> None:
            waited.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Waited)
    mib = 1 << 20
    with cuda_host_store._Pacer(SimpleNamespace()) as pacer:  # type: ignore[arg-type]
        for size, num_waits in ((32, 0), (32, 0), (16, 1), (16, 1), (32, 2), (48, 4), (90, 5), (90, 6)):
            pacer.make_room(size * mib)
            pacer.queued(size * mib)
            assert len(waited) == num_waits
    assert len(waited) == 9, "all, and the end"


@pytest.mark.parametrize("copy", ["gated load", "load", "store"])
def test_nothing_is_in_flight_after_a_failure(monkeypatch: pytest.MonkeyPatch, copy: str) -> None:
    """Whoever asked for it takes the blocks back at once; and steps that wait are told no earlier."""
    memory, gates = KVMemory(LayoutRecord("m", "w", "float32", 2, NUM_LAYERS, 2, 4), 12), LoadGates(NUM_LAYERS)
    store = make_store(monkeypatch, memory, 9, gates, None)
    store._down = store._up
    monkeypatch.setattr(cuda_host_store, "PIECE_BYTES", 1)
    done: list[str] = []

    class Recorded(Event):
        def record(self, stream: Any) -> None:
            done.append("recorded")

        def synchronize(self) -> None:
            done.append("over")

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(LoadGates, "close", lambda self, copy_id: done.append("closed"))
    pieces = iter((None, None))
    for name in ("_by_engine", "_queue_layers"):  # at the third piece: StopIteration
        monkeypatch.setattr(store, name, lambda *_, **__: next(pieces))
    block_ids, slots = [1, 2, 3], [1, 2, 3]
    with pytest.raises(StopIteration):
        if copy == "gated load":
            store.load_gated(COPY_ID, block_ids, slots, lambda: None)
        else:
            (store.load if copy == "load" else store.store)(block_ids, slots, [])
    assert done.count("recorded") == done.count("over") > 1
    assert done[-1] == ("closed" if copy == "gated load" else "over")
