"""Tiers below the device: their index under random use, what is kept, stores, loads and prefetch."""

import zlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from splitserve.engine.block_manager import BlockManager
from splitserve.engine.scheduling import StepBudget
from splitserve.engine.sequence import Sequence
from splitserve.kvconnector.blocks.pool import BlockPool, BlockState
from splitserve.kvconnector.tiers.commands import CancelCommand, CopyCommand, CopyResult
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.kvconnector.tiers.policy import KeepAll, KeepPolicy, KeepPrompts, KeepSecondUse, make_policy
from splitserve.kvconnector.tiers.stores import STORES_UNTIL_RETRY
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.kvconnector.tiers.tiers import Tiers
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.protocol.block_hash import extend_hashes
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.placement.chunk_bounds import ChunkBounds
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
        was_here = block_hash in self.index or (block_hash, True) in self.stores.values()
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


def test_stores_search_through_pinned_content_once() -> None:
    index = TierIndex(4)
    for block_hash in HASHES[:4]:
        place = index.begin_store(block_hash)
        assert place is not None
        index.finish_store(block_hash, place.slot, is_good=True)
    slots = index.pin(HASHES[:3])
    place = index.begin_store(HASHES[4])
    assert place is not None and place.evicted == HASHES[3]
    index.finish_store(HASHES[4], place.slot, is_good=True)
    assert index.hashes() == [*HASHES[:3], HASHES[4]]
    index.touch([HASHES[4]])
    index.unpin(slots[:1])
    place = index.begin_store(HASHES[5])
    assert place is not None and place.evicted == HASHES[0]
    index.finish_store(HASHES[5], place.slot, is_good=True)
    place = index.begin_store(HASHES[6])
    assert place is not None and place.evicted == HASHES[4]
    assert index.hashes() == [HASHES[5], *HASHES[1:3]], "pinned content is where the next store finds it last"
    index.pin([HASHES[5]])
    assert index.begin_store(HASHES[7]) is None, "all is pinned"
    index.check_invariants()


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


def test_a_full_tier_replaces_what_it_has_and_now_and_then_tries_to_hold_more() -> None:
    pool, tiers = make_tiers(num_slots=6)
    index, hashes = tiers.tiers[0].index, [bytes([n]) * 8 for n in range(200)]

    def store(block_hash: bytes, **result: bool) -> None:
        pool.release(complete(pool, tiers, [block_hash]))
        tiers.start_stores()
        [command] = tiers.take_commands()
        tiers.on_result(CopyResult(command.copy_id, int(not result), "full" if result else None, **result))
        tiers.check_invariants()

    store(hashes[0], is_full=True)
    store(hashes[1], is_full=True)
    assert index.hashes() == [], "nothing can be replaced: free slots are tried on"
    for block_hash in hashes[2:4]:
        store(block_hash)
    store(hashes[4], is_full=True)
    for number in range(5, 5 + STORES_UNTIL_RETRY):
        store(hashes[number])
        assert len(index) == 2, "the latest ones take the place of the oldest"
    store(hashes[199])
    assert len(index) == 3, "there is more room"
    store(hashes[198], is_full=True)
    tiers.clear()
    tiers.take_commands()
    for number in range(100, 106):
        store(hashes[number])
    assert len(index) == 6, "a reset tries on as well"


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


def test_a_tier_is_not_looked_up_until_its_abandoned_loads_have_ended() -> None:
    pool, tiers = make_tiers()
    pool.release(complete(pool, tiers, HASHES[:5]))
    tiers.start_stores()
    finish_all(tiers)
    fresh = pool.allocate(5)
    assert fresh is not None
    load = tiers.begin_load("a sequence", HASHES[:5], fresh)
    assert load is not None and tiers.abandon(load) == fresh
    first, second, *cancels = tiers.take_commands()
    assert cancels == [CancelCommand(first.copy_id, "host"), CancelCommand(second.copy_id, "host")]
    tiers.on_result(CopyResult(second.copy_id, 0, was_dropped=True))
    tiers.check_invariants()
    assert not tiers.may_find(0, HASHES[:5]), "the first copy has begun"
    assert pool.count(BlockState.QUARANTINED) == 3
    tiers.on_result(CopyResult(first.copy_id, 3))
    tiers.check_invariants()
    assert tiers.may_find(0, HASHES[:5]) and pool.count(BlockState.QUARANTINED) == 0
    assert set(HASHES[:5]) == set(tiers.tiers[0].index.hashes()), "a dropped copy shows nothing about the content"


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
    return PrefillScheduler(blocks, StepBudget(1000, 4, ChunkBounds(1000, 1000))), tiers, found


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
