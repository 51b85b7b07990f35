"""Rules of cache groups: the blocks that a sequence holds, gives back and finds again; all groups or none."""

import random

import numpy as np
import pytest

from scheduled_sequences import BLOCK_SIZE, complete, make_blocks, make_sequence
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.cache_groups import GroupPool, TableRule, resume_point
from splitserve.engine.scheduling import Planned, StepBudget, StepScheduler
from splitserve.kvconnector.blocks.pool import BlockPool, BlockState
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.protocol.cache_layout import CacheGroup, Field, GroupKind
from splitserve.protocol.counters import WorkerCounters
from splitserve.protocol.placement.chunk_bounds import ChunkBounds

FIELDS = (Field("kv", "float32", 1, 8),)


def make_group(window: int, num_blocks: int = 64) -> GroupPool:
    pool = BlockPool(np.zeros(num_blocks, dtype=np.uint64), first_generation=1)
    return GroupPool(pool, TableRule(BLOCK_SIZE, window))


def make_manager(window: int, num_blocks: int = 64, num_window_blocks: int = 64) -> BlockManager:
    simple = make_blocks(num_blocks)
    others = (make_group(window, num_window_blocks),)
    return BlockManager(simple.pool, BLOCK_SIZE, simple.root_hash, simple.tiers, others)


def counts(manager: BlockManager) -> list[int]:
    return [pool.count(BlockState.REFERENCED) for pool in manager.pools]


@pytest.mark.parametrize("window", range(1, 14))
def test_the_first_block_that_is_needed_has_the_oldest_token_of_the_window(window: int) -> None:
    rule = TableRule(BLOCK_SIZE, window)
    for num_tokens in range(60):
        attended = range(max(0, num_tokens - window + 1), num_tokens + 1)  # the next token itself included
        assert rule.first_needed(num_tokens) == attended[0] // BLOCK_SIZE
    assert TableRule(BLOCK_SIZE).first_needed(1000) == 0, "of a full group all blocks are"


def test_a_group_of_states_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="a group of states"):
        TableRule.of(CacheGroup(GroupKind.STATE, (0,), 0, FIELDS))
    assert TableRule.of(CacheGroup(GroupKind.WINDOW, (0,), 4, FIELDS, 9)) == TableRule(4, 9)


