"""Freezes and resets of a worker's prefix cache, in its core."""

import pytest

from core_driver import DECODE as PEER
from core_driver import KEY, PREFILL, Worker, grant, of, prefill_request, sent
from splitserve.engine.effects import StartCopy
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.protocol.messages.operators import PrefixCacheReset, ResetPrefixCache, SetFrozen
from splitserve.protocol.messages.requests import LocalRequest, RequestFailed, StepTokens, TokenDelta
from splitserve.protocol.request import Party, RequestKey, Role, SamplingParams
from splitserve.simulation.model import ROUTER

PROMPT = list(range(10))
OTHER = RequestKey("other", 0)


def local(key: RequestKey, prompt: list[int] = PROMPT, max_tokens: int = 5, seconds: float = 60.0) -> LocalRequest:
    return LocalRequest(key, prompt, SamplingParams(max_tokens=max_tokens), seconds)


def tokens(effects: list, key: RequestKey = KEY) -> list[TokenDelta]:
    return [delta for body in sent(effects, StepTokens) for delta in body.deltas if delta.key == key]


@pytest.fixture
def worker() -> Worker:
    return Worker(Role.MIXED, Party("mixed-0", 1), num_slots=16)


class TestFreeze:
    def test_no_step_begins_and_the_ones_in_flight_complete(self, worker: Worker) -> None:
        worker.hear(ROUTER, local(KEY))
        plan = worker.plan()
        assert plan is not None
        worker.hear(ROUTER, SetFrozen(True, 1))
        assert worker.plan() is None and worker.core.load().frozen == 0, "a step is still in flight"
        worker.commit(plan)
        assert worker.plan() is None and worker.core.load().frozen == 1
        worker.hear(ROUTER, SetFrozen(True, 1))
        held = worker.core.state.blocks.pool.count(BlockState.REFERENCED)
        assert held == 3 and worker.core.load().requests_tracked == 1
        worker.hear(ROUTER, SetFrozen(False, 2))
        assert [delta.position for delta in tokens(worker.run())] == [0, 1, 2, 3, 4]
        worker.hear(ROUTER, SetFrozen(False, 2))
        assert worker.core.load().frozen == 0
        worker.assert_idle()

    def test_time_stands_still_for_requests(self, worker: Worker) -> None:
        worker.hear(ROUTER, local(KEY, seconds=10.0))
        worker.tick(9.0)
        worker.hear(ROUTER, SetFrozen(True, 1))
        worker.wait(100.0)
        assert not sent(worker.tick(), RequestFailed)
        worker.hear(ROUTER, SetFrozen(False, 2))
        assert not sent(worker.tick(0.9), RequestFailed), "a second of its ten was left"
        assert sent(worker.tick(0.2), RequestFailed)

    def test_it_ends_with_another_router_and_not_with_its_own(self, worker: Worker) -> None:
        worker.hear(ROUTER, local(KEY))
        worker.hear(ROUTER, SetFrozen(True, 1))
        worker.core.on_routers({ROUTER}, worker.now)
        assert worker.plan() is None
        worker.core.on_routers({Party("router", 99)}, worker.now)
        worker.hear(Party("router", 99), local(RequestKey("another")))
        assert worker.plan() is not None

    def test_it_lasts_while_one_of_two_routers_that_hold_it_is_there(self, worker: Worker) -> None:
        other = Party("router-1", 5)
        worker.hear(ROUTER, local(KEY))
        for router in (ROUTER, other):
            worker.hear(router, SetFrozen(True, 1))
        worker.core.on_routers({Party("router", 99), other}, worker.now)
        assert worker.plan() is None
        worker.core.on_routers({Party("router", 99), Party("router-1", 99)}, worker.now)
        assert worker.plan() is not None

    def test_requests_of_a_router_whose_place_another_has_taken_end(self, worker: Worker) -> None:
        other = Party("router-1", 5)
        worker.core.on_routers({ROUTER, other}, worker.now)
        worker.hear(other, local(KEY))
        worker.core.on_routers({ROUTER, other}, worker.now)
        assert worker.core.load().requests_tracked == 1, "both are there"
        worker.core.on_routers({ROUTER, Party("router-1", 6)}, worker.now)
        assert worker.core.load().requests_tracked == 0

    def test_either_of_two_routers_ends_it(self, worker: Worker) -> None:
        worker.hear(ROUTER, local(KEY))
        for router in (ROUTER, Party("router-1", 5)):
            worker.hear(router, SetFrozen(True, 1))
        worker.hear(ROUTER, SetFrozen(False, 2))
        assert worker.plan() is not None

    def test_the_newest_number_holds_in_whatever_order_the_routers_messages_come(self, worker: Worker) -> None:
        other = Party("router-1", 5)
        worker.hear(ROUTER, local(KEY))
        for router, message in (
            (ROUTER, SetFrozen(True, 1)),
            (other, SetFrozen(True, 3)),
            (ROUTER, SetFrozen(False, 2)),
        ):
            worker.hear(router, message)
            assert worker.plan() is None, "the end of the freeze before"
        assert (worker.core.load().frozen, worker.core.load().freeze_number) == (1, 3)
        worker.hear(ROUTER, SetFrozen(False, 4))
        assert worker.plan() is not None and worker.core.load().freeze_number == 4

    def test_each_number_is_reported_at_once(self, worker: Worker) -> None:
        for number, is_frozen in enumerate((True, False, True, True), start=1):
            worker.hear(ROUTER, SetFrozen(is_frozen, number))
            assert worker.core.take_news() and worker.core.load().freeze_number == number
            assert worker.core.load().frozen == is_frozen
        worker.hear(ROUTER, SetFrozen(True, 4))
        assert not worker.core.take_news(), "it came twice"

    def test_a_router_that_is_not_known_yet_counts_once_it_is(self, worker: Worker) -> None:
        early = Party("router-1", 5)
        worker.hear(ROUTER, local(KEY))
        worker.core.on_routers({ROUTER}, worker.now)
        worker.hear(early, SetFrozen(True, 1))
        assert worker.core.load().frozen == 0, "it may be one of the past"
        worker.core.on_routers({ROUTER, early}, worker.now)
        assert worker.core.load().frozen == 1

    def test_a_request_that_comes_meanwhile_waits(self, worker: Worker) -> None:
        worker.hear(ROUTER, SetFrozen(True, 1))
        worker.hear(ROUTER, local(KEY))
        assert worker.run() == [] or not tokens(worker.run())
        worker.hear(ROUTER, SetFrozen(False, 2))
        assert len(tokens(worker.run())) == 5


