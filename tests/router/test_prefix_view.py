"""The router's view of where prefixes are: batches add up, gaps are noticed, the cheaper place is worth more."""

from array import array

import pytest

from splitserve.protocol.block_hash import extend_hashes
from splitserve.protocol.kv_event_batch import KVEvent, KVEventBatch
from splitserve.protocol.request import Party, Role
from splitserve.router.placement import prefix_view
from splitserve.router.placement.policies import RequestShape, Snapshot, least_loaded
from splitserve.router.placement.prefix_view import (
    HASHES_AT_ONCE,
    PrefixMatch,
    PrefixView,
    PromptHashes,
    helper_of,
)
from worker_views import view

ROOT = b"r" * 16
ONE, OTHER = Party("mixed-0", 1), Party("mixed-1", 2)
PROMPT = list(range(100, 141))  # ten blocks of four, and a token


def chain(token_ids: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, ROOT, token_ids, 4)
    return hashes


HASHES = chain(PROMPT)


def batch(party: Party, number: int, *events: KVEvent, is_snapshot: bool = False) -> KVEventBatch:
    return KVEventBatch(party.engine_id, party.incarnation, number, 4, ROOT, is_snapshot, list(events))


def stored(tier: str, hashes: list[bytes]) -> KVEvent:
    return KVEvent("stored", tier, hashes)


def test_batches_add_up() -> None:
    prefixes = PrefixView()
    assert prefixes.apply(batch(ONE, 3, stored("device", HASHES[:2])))
    assert prefixes.matches(PromptHashes(PROMPT)) == {}, "what comes before the snapshot says nothing"
    prefixes.apply(batch(ONE, 3, stored("device", HASHES[:4]), stored("host", HASHES[2:6]), is_snapshot=True))
    assert prefixes.matches(PromptHashes(PROMPT)) == {ONE: PrefixMatch(24, 23)}
    prefixes.apply(batch(ONE, 4, KVEvent("evicted", "device", HASHES[1:3])))
    assert prefixes.matches(PromptHashes(PROMPT)) == {ONE: PrefixMatch(4, 4)}
    prefixes.apply(batch(OTHER, 9, stored("disk", HASHES), is_snapshot=True))
    assert prefixes.matches(PromptHashes(PROMPT))[OTHER] == PrefixMatch(40, 24)
    shorter = PromptHashes(PROMPT[:40])
    assert prefixes.matches(shorter)[OTHER] == PrefixMatch(36, 22), "the last token is always computed"
    assert prefixes.num_blocks(ONE) == {"device": 2, "host": 4}
    prefixes.forget(ONE)
    assert set(prefixes.matches(PromptHashes(PROMPT))) == {OTHER}


def test_a_batch_that_is_missing_makes_the_worker_unknown_until_its_snapshot() -> None:
    prefixes = PrefixView()
    prefixes.apply(batch(ONE, 1, stored("device", HASHES), is_snapshot=True))
    assert not prefixes.apply(batch(ONE, 3))
    assert prefixes.matches(PromptHashes(PROMPT)) == {}
    assert prefixes.apply(batch(ONE, 4))
    prefixes.apply(batch(ONE, 5, stored("host", HASHES[:1]), is_snapshot=True))
    assert prefixes.matches(PromptHashes(PROMPT))[ONE].num_tokens == 4


def test_an_incarnation_holds_nothing_of_the_one_before() -> None:
    prefixes = PrefixView()
    prefixes.apply(batch(ONE, 1, stored("device", HASHES), is_snapshot=True))
    assert set(prefixes.matches(PromptHashes(PROMPT))) == {ONE}
    prefixes.apply(batch(Party(ONE.engine_id, 5), 1, is_snapshot=True))
    prefixes.forget(ONE)
    assert prefixes.matches(PromptHashes(PROMPT)) == {}


def test_a_snapshot_that_says_nothing_new_takes_no_work() -> None:
    prefixes = PrefixView()
    prefixes.apply(batch(ONE, 3, stored("device", HASHES), is_snapshot=True))
    parts = prefixes.apply_in_parts(batch(ONE, 3, stored("device", HASHES), is_snapshot=True))
    assert parts is not None and list(parts) == []
    assert prefixes.matches(PromptHashes(PROMPT))[ONE].num_tokens == 40