def test_blocks_leave_with_the_commit_and_never_under_a_step() -> None:
    manager = make_manager(window=6)
    sequence = make_sequence("a", 22)
    assert manager.reserve(sequence)
    assert counts(manager) == [6, 6] and sequence.other_tables[0].first_number == 0
    launched = []
    for num_tokens in (8, 8, 6):
        chunk = sequence.chunk(num_tokens, BLOCK_SIZE)
        table, end = chunk.table(1), chunk.start + num_tokens
        first = max(0, chunk.start - 5) // BLOCK_SIZE
        assert (table.first_number, len(table.block_ids)) == (first, -(-end // BLOCK_SIZE) - first)
        assert list(chunk.table(0).block_ids) == sequence.block_ids[: -(-end // BLOCK_SIZE)]
        launched.append(table)
        complete(manager, [Planned(sequence, chunk)])
        kept = sequence.other_tables[0]
        assert kept.first_number == max(0, sequence.num_computed - 5) // BLOCK_SIZE and kept.end == 6
        manager.others[0].pool.check_invariants()
    assert counts(manager) == [6, 2]
    manager.give_back(sequence)
    assert counts(manager) == [0, 0] and not sequence.other_tables


def test_a_pull_holds_the_tail_and_counts_only_the_full_prefix() -> None:
    manager = make_manager(window=6)
    first = make_sequence("a", 22)
    manager.reserve(first)
    complete(manager, [Planned(first, first.chunk(22, BLOCK_SIZE))])
    manager.give_back(first)
    manager.others[0].pool.clear_prefix_index()
    pulled, computed = make_sequence("a", 22), make_sequence("a", 22)
    assert manager.reserve(pulled, pulls=True) and pulled.num_computed == 20
    table = pulled.other_tables[0]
    assert (table.first_number, table.end) == (17 // BLOCK_SIZE, 6) == (4, 6)
    assert manager.reserve(computed) and computed.num_computed == 0, "no window block is there to go on from"


@pytest.mark.parametrize(("full", "window", "lacking"), [(64, 5, 1), (5, 64, 0), (5, 5, 0)])
@pytest.mark.parametrize("pulls", [False, True])
def test_all_groups_or_none(full: int, window: int, lacking: int, pulls: bool) -> None:
    manager = make_manager(18, full, window)
    sequence = make_sequence("a", 22)
    generations = [[pool.generation(i) for i in range(pool.num_blocks)] for pool in manager.pools]
    fits = manager.reserve(sequence, pulls=pulls)
    assert fits == (pulls and lacking == 1), "a pull needs five blocks of the window"
    if not fits:
        assert counts(manager) == [0, 0] and not sequence.block_ids and not sequence.other_tables
        assert generations == [[pool.generation(i) for i in range(pool.num_blocks)] for pool in manager.pools]


def test_growing_takes_a_block_of_each_group_or_of_none() -> None:
    manager = make_manager(window=6, num_window_blocks=3)
    sequence = make_sequence("a", 8)
    assert manager.reserve(sequence)
    complete(manager, [Planned(sequence, sequence.chunk(8, BLOCK_SIZE))])
    other = manager.others[0].pool.allocate(1)
    assert other is not None and not manager.grow(sequence) and len(sequence.block_ids) == 2
    manager.others[0].pool.release(other)
    assert manager.grow(sequence) and sequence.other_tables[0].end == 3 == len(sequence.block_ids)


def test_a_prefix_is_resumed_where_all_groups_have_what_the_next_token_attends_to() -> None:
    groups = [make_group(6), make_group(10)]
    hashes = [bytes([number]) for number in range(8)]
    for group, numbers in zip(groups, ([1, 2, 3, 4, 6], [0, 1, 2, 3, 6, 7]), strict=True):
        for number in numbers:
            (block_id,) = group.pool.allocate(1) or ()
            group.pool.publish(block_id, hashes[number])
    assert resume_point(groups[:1], hashes) == 5, "blocks 3 and 4 are there; of 6, 7 and 8 some are missing"
    assert resume_point(groups[1:], hashes) == 4
    assert resume_point(groups, hashes) == 4 and resume_point(groups, hashes[:2]) == 0
    assert resume_point([], hashes) == 8


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 11])
def test_random_steps_keep_the_counts_and_the_content(window: int) -> None:
    """Sequences with common prefixes are computed, preempted and dropped. The content of a block is the prefix that it
    ends; each step finds the prefixes of its own tokens in all blocks that it reads, in each group."""
    chosen = random.Random(window)
    manager = make_manager(window, 40, 24)
    budget = StepBudget(12, 4, ChunkBounds(12, 12))
    scheduler = StepScheduler(PrefillScheduler(manager, budget), DecodeScheduler(manager, WorkerCounters()), budget)
    content: list[dict[int, dict[int, tuple[int, ...]]]] = [{}, {}]
    alive = []
    num_resumed = 0
    for step in range(400):
        if len(alive) < 6 and chosen.random() < 0.4:
            prompt = [7] * chosen.choice([0, 4, 8, 16]) + [chosen.randrange(3) for _ in range(chosen.randint(1, 14))]
            alive.append(make_sequence(f"{step}", prompt, max_tokens=chosen.randint(1, 20)))
            scheduler.add(alive[-1])
        planned = scheduler.plan()
        for index, (sequence, chunk) in enumerate(planned):
            num_resumed += chunk.start > 0 and chunk.start == sequence.num_cached_tokens
            _compute(chunk.table(0), content[0], sequence.token_ids, range(chunk.start), chunk.start, chunk.token_ids)
            seen = range(max(0, chunk.start - window + 1), chunk.start)
            _compute(chunk.table(1), content[1], sequence.token_ids, seen, chunk.start, chunk.token_ids)
            sequence.on_launched(chunk, index)
        for sequence, chunk in planned:
            sequence.on_completed(chunk)
            sequence.num_computed += len(chunk.token_ids)
            manager.publish_computed(sequence)
            if chunk.sample is None:
                continue
            sequence.token_ids.append(chosen.randrange(3))
            if sequence.num_output_tokens == sequence.sampling.max_tokens or chosen.random() < 0.05:
                scheduler.remove(sequence)
                alive.remove(sequence)
                manager.give_back(sequence)
            elif sequence.num_output_tokens == 1:
                scheduler.start_decoding(sequence)
        for number, pool in enumerate(manager.pools):
            pool.check_invariants()
            held = sum(len(manager.tables(s)[number].block_ids) for s in alive if s.block_ids)
            assert pool.total_references() == held
    for sequence in alive:
        scheduler.remove(sequence)
        manager.give_back(sequence)
    assert counts(manager) == [0, 0] and num_resumed > 0


def _compute(table, content, tokens, read, start, new) -> None:  # type: ignore[no-untyped-def]
    """Check the positions that a chunk reads, then write its own ones."""
    known = tuple(tokens)
    for position in read:
        block_id = table.block_ids[position // BLOCK_SIZE - table.first_number]
        assert content[block_id][position % BLOCK_SIZE] == known[: position + 1]
    assert known[start : start + len(new)] == tuple(new)
    for position in range(start, start + len(new)):
        block_id = table.block_ids[position // BLOCK_SIZE - table.first_number]
        content.setdefault(block_id, {})[position % BLOCK_SIZE] = known[: position + 1]