class TestReset:
    def test_what_was_cached_is_not_found_any_more(self, worker: Worker) -> None:
        worker.hear(ROUTER, local(KEY, max_tokens=1))
        worker.run()
        blocks = worker.core.state.blocks
        assert blocks.pool.count(BlockState.CACHED) == 2 and blocks.tiers.num_blocks == 2
        [confirmed] = sent(worker.hear(ROUTER, ResetPrefixCache(7)), PrefixCacheReset)
        assert confirmed == PrefixCacheReset(7)
        assert blocks.pool.count(BlockState.CACHED) == 0 and blocks.tiers.num_blocks == 0
        worker.hear(ROUTER, local(OTHER, max_tokens=1))
        [delta] = tokens(worker.run(), OTHER)
        assert delta.num_cached_tokens == 0
        worker.assert_idle()

    def test_requests_in_flight_go_on_and_nothing_that_they_compute_is_found(self, worker: Worker) -> None:
        worker.hear(ROUTER, local(KEY, max_tokens=9))
        for _ in range(2):
            plan = worker.plan()
            assert plan is not None
            worker.commit(plan)
        worker.hear(ROUTER, ResetPrefixCache(1))
        held = worker.core.state.blocks.pool.count(BlockState.REFERENCED)
        assert held == 3, "the blocks in use stay"
        [*_, last] = tokens(worker.run())
        assert last.finish_reason is not None and last.position == 8
        assert worker.core.state.blocks.pool.count(BlockState.CACHED) == 0
        assert worker.core.state.blocks.tiers.num_blocks == 0
        worker.assert_idle()

    def test_a_request_after_it_fills_the_cache_anew(self, worker: Worker) -> None:
        worker.hear(ROUTER, local(KEY, max_tokens=9))
        plan = worker.plan()
        assert plan is not None
        worker.hear(ROUTER, ResetPrefixCache(1))
        worker.hear(ROUTER, local(OTHER, max_tokens=1))
        worker.commit(plan)
        worker.run()
        assert worker.core.state.blocks.pool.count(BlockState.CACHED) == 2
        worker.hear(ROUTER, local(RequestKey("third", 0), max_tokens=1))
        [delta] = tokens(worker.run(), RequestKey("third", 0))
        assert delta.num_cached_tokens == 8

    def test_no_block_of_a_copy_in_flight_is_stored_or_used(self, worker: Worker) -> None:
        worker.hear(ROUTER, local(KEY, max_tokens=1))
        plan = worker.plan()
        while plan is not None:
            worker.commit(plan)
            plan = worker.plan()
        assert worker.copies, "a block is being offloaded"
        worker.hear(ROUTER, ResetPrefixCache(1))
        worker.end_copies()
        assert worker.core.state.blocks.tiers.num_blocks == 0
        worker.assert_idle()

    def test_offered_blocks_stay_until_decode_has_read_them(self) -> None:
        prefill = Worker(Role.PREFILL, PREFILL, num_slots=16)
        prefill.hear(ROUTER, prefill_request())
        prefill.hear(PEER, grant())
        prefill.run()
        pool = prefill.core.state.blocks.pool
        assert pool.count(BlockState.REFERENCED) == 3
        assert of(prefill.hear(ROUTER, ResetPrefixCache(1)), StartCopy), "the host tier is cleared, too"
        assert pool.count(BlockState.REFERENCED) == 3
        prefill.wait(60.0)
        assert pool.count(BlockState.FREE) == pool.num_blocks
        prefill.assert_idle()
