"""Prefixes that the router knows because it sent them: conversations without events, and the index against a model."""

import random
from array import array
from dataclasses import dataclass, field

import pytest

from splitserve.protocol.block_hash import extend_hashes
from splitserve.protocol.kv_event_batch import KVEvent, KVEventBatch
from splitserve.protocol.request import Party
from splitserve.router.placement.block_index import OTHER_WORTH, TIER_WORTH
from splitserve.router.placement.prefix_view import PrefixView, PromptHashes

ROOT = b"r" * 16
SIZE = 4
SENT = "sent"
PARTIES = [Party(f"m{number}", 1) for number in range(4)]


def sent(view: PrefixView, party: Party, token_ids: list[int], num_blocks: int = 100) -> None:
    view.note_sent(party, ROOT, PromptHashes(token_ids), SIZE, num_blocks)


def test_what_was_sent_is_found_and_not_certain() -> None:
    view, prompt = PrefixView(), list(range(41))
    sent(view, PARTIES[0], prompt)
    (match,) = view.matches(PromptHashes(prompt)).values()
    assert (match.num_tokens, match.worth_tokens) == (40, 40)
    assert view.matches(PromptHashes(prompt), certain=True) == {}
    assert view.num_blocks(PARTIES[0]) == {}


def test_a_turn_finds_the_output_of_the_turn_before() -> None:
    view, prompt, output = PrefixView(), list(range(10)), [7, 8, 9, 10, 11, 12]
    hashes = PromptHashes(prompt)
    hashes.chain(ROOT, SIZE)
    view.note_sent(PARTIES[0], ROOT, hashes.extended(output), SIZE, 100)
    (match,) = view.matches(PromptHashes([*prompt, *output, 1, 2, 3, 4])).values()
    assert match.num_tokens == 12, "KV of the last output token is never computed"
    assert hashes.extended(output).chain(ROOT, SIZE)[:2] == hashes.chain(ROOT, SIZE)


def test_packed_prompts_have_the_hashes_of_lists() -> None:
    prompt, output = [*range(11)], [2**31 - 1, *range(500, 515)]
    packed = PromptHashes(array("i", prompt))
    whole = PromptHashes([*prompt, *output]).chain(ROOT, SIZE)
    assert packed.chain(ROOT, SIZE) == whole[: len(packed.chain(ROOT, SIZE))]
    assert packed.extended(output).chain(ROOT, SIZE) == whole


def test_what_must_have_been_evicted_is_forgotten_ends_first() -> None:
    view = PrefixView()
    sent(view, PARTIES[0], list(range(41)), num_blocks=15)
    sent(view, PARTIES[0], list(range(100, 133)), num_blocks=15)
    first, second = (view.matches(PromptHashes(prompt)) for prompt in (list(range(41)), list(range(100, 133))))
    assert second[PARTIES[0]].num_tokens == 32
    assert first[PARTIES[0]].num_tokens == (15 - 8) * SIZE


