"""The block pool against a simple model, its order of eviction, its runs of adjacent blocks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from splitserve.kvconnector.blocks.pool import BlockPool, BlockState

NUM_BLOCKS = 12


def make_pool(num_blocks: int = NUM_BLOCKS, first_generation: int = 100, caching: bool = True) -> BlockPool:
    generations = np.zeros(num_blocks, dtype=np.uint64)
    return BlockPool(generations, first_generation=first_generation, enable_prefix_caching=caching)


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: a count per block, the index as a dict, cached blocks as a list in LRU order."""

    @initialize(first_generation=st.sampled_from([0, 7, 2**63 - 1, 2**64 - 2]))
    def start(self, first_generation: int) -> None:
        self.pool = make_pool(first_generation=first_generation)
        self.counts = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.cached: list[int] = []
        self.hash_of: dict[int, bytes] = {}
        self.quarantined: set[int] = set()
        self.generations = dict.fromkeys(range(NUM_BLOCKS), first_generation)

    def held(self) -> list[int]:
        return [block_id for block_id, count in self.counts.items() if count]

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1), after=st.none() | st.integers(0, NUM_BLOCKS - 1))
    def allocate(self, num_blocks: int, after: int | None) -> None:
        free = {b for b, count in self.counts.items() if not count} - set(self.cached) - self.quarantined
        taken = self.pool.allocate(num_blocks, after=after)
        if num_blocks > len(free) + len(self.cached):
            assert taken is None
            return
        assert taken is not None and len(set(taken)) == num_blocks
        evicted = self.cached[: max(0, num_blocks - len(free))]
        assert set(taken) <= free | set(evicted), "a block that was neither free nor the least recently used"
        self.cached = self.cached[len(evicted) :]
        for block_id in evicted:
            del self.hash_of[block_id]
        for block_id in taken:
            self.counts[block_id] = 1
            self.generations[block_id] = (self.generations[block_id] + 1) % 2**64

    @rule(data=st.data())
    def reference(self, data: st.DataObject) -> None:
        candidates = self.held() + self.cached
        if candidates:
            block_id = data.draw(st.sampled_from(candidates))
            self.pool.reference([block_id])
            self.counts[block_id] += 1
            if block_id in self.cached:
                self.cached.remove(block_id)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.held():
            return
        block_ids = data.draw(st.lists(st.sampled_from(self.held()), unique=True, max_size=4))
        self.pool.release(block_ids)
        for block_id in reversed(block_ids):
            self.counts[block_id] -= 1
            if not self.counts[block_id] and block_id in self.hash_of:
                self.cached.append(block_id)

    @rule(data=st.data(), name=st.integers(0, 5))
    def publish(self, data: st.DataObject, name: int) -> None:
        if not self.held():
            return
        block_id, block_hash = data.draw(st.sampled_from(self.held())), bytes([name])
        self.pool.publish(block_id, block_hash)
        if block_id not in self.hash_of and block_hash not in self.hash_of.values():
            self.hash_of[block_id] = block_hash

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        candidates = [b for b in self.held() if self.counts[b] == 1 and b not in self.hash_of]
        if candidates:
            block_id = data.draw(st.sampled_from(candidates))
            self.pool.quarantine([block_id])
            self.counts[block_id] = 0
            self.quarantined.add(block_id)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def lift(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.pool.lift_quarantine([block_id])
        self.quarantined.remove(block_id)

    @rule()
    def clear(self) -> None:
        self.pool.clear_prefix_index()
        self.cached.clear()
        self.hash_of.clear()

    @rule(names=st.lists(st.integers(0, 5), max_size=4))
    def match(self, names: list[int]) -> None:
        block_of = {block_hash: block_id for block_id, block_hash in self.hash_of.items()}
        expected = []
        for name in names:
            if bytes([name]) not in block_of:
                break
            expected.append(block_of[bytes([name])])
        assert self.pool.match([bytes([name]) for name in names]) == expected
        assert self.pool.num_unheld(expected) == sum(not self.counts[b] for b in expected)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        for block_id in range(NUM_BLOCKS):
            if self.counts[block_id]:
                expected = BlockState.REFERENCED
            elif block_id in self.quarantined:
                expected = BlockState.QUARANTINED
            else:
                expected = BlockState.CACHED if block_id in self.cached else BlockState.FREE
            assert self.pool.state(block_id) is expected
            assert self.pool.generation(block_id) == self.generations[block_id], "generations advance on take only"
        assert self.pool.total_references() == sum(self.counts.values())
        assert self.pool.num_available == NUM_BLOCKS - len(self.held()) - len(self.quarantined)
        for state in BlockState:
            assert self.pool.count(state) == sum(self.pool.state(b) is state for b in range(NUM_BLOCKS))


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=150, stateful_step_count=40)