def test_a_worker_with_too_many_blocks_is_known_by_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_view, "MAX_HASHES_PER_WORKER", 4)
    prefixes = PrefixView()
    assert prefixes.apply(batch(ONE, 3, stored("device", HASHES[:3]), stored("host", HASHES), is_snapshot=True))
    assert prefixes.num_blocks(ONE) == {"device": 3, "host": 1}
    assert prefixes.apply(batch(ONE, 4, KVEvent("evicted", "host", HASHES), stored("device", HASHES[3:4])))
    assert prefixes.matches(PromptHashes(PROMPT)) == {ONE: PrefixMatch(16, 16)}


def test_blocks_of_a_lost_worker_leave_the_index_bit_by_bit_and_count_for_nobody() -> None:
    prefixes, others = PrefixView(), [number.to_bytes(16, "big") for number in range(3 * HASHES_AT_ONCE)]
    prefixes.apply(batch(ONE, 1, stored("device", HASHES + others), is_snapshot=True))
    prefixes.forget(ONE)
    assert prefixes.matches(PromptHashes(PROMPT)) == {}
    prefixes.apply(batch(OTHER, 1, stored("device", HASHES[:2]), is_snapshot=True))
    assert prefixes.matches(PromptHashes(PROMPT)) == {OTHER: PrefixMatch(8, 8)}
    prefixes.tidy(HASHES_AT_ONCE)
    assert len(prefixes._announced) > 2 * HASHES_AT_ONCE
    for _ in range(3):
        prefixes.tidy(HASHES_AT_ONCE)
    assert len(prefixes._announced) == 2
    assert prefixes.matches(PromptHashes(PROMPT)) == {OTHER: PrefixMatch(8, 8)}


def test_a_worker_that_is_lost_amid_its_snapshot_is_not_known_by_the_rest() -> None:
    prefixes, many = PrefixView(), [number.to_bytes(16, "big") for number in range(3 * HASHES_AT_ONCE)]
    parts = prefixes.apply_in_parts(batch(ONE, 1, stored("device", many + HASHES), is_snapshot=True))
    assert parts is not None and next(parts) == HASHES_AT_ONCE
    prefixes.forget(ONE)
    assert list(parts) == [] and prefixes.num_blocks(ONE) == {}
    assert len(prefixes._announced) == 0


def test_who_helps() -> None:
    matches = {ONE: PrefixMatch(12, 12), OTHER: PrefixMatch(20, 18)}
    assert helper_of(ONE, matches, 8) == OTHER
    assert helper_of(ONE, matches, 9) is None
    assert helper_of(OTHER, matches, 1) is None
    assert helper_of(Party("mixed-7", 7), matches, 8) == OTHER
    assert helper_of(ONE, {}, 8) is None


def test_a_prefix_weighs_as_much_as_the_load_that_it_saves() -> None:
    shape = RequestShape(num_prompt_tokens=100, max_tokens=10)
    busy = view("m0", Role.MIXED, context_tokens=90, prefix_match_tokens=96)
    idle = view("m1", Role.MIXED)
    placed = least_loaded(Snapshot((busy, idle)), shape)
    assert [party.engine_id for party in placed.parties] == ["m0"]
    busier = view("m0", Role.MIXED, context_tokens=200, prefix_match_tokens=96)
    placed = least_loaded(Snapshot((busier, idle)), shape)
    assert [party.engine_id for party in placed.parties] == ["m1"]


def test_a_long_prompt_is_hashed_in_parts_to_the_same_chain() -> None:
    """Workers of two block sizes; parts of an earlier prompt are known."""
    sizes = {Party("decode-0", 1): 16, Party("decode-1", 1): 64}
    view = PrefixView()
    for party, block_size in sizes.items():
        view.note_sent(party, b"root", PromptHashes(array("i", range(40_000))), block_size, 1 << 16)
    token_ids = array("i", [*range(30_000), *range(70_000)])
    prompt = PromptHashes(token_ids)
    parts = sum(1 for _ in view.hash_in_parts(prompt))
    assert parts == sum((len(token_ids) - 1) // block_size // HASHES_AT_ONCE for block_size in sizes.values())
    for block_size in sizes.values():
        expected: list[bytes] = []
        extend_hashes(expected, b"root", token_ids[:-1], block_size)
        assert prompt.chain(b"root", block_size) == expected
    matches = {party: 30_000 // block_size * block_size for party, block_size in sizes.items()}
    assert view.matches(prompt) == {party: PrefixMatch(count, count) for party, count in matches.items()}
    assert not list(view.hash_in_parts(prompt))
