"""The tier that workers share, as one of them sees it: chunks, what is asked and given, what happens when it's gone."""

import random

import numpy as np
import pytest

from splitserve.kvconnector.blocks.pool import BlockPool, BlockState
from splitserve.kvconnector.tiers.commands import CancelCommand, ClearCommand, CopyCommand, CopyResult
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.kvconnector.tiers.policy import KeepPrompts
from splitserve.kvconnector.tiers.shared import ChainCopy, SharedTier, TierState
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.kvconnector.tiers.tiers import Tiers
from splitserve.protocol.block_hash import extend_hashes

BLOCK = 4
CHUNK = 2  # blocks
THERE = TierState("shared", True, CHUNK * BLOCK)
GONE = TierState("shared", False)


def make(num_blocks: int = 64, *, local: int = 0, **options: object) -> tuple[BlockPool, Tiers]:
    pool = BlockPool(np.zeros(num_blocks, dtype=np.uint64), first_generation=1)
    tiers = [Tier("host", TierIndex(local))] if local else []
    made = Tiers(pool, tiers, shared=SharedTier("shared", BLOCK, max_blocks_per_copy=3 * CHUNK), **options)
    made.on_result(THERE)
    return pool, made


def tokens(num_blocks: int, seed: int = 0) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(1000) for _ in range(num_blocks * BLOCK)]


def hashes_of(token_ids: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, b"root", token_ids, BLOCK)
    return hashes


def compute(pool: BlockPool, tiers: Tiers, token_ids: list[int], first: int = 0, is_prompt: bool = True) -> list[int]:
    """Blocks ``first`` and following of a sequence are computed."""
    hashes = hashes_of(token_ids)
    block_ids = pool.allocate(len(hashes) - first)
    assert block_ids is not None
    worth = []
    for block_id, block_hash in zip(block_ids, hashes[first:], strict=True):
        pool.publish(block_id, block_hash)
        worth.append(tiers.on_complete(block_id, block_hash, is_prompt=is_prompt))
    tiers.shared.propose(token_ids, hashes, first, worth)
    return block_ids


def stores(tiers: Tiers) -> list[ChainCopy]:
    tiers.start_stores()
    return [copy for copy in tiers.take_commands() if isinstance(copy, ChainCopy) and not copy.is_load]


def finish(tiers: Tiers, copy: ChainCopy, num_good: int | None = None, error: str | None = None) -> object:
    found = tiers.on_result(CopyResult(copy.copy_id, len(copy.block_ids) if num_good is None else num_good, error))
    tiers.check_invariants()
    return found


def test_whole_chunks_go_down_with_all_their_tokens() -> None:
    pool, tiers = make()
    prompt = tokens(9)
    block_ids = compute(pool, tiers, prompt)
    first, second = stores(tiers)
    assert (first.first_block, first.block_ids, first.token_ids) == (0, block_ids[:6], prompt[: 6 * BLOCK])
    assert (second.first_block, second.block_ids, second.token_ids) == (6, block_ids[6:8], prompt[: 8 * BLOCK])
    assert second.hashes == hashes_of(prompt)[6:8]
    for copy in (first, second):
        finish(tiers, copy)
    assert tiers.counters.tier_stored_blocks == 8
    pool.release(block_ids)
    assert pool.count(BlockState.REFERENCED) == 0


def test_a_chunk_goes_down_when_its_last_block_is_complete() -> None:
    pool, tiers = make()
    prompt = tokens(4)
    held = compute(pool, tiers, prompt[: 3 * BLOCK])
    [copy] = stores(tiers)
    assert len(copy.block_ids) == 2
    finish(tiers, copy)
    held += compute(pool, tiers, prompt, first=3)
    [copy] = stores(tiers)
    assert (copy.first_block, copy.block_ids) == (2, held[2:4]), "with the block that was complete before"


def test_what_is_there_is_not_given_again() -> None:
    pool, tiers = make()
    prompt = tokens(4)
    held = compute(pool, tiers, prompt)
    [copy] = stores(tiers)
    finish(tiers, copy)
    tiers.on_reused(held, hashes_of(prompt), prompt)
    assert stores(tiers) == []
    tiers.on_result(TierState("shared", False))
    tiers.on_result(THERE)
    tiers.on_reused(held, hashes_of(prompt), prompt)
    assert len(stores(tiers)) == 1, "a server that was started again knows nothing"