@pytest.mark.parametrize("seed", range(5))
def test_what_is_awaited_is_what_was_sent_and_not_computed(seed: int) -> None:
    """Prompts share beginnings; what was computed counts until it is forgotten, whatever leads to that."""
    chosen, view, party = random.Random(seed), PrefixView(), PARTIES[0]
    prompts = [[chosen.randrange(2) for _ in range(chosen.randrange(5, 40))] for _ in range(12)]
    computed: set[bytes] = set()
    for _ in range(150):
        hashes = PromptHashes(chosen.choice(prompts))
        chain = hashes.chain(ROOT, SIZE)
        act = chosen.choice(["send", "send", "compute", "forget"] if chosen.random() < 0.1 else ["send", "compute"])
        if act == "send":
            view.note_sent(party, ROOT, hashes, SIZE, 25)
        elif act == "forget":
            view.forget_sent()
        else:
            view.note_computed(party, hashes)
            computed |= set(chain)
        sent_now = set(view.sent_to(party, 1000))
        computed &= sent_now
        match = view.matches(hashes).get(party)
        if match is not None:
            known = [block for block in chain[: match.num_tokens // SIZE] if block in computed]
            assert view.num_computed(party, hashes, match.num_tokens) == len(known) * SIZE


def test_all_that_was_sent_can_be_forgotten() -> None:
    view, prompt = PrefixView(), list(range(41))
    chain = list(PromptHashes(prompt).chain(ROOT, SIZE))
    stored = [KVEvent("stored", "device", chain[:3])]
    view.apply(KVEventBatch(PARTIES[0].engine_id, PARTIES[0].incarnation, 1, SIZE, ROOT, True, stored))
    for party in PARTIES[:2]:
        sent(view, party, prompt)
    view.forget_sent()
    assert {party: match.num_tokens for party, match in view.matches(PromptHashes(prompt)).items()} == {PARTIES[0]: 12}
    sent(view, PARTIES[1], prompt)
    assert view.matches(PromptHashes(prompt))[PARTIES[1]].num_tokens == 40


def test_an_eviction_counts_for_what_was_sent_as_well() -> None:
    view, prompt = PrefixView(), list(range(41))
    view.apply(KVEventBatch("m0", 1, 1, SIZE, ROOT, True, []))
    sent(view, PARTIES[0], prompt)
    chain = PromptHashes(prompt).chain(ROOT, SIZE)
    view.apply(KVEventBatch("m0", 1, 2, SIZE, ROOT, False, [KVEvent("stored", "device", list(chain))]))
    view.apply(KVEventBatch("m0", 1, 3, SIZE, ROOT, False, [KVEvent("evicted", "device", list(chain[2:]))]))
    assert view.matches(PromptHashes(prompt))[PARTIES[0]].num_tokens == 2 * SIZE


@dataclass
class Model:
    """The index as sets: blocks by worker and tier."""

    held: dict[Party, dict[str, set[bytes]]] = field(default_factory=dict)

    def match(self, party: Party, chain: list[bytes], *, certain: bool) -> tuple[int, float]:
        count, worth = 0, 0.0
        for block_hash in chain:
            tiers = [tier for tier, held in self.held[party].items() if block_hash in held]
            worths = [
                1.0 if tier == SENT else TIER_WORTH.get(tier, OTHER_WORTH)
                for tier in tiers
                if not (certain and tier == SENT)
            ]
            if not worths:
                break
            count, worth = count + 1, worth + max(worths)
        return count * SIZE, round(worth * SIZE)


@pytest.mark.parametrize("seed", range(20))
def test_the_index_agrees_with_sets(seed: int) -> None:
    chosen, view, model = random.Random(seed), PrefixView(), Model()
    prompts = [[chosen.randrange(2) for _ in range(chosen.randrange(4, 40))] for _ in range(12)]
    numbers = dict.fromkeys(PARTIES, 0)
    for party in PARTIES:
        view.apply(KVEventBatch(party.engine_id, 1, 0, SIZE, ROOT, True, []))
        model.held[party] = {tier: set() for tier in ("device", "host", "disk", "cloud", SENT)}
    for _ in range(200):
        party, chain = chosen.choice(PARTIES), []
        prompt = chosen.choice(prompts)
        extend_hashes(chain, ROOT, prompt[:-1], SIZE)
        held = model.held[party]
        if chosen.random() < 0.3:
            sent(view, party, prompt, num_blocks=10_000)
            held[SENT] |= set(chain)
            continue
        tier, some = chosen.choice(["device", "host", "disk", "cloud"]), [h for h in chain if chosen.random() < 0.7]
        kind = chosen.choice(["stored", "stored", "evicted"])
        numbers[party] += 1
        view.apply(KVEventBatch(party.engine_id, 1, numbers[party], SIZE, ROOT, False, [KVEvent(kind, tier, some)]))  # type: ignore[arg-type]
        if kind == "stored":
            held[tier] |= set(some)
        else:
            held[tier] -= set(some)
            held[SENT] -= set(some) if tier == "device" else set()
        for certain in (False, True):
            found = view.matches(PromptHashes(prompt), certain=certain)
            for each in PARTIES:
                expected = model.match(each, chain, certain=certain)
                match = found.get(each)
                tokens, worth = (match.num_tokens, match.worth_tokens) if match else (0, 0)
                assert tokens == expected[0] and (certain or worth == expected[1])
    for party in PARTIES:
        view.forget(party)
    assert not len(view._announced) and not len(view._sent) and not view._holdings, (
        "nothing is left of workers that have gone"
    )