def num_runs(block_ids: list[int]) -> int:
    return sum(after != before + 1 for before, after in zip([-2, *block_ids], block_ids, strict=False))


@given(st.sets(st.integers(0, 31)), st.integers(1, 32))
@settings(max_examples=200)
def test_a_run_that_fits_is_taken_whole_and_otherwise_the_fewest_runs(held: set[int], wanted: int) -> None:
    pool = make_pool(32)
    everything = pool.allocate(32)
    assert everything == list(range(32))
    pool.release(sorted(set(everything) - held))
    taken = pool.allocate(wanted)
    free = sorted(set(everything) - held)
    if wanted > len(free):
        assert taken is None
        return
    assert taken is not None
    lengths = sorted(run_lengths(free), reverse=True)
    fewest = next(n for n in range(1, len(lengths) + 1) if sum(lengths[:n]) >= wanted)
    assert num_runs(taken) == fewest


def run_lengths(block_ids: list[int]) -> list[int]:
    lengths: list[int] = []
    for index, block_id in enumerate(block_ids):
        if index and block_ids[index - 1] == block_id - 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def test_the_smallest_run_that_fits_is_used_so_that_long_ones_stay_whole() -> None:
    pool = make_pool()
    pool.allocate(NUM_BLOCKS)
    pool.release([0, 1, 2, 3, 4, 8, 9])
    assert pool.allocate(2) == [8, 9]
    assert pool.allocate(5) == [0, 1, 2, 3, 4]


def test_one_block_follows_the_sequences_last_one_if_it_can() -> None:
    pool = make_pool()
    first = pool.allocate(3)
    assert first is not None and pool.allocate(1, after=first[-1]) == [3]
    assert pool.allocate(1, after=NUM_BLOCKS - 1) == [4], "nothing follows the last block"


def test_nothing_is_taken_when_there_is_not_enough() -> None:
    pool = make_pool()
    held = pool.allocate(NUM_BLOCKS - 2)
    assert held is not None
    pool.publish(held[0], b"a")
    pool.release(held[:1])
    before = [pool.generation(b) for b in range(NUM_BLOCKS)]
    assert pool.allocate(4) is None
    assert [pool.generation(b) for b in range(NUM_BLOCKS)] == before
    assert pool.match([b"a"]) == held[:1], "a failed allocation evicted a cached block"


def test_least_recently_used_goes_first_and_of_one_sequence_its_last_block() -> None:
    pool = make_pool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    assert old is not None and new is not None
    for block_id, block_hash in zip(old + new, [b"a", b"b", b"c", b"d"], strict=True):
        pool.publish(block_id, block_hash)
    pool.release(old)
    pool.release(new)
    pool.reference(old)  # used again: now the most recent
    pool.release(old)
    assert pool.allocate(1) == [new[1]]
    assert pool.allocate(1) == [new[0]]
    assert pool.match([b"a", b"b"]) == old
    assert pool.allocate(1) == [old[1]]
    assert pool.match([b"a", b"b"]) == old[:1]


def test_without_caching_nothing_is_found() -> None:
    pool = make_pool(caching=False)
    held = pool.allocate(1)
    assert held is not None
    pool.publish(held[0], b"a")
    assert pool.match([b"a"]) == []
    pool.release(held)
    assert pool.state(held[0]) is BlockState.FREE


def test_misuse_is_refused() -> None:
    pool = make_pool()
    held = pool.allocate(2)
    assert held is not None
    with pytest.raises(AssertionError, match="without a reference"):
        pool.publish(5, b"x")
    with pytest.raises(KeyError):
        pool.reference([5])
    pool.publish(held[0], b"x")
    with pytest.raises(AssertionError, match="shared or published"):
        pool.quarantine(held[:1])
    pool.reference(held[1:])
    with pytest.raises(AssertionError, match="shared or published"):
        pool.quarantine(held[1:])
    with pytest.raises(AssertionError, match="more often"):
        pool.release([7])
    with pytest.raises(KeyError):
        pool.lift_quarantine([7])


def test_a_quarantined_block_is_never_handed_out() -> None:
    pool = make_pool(3)
    held = pool.allocate(2)
    assert held is not None
    pool.quarantine(held[:1])
    pool.release(held[1:])
    assert pool.num_available == 2
    assert pool.allocate(3) is None
    taken = pool.allocate(2)
    assert taken is not None and held[0] not in taken
    pool.lift_quarantine(held[:1])
    assert pool.allocate(1) == held[:1]