def test_a_chunk_is_worth_as_much_as_its_last_block() -> None:
    pool, tiers = make(policy=KeepPrompts())
    prompt = tokens(6)
    compute(pool, tiers, prompt[: 3 * BLOCK])
    [copy] = stores(tiers)
    finish(tiers, copy)
    compute(pool, tiers, prompt, first=3, is_prompt=False)
    assert stores(tiers) == []


def test_blocks_that_were_taken_before_their_turn_stay_away() -> None:
    pool, tiers = make(num_blocks=4)
    pool.release(compute(pool, tiers, tokens(4)))
    taken = pool.allocate(1)
    assert taken is not None
    copies = stores(tiers)
    assert sum(len(copy.block_ids) for copy in copies) == 2
    assert not set(taken) & {block_id for copy in copies for block_id in copy.block_ids}


def test_a_request_asks_for_the_whole_chunks_that_it_lacks() -> None:
    pool, tiers = make()
    prompt = tokens(9)
    hashes = hashes_of(prompt)
    fresh = pool.allocate(8)
    assert fresh is not None
    assert tiers.may_find(3, hashes[3:])
    load = tiers.begin_load("a sequence", hashes[3:], fresh, prompt, 3)
    [copy] = [copy for copy in tiers.take_commands() if isinstance(copy, ChainCopy)]
    assert copy.is_load
    assert (copy.first_block, copy.block_ids, copy.hashes) == (3, fresh[:5], hashes[3:8])
    assert copy.token_ids == prompt[: 8 * BLOCK]
    assert finish(tiers, copy, num_good=3) is load
    assert load is not None
    assert load.num_good == 3
    assert tiers.counters.tier_failures == 0, "to find less than one asked for is no failure"


def test_a_request_with_less_than_a_chunk_asks_for_nothing() -> None:
    pool, tiers = make()
    prompt = tokens(5)
    hashes = hashes_of(prompt)
    fresh = pool.allocate(4)
    assert fresh is not None
    assert not tiers.may_find(4, hashes[4:])
    assert tiers.begin_load("a sequence", hashes[4:], fresh, prompt, 4) is None
    assert tiers.take_commands() == []


def test_each_block_comes_from_one_place() -> None:
    pool, tiers = make(local=3)
    prompt = tokens(6)
    hashes = hashes_of(prompt)
    pool.release(compute(pool, tiers, prompt[: 3 * BLOCK]))
    tiers.start_stores()
    for copy in tiers.take_commands():
        assert not isinstance(copy, ClearCommand)
        tiers.on_result(CopyResult(copy.copy_id, len(copy.block_ids)))
    pool.clear_prefix_index()
    fresh = pool.allocate(6)
    assert fresh is not None
    load = tiers.begin_load("a sequence", hashes, fresh, prompt, 0)
    local, shared = tiers.take_commands()
    assert isinstance(local, CopyCommand)
    assert isinstance(shared, ChainCopy)
    assert list(local.block_ids) + list(shared.block_ids) == fresh
    assert shared.first_block == 3, "in the middle of a chunk: what is here already isn't brought again"
    assert tiers.on_result(CopyResult(shared.copy_id, 3)) is None
    assert tiers.on_result(CopyResult(local.copy_id, 3)) is load
    assert load is not None
    assert load.num_good == 6


def test_nobody_waits_for_a_tier_that_is_gone() -> None:
    pool, tiers = make()
    compute(pool, tiers, tokens(4))
    tiers.on_result(GONE)
    assert stores(tiers) == []
    assert not tiers.may_find(0, hashes_of(tokens(4, seed=1)))
    fresh = pool.allocate(4)
    assert fresh is not None
    assert tiers.begin_load("a sequence", hashes_of(tokens(4, seed=1)), fresh, tokens(4, seed=1), 0) is None


def test_what_was_not_found_is_given_again() -> None:
    pool, tiers = make()
    prompt = tokens(4)
    pool.release(compute(pool, tiers, prompt))
    [copy] = stores(tiers)
    finish(tiers, copy)
    pool.clear_prefix_index()
    fresh = pool.allocate(4)
    assert fresh is not None
    load = tiers.begin_load("a sequence", hashes_of(prompt), fresh, prompt, 0)
    [asked] = [copy for copy in tiers.take_commands() if isinstance(copy, ChainCopy)]
    assert finish(tiers, asked, num_good=2) is load  # the second chunk was evicted there
    worth = [tiers.on_complete(b, h, is_prompt=True) for b, h in zip(fresh, hashes_of(prompt), strict=True)]
    for block_id, block_hash in zip(fresh, hashes_of(prompt), strict=True):
        pool.publish(block_id, block_hash)
    tiers.shared.propose(prompt, hashes_of(prompt), 0, worth)
    [again] = stores(tiers)
    assert again.first_block == 2


