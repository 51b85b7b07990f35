"""Salts of the prefix cache: requests find the KV of requests with the same salt only, on workers and in the router."""

import dataclasses
from array import array

import pytest

from scheduled_sequences import BLOCK_SIZE, make_blocks, make_sequence
from splitserve.protocol.block_hash import extend_hashes, salted_root
from splitserve.protocol.kv_event_batch import DEVICE, KVEvent, KVEventBatch
from splitserve.protocol.request import Party
from splitserve.router.placement.prefix_view import PrefixView, PromptHashes

PROMPT = list(range(3, 3 + 4 * BLOCK_SIZE + 1))
ROOT = b"root"


def salted(name: str, salt: str):
    return dataclasses.replace(make_sequence(name, PROMPT), cache_salt=salt)


@pytest.mark.parametrize(("first", "second"), [("", "a"), ("a", ""), ("a", "b"), ("a", "a\x00"), ("ab", "a")])
def test_other_salts_find_nothing_and_the_same_one_does(first, second):
    blocks = make_blocks()
    assert reserve_and_compute(blocks, salted("one", first)) == 0
    assert reserve_and_compute(blocks, salted("two", second)) == 0
    assert reserve_and_compute(blocks, salted("three", first)) == 4 * BLOCK_SIZE
    assert reserve_and_compute(blocks, salted("four", second)) == 4 * BLOCK_SIZE


def reserve_and_compute(blocks, sequence) -> int:
    assert blocks.reserve(sequence)
    found = sequence.num_cached_tokens
    sequence.num_computed = len(sequence.token_ids)
    blocks.publish_computed(sequence)
    blocks.give_back(sequence)
    return found


def test_blocks_that_a_peer_handed_over_are_found_with_their_salt_only():
    blocks = make_blocks()
    pulled = salted("pulled", "a")
    assert blocks.reserve(pulled, pulls=True)
    blocks.publish_verified(pulled, [4])
    assert reserve_and_compute(blocks, salted("other", "b")) == 0
    assert reserve_and_compute(blocks, salted("none", "")) == 0
    assert reserve_and_compute(blocks, salted("same", "a")) == 4 * BLOCK_SIZE


def test_an_empty_salt_changes_no_hash():
    assert salted_root(ROOT, "") == ROOT
    roots = {salted_root(ROOT, salt) for salt in ("", "a", "b", "A", "a ")}
    assert len(roots) == 5 and all(len(root) == 16 for root in roots - {ROOT})


def test_the_router_looks_for_the_salted_prefix():
    worker = Party("w0", 7)
    blocks: list[bytes] = []
    extend_hashes(blocks, salted_root(ROOT, "tenant"), PROMPT, BLOCK_SIZE)
    view = PrefixView()
    event = KVEvent("stored", DEVICE, blocks)
    view.apply(
        KVEventBatch(
            engine_id=worker.engine_id, incarnation=worker.incarnation, number=1, root_hash=ROOT,
            block_size=BLOCK_SIZE, is_snapshot=True, events=[event],
        )
    )  # fmt: skip
    prompt = array("i", PROMPT)
    assert view.matches(PromptHashes(prompt, "tenant"))[worker].num_tokens == 4 * BLOCK_SIZE
    assert view.matches(PromptHashes(prompt)) == {} and view.matches(PromptHashes(prompt, "other")) == {}
