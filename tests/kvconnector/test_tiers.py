"""Tiers below the device: their index under random use, what is kept, whole blocks there and back, NUMA placement."""

import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from splitserve.common.errors import ConfigError
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.scheduling import StepBudget
from splitserve.engine.sequence import Sequence
from splitserve.kvconnector.blocks.pool import BlockPool, BlockState
from splitserve.kvconnector.cuda.host_store import CudaHostStore
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory, node_of_cpus, node_of_device, parse_cpu_list
from splitserve.kvconnector.layout.shape import runs
from splitserve.kvconnector.tiers.commands import CopyCommand, CopyResult
from splitserve.kvconnector.tiers.copies import PartialCopyError, TierCopies
from splitserve.kvconnector.tiers.host import host_tier
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.kvconnector.tiers.policy import KeepAll, KeepPolicy, KeepPrompts, KeepSecondUse, make_policy
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.kvconnector.tiers.tiers import Tiers
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.protocol.block_hash import extend_hashes
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.request import Party, RequestKey, SamplingParams

LAYOUT = LayoutRecord("m", "w", "float32", 16, 2, 2, 8)
HASHES = [bytes([n]) * 16 for n in range(40)]


# ---- the index ----


class IndexMachine(RuleBasedStateMachine):
    """Random stores, loads, losses and clears against a model: what was stored is found until it is taken."""

    @initialize(num_slots=st.integers(1, 6))
    def start(self, num_slots: int) -> None:
        self.generations = np.full(num_slots, 2**64 - 3, dtype=np.uint64)  # they go round
        self.index = TierIndex(num_slots, self.generations)
        self.stamps: list[list[int]] = []  # of the slots of each load, as it began
        self.content: dict[int, bytes | None] = {}  # slot -> what its bytes are; None: garbage
        self.stores: dict[int, tuple[bytes, bool]] = {}
        self.loads: list[tuple[list[bytes], list[int]]] = []

    @rule(block_hash=st.sampled_from(HASHES[:12]))
    def begin_store(self, block_hash: bytes) -> None:
        was_here = block_hash in self.index or self.index.is_storing(block_hash)
        before = self.generations.copy()
        place = self.index.begin_store(block_hash)
        if place is None:
            in_use = {slot for _, slots in self.loads for slot in slots} | self.stores.keys()
            assert was_here or len(in_use) == self.index.num_slots
            return
        assert not was_here
        assert place.slot not in self.stores
        assert np.flatnonzero(before != self.generations).tolist() == [place.slot], "a reader couldn't tell"
        assert all(place.slot not in slots for _, slots in self.loads), "a slot was taken that is being read"
        if place.evicted is not None:
            assert self.content[place.slot] == place.evicted
        self.content[place.slot] = None
        self.stores[place.slot] = block_hash, True

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), is_good=st.booleans())
    def finish_store(self, data: st.DataObject, is_good: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.stores)))
        block_hash, is_wanted = self.stores.pop(slot)
        self.content[slot] = block_hash if is_good else None
        assert self.index.finish_store(block_hash, slot, is_good=is_good) == (is_good and is_wanted)

    @rule(hashes=st.lists(st.sampled_from(HASHES[:12]), unique=True))
    def load(self, hashes: list[bytes]) -> None:
        hashes = [block_hash for block_hash in hashes if block_hash in self.index]
        if hashes:
            slots = self.index.pin(hashes)
            assert [self.content[slot] for slot in slots] == hashes
            self.index.touch(hashes)
            self.loads.append((hashes, slots))
            self.stamps.append([self.index.generation(slot) for slot in slots])

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def finish_load(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.loads) - 1))
        hashes, slots = self.loads.pop(number)
        assert [self.index.generation(slot) for slot in slots] == self.stamps.pop(number), "a pinned slot was taken"
        assert [self.content[slot] for slot in slots] == hashes, "the content changed under a load"
        self.index.unpin(slots)

    @rule(block_hash=st.sampled_from(HASHES[:12]))
    def forget(self, block_hash: bytes) -> None:
        was_here = block_hash in self.index
        assert self.index.forget(block_hash) == was_here
        assert block_hash not in self.index

    @rule()
    def clear(self) -> None:
        before = self.index.hashes()
        assert self.index.clear() == before
        assert len(self.index) == 0
        self.stores = {slot: (block_hash, False) for slot, (block_hash, _) in self.stores.items()}

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "index"):
            self.index.check_invariants()
            assert self.index.num_in_use == len({s for _, slots in self.loads for s in slots} | self.stores.keys())


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestIndex = IndexMachine.TestCase


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    index = TierIndex(3)
    for block_hash in HASHES[:3]:
        place = index.begin_store(block_hash)
        assert place is not None
        index.finish_store(block_hash, place.slot, is_good=True)
    index.touch(HASHES[:3])
    evicted = [place.evicted for block_hash in HASHES[10:13] if (place := index.begin_store(block_hash)) is not None]
    assert evicted == [HASHES[2], HASHES[1], HASHES[0]]


