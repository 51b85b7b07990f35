"""Second tokens that prefill draws while decode reads the prompt's KV, on either side of the hand-over."""

from typing import Any

import pytest

from core_driver import DECODE, KEY, PREFILL, PROMPT, Worker, grant, prefill_request, sent
from splitserve.engine.cache_groups import TableRule
from splitserve.engine.effects import Effect
from splitserve.protocol.messages.handover import Grant, Offer, Release, Withdrawn
from splitserve.protocol.messages.marks import MarkKind
from splitserve.protocol.messages.requests import Abort, PeerRef, PrefillRequest, RequestFailed, StepTokens, TokenDelta
from splitserve.protocol.request import RequestKey, Role, SamplingParams
from splitserve.protocol.step import StepPlan
from splitserve.simulation.model import BLOCK_SIZE, PROTOCOL, ROUTER, layout_of

OTHER = RequestKey("other", 0)
WINDOW = 6


def make_prefill(**options: Any) -> Worker:
    return Worker(Role.PREFILL, PREFILL, second_token_at_prefill=True, **options)


def request(prompt: list[int], key: RequestKey = KEY, max_tokens: int = 5) -> PrefillRequest:
    return PrefillRequest(key, prompt, SamplingParams(max_tokens=max_tokens), PeerRef(DECODE, ""), 60.0)


def draw_first(prefill: Worker, prompt: list[int], **options: int) -> list[Effect]:
    """Compute a prompt up to its first token, 3."""
    prefill.hear(DECODE, Grant(KEY, len(prompt), 0, PROTOCOL.lease_seconds))
    prefill.hear(ROUTER, request(prompt, **options))
    while True:
        plan = prefill.plan()
        assert plan is not None
        effects = prefill.commit(plan)
        if plan.chunks[0].sample is not None:
            return effects


def planned(worker: Worker) -> StepPlan:
    plan = worker.plan()
    assert plan is not None
    return plan


def deltas(effects: list[Effect]) -> list[TokenDelta]:
    return [delta for tokens in sent(effects, StepTokens) for delta in tokens.deltas]  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_tokens", range(9, 14))
def test_the_last_offer_covers_the_first_token_and_names_the_second(num_tokens: int) -> None:
    prefill = make_prefill()
    effects = draw_first(prefill, list(range(num_tokens)))
    assert [(delta.position, delta.token_ids) for delta in deltas(effects)] == [(0, [3])]
    assert not any(offer.last for offer in sent(effects, Offer))  # type: ignore[attr-defined]
    plan = planned(prefill)
    assert [(chunk.start, chunk.token_ids) for chunk in plan.chunks] == [(num_tokens, [3])]
    effects = prefill.commit(plan, token=4)
    (delta,) = deltas(effects)
    assert (delta.position, delta.token_ids, [mark.kind for mark in delta.marks]) == (1, [4], [MarkKind.SECOND])
    (offer,) = sent(effects, Offer)
    assert isinstance(offer, Offer) and offer.last
    assert (offer.num_tokens, offer.first_tokens, offer.second_token) == (num_tokens + 1, [3], 4)
    assert offer.spans[0].first_block + len(offer.spans[0].blocks) == num_tokens // BLOCK_SIZE + 1
    assert prefill.plan() is None
    prefill.hear(DECODE, Release(KEY, True))
    prefill.assert_idle()


def test_all_full_blocks_are_offered_before_the_second_token_is_drawn() -> None:
    effects = draw_first(make_prefill(), list(range(2 * BLOCK_SIZE)))
    (offer,) = sent(effects, Offer)
    assert isinstance(offer, Offer) and (offer.num_tokens, offer.last) == (2 * BLOCK_SIZE, False)


def last_offers(effects: list[Effect]) -> list[Offer]:
    return [offer for offer in sent(effects, Offer) if isinstance(offer, Offer) and offer.last]


def test_another_prompt_comes_first() -> None:
    prefill = make_prefill()
    for key in (KEY, OTHER):
        prefill.hear(DECODE, grant(key))
        prefill.hear(ROUTER, prefill_request(key))
    offers = last_offers(prefill.run())
    assert [(offer.key, offer.num_tokens, offer.second_token) for offer in offers] == [
        (KEY, len(PROMPT), None),
        (OTHER, len(PROMPT) + 1, 3),
    ]


def test_a_prompt_that_waits_for_its_grant_counts_as_another_one() -> None:
    prefill = make_prefill()
    prefill.hear(ROUTER, prefill_request(OTHER))
    draw_first(prefill, PROMPT)
    assert prefill.plan() is None, "the prompt is handed over"