def test_clearing_reaches_the_shared_tier() -> None:
    pool, tiers = make()
    compute(pool, tiers, tokens(4))
    tiers.clear()
    assert tiers.take_commands() == [ClearCommand("shared")]
    assert stores(tiers) == []


def test_a_state_from_before_a_clear_does_not_undo_it() -> None:
    _, tiers = make()
    tiers.clear()
    tiers.clear()
    for num_clears in (0, 1):
        tiers.on_result(TierState("shared", True, CHUNK * BLOCK, num_clears))
        assert not tiers.shared.is_available, "its content is still to be removed"
    tiers.on_result(TierState("shared", True, CHUNK * BLOCK, 2))
    assert tiers.shared.is_available
    tiers.on_result(GONE)
    assert not tiers.shared.is_available


def test_nothing_is_requested_while_an_abandoned_load_is_in_flight() -> None:
    pool, tiers = make()
    prompt = tokens(4)
    hashes = hashes_of(prompt)
    pool.release(compute(pool, tiers, prompt))
    [stored] = stores(tiers)
    finish(tiers, stored)
    pool.clear_prefix_index()
    for was_dropped in (False, True):
        fresh = pool.allocate(4)
        load = tiers.begin_load("a sequence", hashes, fresh, prompt, 0)
        assert load is not None and tiers.abandon(load) == fresh
        [copy, cancel] = tiers.take_commands()
        assert cancel == CancelCommand(copy.copy_id, "shared")
        assert not tiers.may_find(0, hashes) and tiers.shared.is_available
        assert pool.count(BlockState.QUARANTINED) == 4
        tiers.on_result(CopyResult(copy.copy_id, 0, was_dropped=was_dropped))
        tiers.check_invariants()
        assert tiers.may_find(0, hashes)
        assert pool.count(BlockState.QUARANTINED) == 0


@pytest.mark.parametrize("seed", range(20))
def test_references_return_under_random_use(seed: int) -> None:
    """Sequences come and go, copies end late, badly, or after the tier was lost: nothing stays referenced."""
    chosen = random.Random(seed)
    pool, tiers = make(num_blocks=24, local=chosen.choice([0, 5]))
    in_flight: list[CopyCommand | ChainCopy] = []
    waiting: dict[int, list[int]] = {}
    for _ in range(300):
        action = chosen.randrange(5)
        prompt = tokens(chosen.randrange(1, 9), seed=chosen.randrange(4))
        hashes = hashes_of(prompt)
        if action == 0 and pool.num_available >= len(hashes):
            cached = pool.match(hashes)
            pool.reference(cached)
            fresh = pool.allocate(len(hashes) - len(cached))
            if fresh is None:
                pool.release(cached)
                continue
            tiers.on_reused(cached, hashes[: len(cached)], prompt)
            owner = [*cached, *fresh]
            load = tiers.begin_load(owner, hashes[len(cached) :], fresh, prompt, len(cached))
            if load is None:
                worth = []
                for block_id, block_hash in zip(fresh, hashes[len(cached) :], strict=True):
                    pool.publish(block_id, block_hash)
                    worth.append(tiers.on_complete(block_id, block_hash, is_prompt=True))
                tiers.shared.propose(prompt, hashes, len(cached), worth)
                pool.release(owner)
            else:
                waiting[id(load)] = owner
        elif action == 1:
            tiers.start_stores()
        elif action == 2 and in_flight:
            copy = in_flight.pop(chosen.randrange(len(in_flight)))
            num_good = chosen.randrange(len(copy.block_ids) + 1)
            done = tiers.on_result(CopyResult(copy.copy_id, num_good, chosen.choice([None, "lost"])))
            if done is not None:
                pool.release(waiting.pop(id(done)))
        elif action == 3:
            tiers.on_result(chosen.choice([THERE, THERE, GONE]))
        in_flight += [copy for copy in tiers.take_commands() if not isinstance(copy, ClearCommand)]
        tiers.check_invariants()
    while in_flight:
        done = tiers.on_result(CopyResult(in_flight.pop().copy_id, 0, "the end"))
        if done is not None:
            pool.release(waiting.pop(id(done)))
    assert not waiting
    assert tiers.is_idle
    assert pool.count(BlockState.REFERENCED) == 0