# ---- what is kept ----


@pytest.mark.parametrize(
    ("policy", "prompt", "output", "again", "reused"),
    [
        (KeepAll(), True, True, True, True),
        (KeepPrompts(), True, False, False, True),
        (KeepSecondUse(), False, False, True, True),
    ],
)
def test_policies(policy: KeepPolicy, prompt: bool, output: bool, again: bool, reused: bool) -> None:
    assert policy.on_complete(HASHES[0], is_prompt=True) == prompt
    assert policy.on_complete(HASHES[1], is_prompt=False) == output
    assert policy.on_complete(HASHES[1], is_prompt=False) == again
    assert policy.on_reused(HASHES[2]) == reused


def test_second_use_remembers_so_many() -> None:
    policy = KeepSecondUse(max_remembered=2)
    assert [policy.on_complete(HASHES[n], is_prompt=True) for n in (0, 1, 2, 0, 2)] == [False] * 4 + [True]


def test_policies_by_name() -> None:
    assert [type(make_policy(name)) for name in ("all", "second-use", "prompt")] == [
        KeepAll,
        KeepSecondUse,
        KeepPrompts,
    ]


# ---- stores and loads ----


def make_tiers(num_blocks: int = 16, num_slots: int = 8, **options: float) -> tuple[BlockPool, Tiers]:
    pool = BlockPool(np.zeros(num_blocks, dtype=np.uint64), first_generation=1)
    return pool, Tiers(pool, [Tier("host", TierIndex(num_slots), max_blocks_per_copy=3)], **options)


def complete(pool: BlockPool, tiers: Tiers, hashes: list[bytes]) -> list[int]:
    block_ids = pool.allocate(len(hashes))
    assert block_ids is not None
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.publish(block_id, block_hash)
        tiers.on_complete(block_id, block_hash, is_prompt=True)
    return block_ids


def finish_all(tiers: Tiers) -> list[CopyCommand]:
    done: list[CopyCommand] = []
    while commands := [command for command in tiers.take_commands() if isinstance(command, CopyCommand)]:
        for command in commands:
            tiers.on_result(CopyResult(command.copy_id, len(command.block_ids)))
        done += commands
        tiers.start_stores()
    tiers.check_invariants()
    return done


def test_stores_are_bounded_and_hold_their_blocks() -> None:
    pool, tiers = make_tiers(num_blocks=8)
    block_ids = complete(pool, tiers, HASHES[:8])
    tiers.start_stores()
    pool.release(block_ids)
    commands = tiers.take_commands()
    assert [len(command.block_ids) for command in commands] == [3, 3]
    assert pool.count(BlockState.REFERENCED) == 6
    assert pool.allocate(3) is None
    for command in commands:
        tiers.on_result(CopyResult(command.copy_id, 3))
    tiers.start_stores()
    assert [len(command.block_ids) for command in finish_all(tiers)] == [2]
    assert (pool.count(BlockState.REFERENCED), tiers.num_blocks) == (0, 8)


def test_a_block_taken_before_its_store_is_lost_and_nothing_else() -> None:
    pool, tiers = make_tiers(num_blocks=4)
    pool.release(complete(pool, tiers, HASHES[:4]))
    taken = pool.allocate(4)
    assert taken is not None
    tiers.start_stores()
    assert tiers.take_commands() == []


def test_a_failed_store_is_not_found() -> None:
    pool, tiers = make_tiers()
    complete(pool, tiers, HASHES[:3])
    tiers.start_stores()
    [command] = tiers.take_commands()
    tiers.on_result(CopyResult(command.copy_id, 1, "disk full"))
    assert tiers.may_find(0, HASHES[:1]) and not tiers.may_find(1, HASHES[1:3])
    assert tiers.counters.tier_failures == 1


def test_a_damaged_block_ends_the_load_and_is_forgotten() -> None:
    pool, tiers = make_tiers()
    pool.release(complete(pool, tiers, HASHES[:5]))
    tiers.start_stores()
    finish_all(tiers)
    fresh = pool.allocate(5)
    assert fresh is not None
    load = tiers.begin_load("a sequence", HASHES[:5], fresh)
    assert load is not None
    first, second = tiers.take_commands()
    assert tiers.on_result(CopyResult(second.copy_id, 2)) is None
    assert tiers.on_result(CopyResult(first.copy_id, 1, "checksum")) is load
    assert load.num_good == 1
    assert tiers.may_find(0, HASHES[:1]) and not tiers.may_find(1, HASHES[1:5])


def test_every_block_comes_from_the_first_tier_that_has_it() -> None:
    pool = BlockPool(np.zeros(16, dtype=np.uint64), first_generation=1)
    near, far = Tier("near", TierIndex(2)), Tier("far", TierIndex(8))
    tiers = Tiers(pool, [near, far])
    pool.release(complete(pool, tiers, HASHES[:4]))
    tiers.start_stores()
    finish_all(tiers)
    assert set(near.index.hashes()) < set(far.index.hashes()) == set(HASHES[:4])
    fresh = pool.allocate(4)
    assert fresh is not None
    assert tiers.begin_load("a sequence", HASHES[:4], fresh) is not None
    sources = {block_hash: command.tier for command in tiers.take_commands() for block_hash in command.hashes}
    assert sources == {h: "near" if h in near.index else "far" for h in HASHES[:4]}