def test_a_prompt_that_arrives_meanwhile_waits_for_that_step_alone() -> None:
    prefill = make_prefill()
    draw_first(prefill, PROMPT)
    prefill.hear(DECODE, Grant(OTHER, 8, 0, PROTOCOL.lease_seconds))
    prefill.hear(ROUTER, request(list(range(30, 38)), OTHER))
    first, second = planned(prefill), planned(prefill)
    assert [len(chunk.token_ids) for chunk in first.chunks] == [1]
    assert [(chunk.start, len(chunk.token_ids)) for chunk in second.chunks] == [(0, 8)]


def test_several_choices_are_handed_over_with_their_first_tokens() -> None:
    prefill = make_prefill()
    prefill.hear(DECODE, grant())
    several = PrefillRequest(KEY, PROMPT, SamplingParams(max_tokens=5), PeerRef(DECODE, ""), 60.0, siblings=[OTHER])
    prefill.hear(ROUTER, several)
    (offer,) = last_offers(prefill.run())
    assert offer.num_tokens == len(PROMPT) and offer.second_token is None


def test_a_prompt_without_room_for_another_token_is_handed_over() -> None:
    prefill = make_prefill(num_blocks=4)
    prefill.hear(DECODE, grant(OTHER))
    prefill.hear(ROUTER, prefill_request(OTHER))
    prefill.run()  # three blocks are on offer
    (offer,) = last_offers(draw_first(prefill, list(range(30, 30 + BLOCK_SIZE))))
    assert offer.num_tokens == BLOCK_SIZE and offer.second_token is None


@pytest.mark.parametrize(("num_tokens", "second"), [(61, 3), (62, None)])
def test_the_end_of_prefills_context_does_not_end_the_answer(num_tokens: int, second: int | None) -> None:
    prefill = make_prefill()  # of 64 tokens; that of decode may be longer
    effects = [*draw_first(prefill, [1] * num_tokens, max_tokens=30), *prefill.run()]
    assert all(delta.finish_reason is None for delta in deltas(effects))
    assert [offer.second_token for offer in last_offers(effects)] == [second]


def test_a_second_token_that_is_the_last_one_ends_the_attempt() -> None:
    prefill = make_prefill()
    draw_first(prefill, PROMPT, max_tokens=2)
    effects = prefill.commit(planned(prefill))
    (withdrawn,) = sent(effects, Withdrawn)
    assert isinstance(withdrawn, Withdrawn) and withdrawn.attempt_over
    assert [delta.finish_reason for delta in deltas(effects)] == ["length"]
    prefill.hear(DECODE, Release(KEY, False))
    prefill.assert_idle()


@pytest.mark.parametrize("how", ["aborted", "released", "failed", "lease"])
def test_an_end_while_the_second_token_is_drawn_leaves_nothing(how: str) -> None:
    prefill = make_prefill()
    draw_first(prefill, PROMPT)
    plan = planned(prefill)
    if how == "aborted":
        prefill.hear(ROUTER, Abort(KEY))
    elif how == "released":
        prefill.hear(DECODE, Release(KEY, False))
    elif how == "lease":
        prefill.tick(PROTOCOL.lease_seconds + 0.1)
    if how == "failed":
        prefill.core.fail_step("boom", prefill.now)
        assert sent(prefill.tick(), RequestFailed)
    else:
        assert deltas(prefill.commit(plan)) == []
    prefill.hear(DECODE, Release(KEY, False))
    prefill.assert_idle()


@pytest.mark.parametrize("num_tokens", range(9, 14))
def test_blocks_of_a_window_stay_until_decode_has_read_them(num_tokens: int) -> None:
    prefill = make_prefill(layout=layout_of(WINDOW))
    offers = [*sent(draw_first(prefill, list(range(num_tokens))), Offer)]
    offers += sent(prefill.commit(planned(prefill)), Offer)
    pool, needed = prefill.core.state.blocks.pools[1], TableRule(BLOCK_SIZE, WINDOW).first_needed(num_tokens)
    offered = [block for offer in offers if isinstance(offer, Offer) for block in offer.spans[1].blocks]
    assert len({block.block_id for block in offered}) == num_tokens // BLOCK_SIZE + 1 - needed
    assert all(pool.num_holders(block.block_id) for block in offered)
    prefill.hear(DECODE, Release(KEY, True))
    prefill.assert_idle()
