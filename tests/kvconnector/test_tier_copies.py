"""Copies between the device and tiers in host memory: whole blocks there and back, failures, NUMA placement."""

import errno
import random
import threading
from pathlib import Path

import pytest
import torch

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.cuda.host_store import CudaHostStore
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory, node_of_cpus, node_of_device, parse_cpu_list
from splitserve.kvconnector.layout.shape import runs
from splitserve.kvconnector.tiers import copies as copies_module
from splitserve.kvconnector.tiers.commands import CancelCommand, CopyCommand, CopyResult
from splitserve.kvconnector.tiers.copies import LocalTierCopier, PartialCopyError
from splitserve.kvconnector.tiers.host import host_tier
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LayoutRecord
from waiting import PATIENCE_SECONDS

LAYOUT = LayoutRecord("m", "w", "float32", 16, 2, 2, 8)
HASHES = [bytes([n]) * 16 for n in range(40)]


# ---- copies ----


def synchronize(device: str) -> None:
    """Wait for the device, as when a step's blocks are offloaded or a load's blocks are taken."""
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_come_back_as_they_were(device: str) -> None:
    memory = KVMemory(LAYOUT, 8, torch.device(device))
    tier, store, description, served, own = host_tier(memory, 5 * memory.block_bytes)
    assert (served.slots.num_blocks, served.slots.block_bytes) == (5, memory.block_bytes)
    assert tier.index.num_slots == 5 and own.address == served.slots.blocks_address
    assert "5 blocks" in description
    memory.blocks.copy_(torch.randn(memory.blocks.shape))
    before = memory.blocks.clone()
    synchronize(device)
    store.store([1, 2, 6], [3, 4, 0], HASHES[:3])
    memory.blocks.zero_()
    synchronize(device)
    store.load([5, 4, 0], [0, 3, 4], HASHES[:3])
    assert torch.equal(memory.blocks[[5, 4, 0]], before[[6, 1, 2]])
    assert not memory.blocks[[1, 2, 3, 6, 7]].any()
    store.close()


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["engine", "kernel"])
@pytest.mark.parametrize("num_tokens", [16, 1024])  # blocks of 4 KiB, and of 256 KiB
def test_both_ways_and_both_directions_at_once_on_cuda(way: str, num_tokens: int) -> None:
    layout = LayoutRecord("m", "w", "float32", num_tokens, 2, 2, 8)
    memory = KVMemory(layout, 64, torch.device("cuda"))
    host = HostMemory(64 * memory.block_bytes, node_of_device(memory.device))
    store = CudaHostStore(memory, host)
    store.way = way
    memory.blocks.copy_(torch.randn(memory.blocks.shape))
    before = memory.blocks.clone()
    torch.cuda.synchronize()
    halves = [torch.randperm(32, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (1, 2)]
    store.store(range(32), halves[0], [b""] * 32)
    memory.blocks[:32].zero_()
    torch.cuda.synchronize()
    up = threading.Thread(target=store.load, args=(list(range(32)), halves[0], [b""] * 32))
    down = threading.Thread(target=store.store, args=(list(range(32, 64)), [32 + n for n in halves[1]], [b""] * 32))
    for thread in (up, down):
        thread.start()
    for thread in (up, down):
        thread.join()
    store.load(list(range(63, 31, -1)), [32 + n for n in reversed(halves[1])], [b""] * 32)
    assert torch.equal(memory.blocks, before)
    slots = torch.from_numpy(host.bytes).view(-1, memory.block_bytes)[halves[0]]
    assert torch.equal(slots.cuda(), before[:32].view(32, -1).view(torch.uint8))
    store.close()


def test_adjacent_blocks_are_copied_at_once() -> None:
    assert list(runs([4, 5, 6, 8, 9, 1], [0, 1, 2, 3, 4, 5])) == [(4, 0, 3), (8, 3, 2), (1, 5, 1)]
    assert list(runs([], [])) == []
    chosen = random.Random(4)
    for count in range(1, 9):
        ours, theirs = (chosen.sample(range(10), count) for _ in range(2))
        found = list(runs(ours, theirs))
        pairs = [(first + index, other + index) for first, other, length in found for index in range(length)]
        assert pairs == list(zip(ours, theirs, strict=True))
        ends = [(first + length, other + length) for first, other, length in found]
        assert all(end != run[:2] for end, run in zip(ends, found[1:], strict=False)), "the longest"


def test_too_little_host_memory_says_so() -> None:
    memory = KVMemory(LAYOUT, 2)
    with pytest.raises(ConfigError, match="less than one KV block"):
        host_tier(memory, memory.block_bytes - 1)
    with pytest.raises(ConfigError, match=r"cannot allocate \S+ GiB of KV memory: .*; lower --host-kv-memory"):
        host_tier(memory, 1 << 60)
    with pytest.raises(
        ConfigError, match=r"cannot allocate \d+\.\d GiB of KV memory: \d+\.\d GiB are available; lower"
    ):
        KVMemory(LAYOUT, (1 << 60) // memory.block_bytes)


class BadStore:
    def store(self, block_ids: list[int], slots: list[int], hashes: list[bytes]) -> None:
        raise PartialCopyError(1, "full")

    def load(self, block_ids: list[int], slots: list[int], hashes: list[bytes]) -> None:
        raise OSError("gone")

    def clear(self) -> None: ...

    def close(self) -> None: ...


def test_a_copy_that_fails_is_a_result_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    woken = threading.Semaphore(0)
    copies = LocalTierCopier({"bad": BadStore()}, woken.release)  # type: ignore[dict-item]
    for copy_id in range(4):
        copies.start(CopyCommand(copy_id, "bad", copy_id % 2 == 1, [1, 2], [3, 4], HASHES[:2]))
    for _ in range(4):
        assert woken.acquire(timeout=PATIENCE_SECONDS)
    results = sorted(copies.results(), key=lambda result: result.copy_id)
    assert [result.num_good for result in results] == [1, 0, 1, 0]
    assert all(result.error for result in results)
    assert sorted(record.message.split(" fail")[0] for record in caplog.records) == ["loads from bad", "stores to bad"]
    copies.close(5.0)


class FullStore(BadStore):
    """Has room for every second block."""

    def store(self, block_ids: list[int], slots: list[int], hashes: list[bytes]) -> None:
        if slots[0] % 2:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("quiet_seconds", "num_lines"), [(10.0, 1), (-1.0, 8)])
def test_a_full_store_warns_once(
    quiet_seconds: float, num_lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copies_module, "QUIET_SECONDS", quiet_seconds)
    caplog.set_level("INFO")
    woken = threading.Semaphore(0)
    copies = LocalTierCopier({"full": FullStore()}, woken.release)  # type: ignore[dict-item]
    for copy_id in range(1, 9):
        copies.start(CopyCommand(copy_id, "full", False, [1], [copy_id], HASHES[:1]))
        assert woken.acquire(timeout=PATIENCE_SECONDS)
    copies.close(PATIENCE_SECONDS)
    assert len(caplog.records) == num_lines and "No space left" in caplog.records[0].message


class StuckStore(BadStore):
    """Loads end when the test allows it, one by one."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def load(self, block_ids: list[int], slots: list[int], hashes: list[bytes]) -> None:
        self.begun.release()
        assert self.may_end.acquire(timeout=PATIENCE_SECONDS)


def test_a_cancelled_load_ends_at_once_unless_it_has_begun(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    store, woken = StuckStore(), threading.Semaphore(0)
    copies = LocalTierCopier({"stuck": store}, woken.release)  # type: ignore[dict-item]

    def next_result() -> CopyResult:
        assert woken.acquire(timeout=PATIENCE_SECONDS)
        [result] = copies.results()
        assert isinstance(result, CopyResult)
        return result

    for copy_id in range(3):
        copies.start(CopyCommand(copy_id, "stuck", True, [1, 2], [3, 4], HASHES[:2]))
    assert store.begun.acquire(timeout=PATIENCE_SECONDS)
    for copy_id in (0, 1):
        copies.start(CancelCommand(copy_id, "stuck"))
    assert next_result() == CopyResult(1, 0, was_dropped=True), "although the first one hangs"
    store.may_end.release()
    result = next_result()
    assert (result.copy_id, result.num_good, result.was_dropped) == (0, 2, False), "it could not be ended"
    store.may_end.release()
    assert next_result().copy_id == 2
    copies.start(CancelCommand(2, "stuck"))
    copies.close(PATIENCE_SECONDS)
    assert copies.results() == [], "it had ended"
    texts = [record.message for record in caplog.records]
    assert [text.split(":")[0] for text in texts] == ["loads from stuck take too long", "loads from stuck begin again"]


# ---- where memory is ----


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,5\n") == {0, 1, 2, 5}
    assert parse_cpu_list("\n") == set()


def test_the_node_of_some_cpus(tmp_path: Path) -> None:
    for node, cpus in {"node0": "0-3", "node1": "4-7"}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    assert node_of_cpus({4, 6}, tmp_path) == 1
    assert node_of_cpus({0, 3}, tmp_path) == 0
    assert node_of_cpus({3, 4}, tmp_path) is None
    assert node_of_cpus({0}, tmp_path / "none") is None


def test_placement_is_read_back() -> None:
    memory = HostMemory(1 << 20)
    assert not memory.bytes.any()
    if memory.placement:  # where the kernel tells
        assert sum(memory.placement.values()) == (1 << 20) // 4096
        assert "on node" in memory.describe()


def test_settings() -> None:
    with pytest.raises(ConfigError, match="kv_keep is 'some'"):
        EngineConfig(model="m", kv_keep="some")
    with pytest.raises(ConfigError, match="kv_load_seconds"):
        EngineConfig(model="m", kv_load_seconds=0.0)
    with pytest.raises(ConfigError, match="host_kv_memory_bytes"):
        EngineConfig(model="m", host_kv_memory_bytes=-1)