# ---- prefetch ----


def scheduler_with_a_tier(num_blocks: int) -> tuple[PrefillScheduler, Tiers, Sequence]:
    """And a sequence whose first three blocks are in the tier, and in no other place."""
    pool, tiers = make_tiers(num_blocks=num_blocks)
    blocks = BlockManager(pool, 4, b"root", tiers)
    found = make_sequence("found", 14)
    hashes: list[bytes] = []
    extend_hashes(hashes, b"root", found.token_ids, 4)
    pool.release(complete(pool, tiers, hashes))
    tiers.start_stores()
    finish_all(tiers)
    pool.clear_prefix_index()
    return PrefillScheduler(blocks, StepBudget(1000, 4, 1000)), tiers, found


def test_kv_comes_up_while_its_sequence_waits_behind_others() -> None:
    scheduler, tiers, found = scheduler_with_a_tier(num_blocks=16)
    first, last = make_sequence("first", 30), make_sequence("last", 6)
    for sequence in (first, found, last):
        scheduler.add(sequence)
    scheduler.begin_loads()
    [load] = tiers.take_commands()
    assert isinstance(load, CopyCommand) and load.is_load and len(load.block_ids) == 3
    assert (first.block_ids, len(found.block_ids), last.block_ids) == ([], 4, [])
    scheduler.begin_loads()
    assert tiers.take_commands() == [], "it is asked for once"
    [(planned, _)] = scheduler.plan(16)
    assert planned is first, "it keeps its turn"
    tiers.on_result(CopyResult(load.copy_id, 3))
    scheduler._blocks.finish_load(found)
    complete_step(scheduler, first, 16)
    assert [(p.sequence, len(p.chunk.token_ids)) for p in scheduler.plan(22)] == [(first, 14), (found, 2), (last, 6)]


def test_kv_that_comes_up_leaves_room_for_those_before_it() -> None:
    scheduler, tiers, found = scheduler_with_a_tier(num_blocks=11)
    first = make_sequence("first", 30)
    for sequence in (first, found):
        scheduler.add(sequence)
    scheduler.begin_loads()
    assert tiers.take_commands() == [], "first needs eight blocks, and there are eleven"
    assert [planned.sequence for planned in scheduler.plan(16)] == [first]


def test_who_holds_blocks_goes_on_where_the_first_one_has_no_room() -> None:
    """A sequence that lost its blocks comes back before all others: those behind it may hold what it needs."""
    scheduler, tiers, found = scheduler_with_a_tier(num_blocks=8)
    scheduler.add(found)
    scheduler.begin_loads()
    [load] = tiers.take_commands()
    assert isinstance(load, CopyCommand)
    tiers.on_result(CopyResult(load.copy_id, 3))
    scheduler._blocks.finish_load(found)
    scheduler.add(make_sequence("preempted", 30), first=True)
    assert [planned.sequence for planned in scheduler.plan(16)] == [found]


def make_sequence(name: str, num_tokens: int) -> Sequence:
    token_ids = [zlib.crc32(f"{name} {position}".encode()) % 10_000 for position in range(num_tokens)]
    return Sequence(RequestKey(name), Party("router", 1), token_ids, num_tokens, SamplingParams(max_tokens=9), 100.0)


def complete_step(scheduler: PrefillScheduler, sequence: Sequence, num_tokens: int) -> None:
    sequence.num_computed += num_tokens
    scheduler._blocks.publish_computed(sequence)


# ---- copies ----


def synchronize(device: str) -> None:
    """What was launched is over, as when a step's blocks go down or a load's blocks were taken."""
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


def test_too_little_host_memory_says_so() -> None:
    memory = KVMemory(LAYOUT, 2)
    with pytest.raises(ConfigError, match="less than one KV block"):
        host_tier(memory, memory.block_bytes - 1)
    with pytest.raises(ConfigError, match="cannot allocate --host-kv-memory"):
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
    copies = TierCopies({"bad": BadStore()}, woken.release)  # type: ignore[dict-item]
    for copy_id in range(4):
        copies.start(CopyCommand(copy_id, "bad", copy_id % 2 == 1, [1, 2], [3, 4], HASHES[:2]))
    for _ in range(4):
        assert woken.acquire(timeout=5)
    results = sorted(copies.results(), key=lambda result: result.copy_id)
    assert [result.num_good for result in results] == [1, 0, 1, 0]
    assert all(result.error for result in results)
    assert sorted(record.message.split(" fail")[0] for record in caplog.records) == ["loads from bad", "stores to bad"]
    copies.close(5.0)


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
