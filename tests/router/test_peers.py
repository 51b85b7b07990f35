"""Two routers' cores that exchange reports by hand: sums, limits, prefixes, late messages."""

import random
from typing import Any

import pytest

from splitserve.benchmarks.router.instant_worker import DEFAULT_LAYOUT
from splitserve.protocol.block_hash import root_hash
from splitserve.protocol.cluster_report import RequestRates
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.routers import MAX_HASHES, RouterReport, SentPrefixes
from splitserve.router.http.api_error import ApiError
from splitserve.router.links.membership import Membership
from splitserve.router.peers import peers
from splitserve.router.peers.sums import joined_metrics, summed_rates
from splitserve.router.placement.prefix_view import PrefixView, PromptHashes
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.effects import TellRouters
from splitserve.router.requests.events import (
    Cancel,
    FromRouter,
    MeetRouters,
    PauseMode,
    PauseRequests,
    ResetCaches,
    ResumeRequests,
    RouterLost,
)
from splitserve.router.requests.queue.tenants import Tenants
from two_routers import BLOCK, TENANT, WORKERS, Router, deliver, two_routers


@pytest.fixture
def pair() -> tuple[Router, Router]:
    return two_routers()


Pair = tuple[Router, Router]


def test_a_policy_sees_the_sum_until_the_other_router_is_lost(pair: Pair) -> None:
    one, other = pair
    other.begin("a")
    other.begin("b")
    other.report()
    assert not one.loads()
    deliver(other, one)
    assert one.loads() == other.loads() == {"mixed-0": 1, "mixed-1": 1}
    one.begin("c")
    assert sum(one.loads().values()) == 3 and sum(other.loads().values()) == 2
    one.handle(RouterLost(other.party))
    assert sum(one.loads().values()) == 1


def test_ended_requests_leave_the_sum_with_the_next_report(pair: Pair) -> None:
    one, other = pair
    other.begin("a")
    other.report()
    deliver(other, one)
    other.handle(Cancel("a"))
    other.report()
    deliver(other, one)
    assert not one.loads()


def test_a_silent_router_is_forgotten(pair: Pair) -> None:
    one, other = pair
    other.begin("a")
    other.report()
    deliver(other, one)
    one.now += peers.LOST_SECONDS - 0.1
    one.report()
    assert one.loads()
    one.now += 0.2
    one.report()
    assert not one.loads()


def test_reports_that_were_on_their_way_when_their_router_was_lost_do_not_count(pair: Pair) -> None:
    one, other = pair
    other.begin("a")
    other.report()
    one.handle(RouterLost(other.party))
    deliver(other, one)
    assert not one.loads()
    one.now += peers.LATE_SECONDS + 0.1  # it lives after all
    other.report()
    deliver(other, one)
    assert one.loads()


def test_a_worker_that_registers_late_has_the_others_charges_at_once(pair: Pair) -> None:
    one, _ = pair
    fresh = Router("router-1", "router", incarnation=2, workers=())
    one.begin("a")
    one.report()
    deliver(one, fresh)
    for worker in WORKERS:
        fresh.join(worker)
    assert fresh.loads() == one.loads()


def test_a_large_prompt_is_reported_at_once_and_a_small_one_is_not(pair: Pair) -> None:
    one, _ = pair
    one.now += 0.05
    one.begin("small", 100)
    assert not one.told
    one.begin("large", peers.LARGE_PROMPT_TOKENS)
    reports = [each.body for each in one.told if isinstance(each.body, RouterReport)]
    assert len(reports) == 1 and sum(use.num_requests for use in reports[0].workers) == 2


class TestLimits:
    def test_requests_in_flight_are_bounded_together(self, pair: Pair) -> None:
        one, other = pair
        other.core.admission.admit(3)
        other.report()
        deliver(other, one)
        one.core.admission.admit(1)
        with pytest.raises(ApiError, match="4 requests are in flight and 4 are allowed"):
            one.core.admission.admit(1)

    def test_a_tenants_requests_are_bounded_together(self, pair: Pair) -> None:
        one, other = pair
        other.core.usage.admit(TENANT, 2, other.now)
        other.report()
        deliver(other, one)
        with pytest.raises(ApiError, match="2 requests of team are in flight and 2 are allowed"):
            one.core.usage.admit(TENANT, 1, one.now)
        one.handle(RouterLost(other.party))
        one.core.usage.admit(TENANT, 1, one.now)

    def test_a_tenants_tokens_count_once_and_everywhere(self, pair: Pair) -> None:
        one, other = pair
        for _ in range(3):
            other.core.usage.note_tokens(TENANT, 150, other.now)
            other.report()
            deliver(other, one)
            deliver(one, other)
        one.core.usage.admit(TENANT, 1, one.now)
        other.core.usage.note_tokens(TENANT, 150, other.now)
        other.report()
        deliver(other, one)
        with pytest.raises(ApiError, match="has used its 600 tokens per minute"):
            one.core.usage.admit(TENANT, 1, one.now)

    def test_a_router_that_starts_takes_the_level_over_and_not_all_tokens_of_the_past(self, pair: Pair) -> None:
        one, _ = pair
        one.core.usage.note_tokens(TENANT, 1000, one.now)
        one.now += 90.0  # the limit has given 900 of them back
        one.report()
        fresh = Router("router-1", "router", incarnation=2)
        fresh.now = one.now
        deliver(one, fresh)
        [(_, _, here, level)] = fresh.core.usage.uses(Tenants((TENANT,)), fresh.now)
        assert (here, level) == (0, pytest.approx(100.0))


class TestPrefixes:
    def held(self, router: Router, num_tokens: int) -> dict[str, int]:
        return {
            party.engine_id: match.num_tokens
            for party, match in router.prefixes.matches(PromptHashes([1] * num_tokens)).items()
        }

    def test_a_prompt_that_one_has_sent_is_known_to_the_other(self, pair: Pair) -> None:
        one, other = pair
        one.begin("a", 5 * BLOCK)
        [worker] = one.loads()
        one.report()
        deliver(one, other)
        assert self.held(other, 5 * BLOCK) == {worker: 4 * BLOCK}
        other.report()
        assert not [each for each in other.told if isinstance(each.body, SentPrefixes)], "it isn't passed on"

    def test_one_that_starts_learns_what_the_others_have_sent_before_its_workers_register(self, pair: Pair) -> None:
        one, _ = pair
        one.begin("a", 5 * BLOCK)
        [worker] = one.loads()
        one.report()
        one.told.clear()
        fresh = Router("router-1", "router", incarnation=2, workers=())
        fresh.handle(MeetRouters())
        deliver(fresh, one)
        deliver(one, fresh)
        for each in WORKERS:
            fresh.join(each)
        assert self.held(fresh, 5 * BLOCK) == {worker: 4 * BLOCK}

    def test_one_that_was_heard_before_there_was_a_connection_to_it_is_told_with_the_connection(
        self, pair: Pair
    ) -> None:
        one, _ = pair
        one.begin("a", 5 * BLOCK)
        [worker] = one.loads()
        fresh = Router("router-1", "router", incarnation=2)
        fresh.handle(MeetRouters())
        deliver(fresh, one)
        one.told.clear()  # not sent
        one.handle(MeetRouters("router-1"))
        deliver(one, fresh)
        assert self.held(fresh, 5 * BLOCK) == {worker: 4 * BLOCK}

    def test_messages_are_bounded_and_beginnings_of_prompts_are_kept(self) -> None:
        one = Router("router", "router-1")
        hashes = [number.to_bytes(16, "big") for number in range(peers.MAX_SENT_PER_REPORT + 100)]
        assert one.prefixes.on_sent is not None
        one.prefixes.on_sent(WORKERS[0], hashes)
        one.handle(MeetRouters())
        sent = [each.body for each in one.told if isinstance(each.body, SentPrefixes)]
        assert all(len(each.hashes) <= MAX_HASHES for each in sent)
        assert [block for each in sent for block in each.hashes] == hashes[100:]

    def test_what_was_sent_before_a_reset_does_not_count_after_it(self, pair: Pair) -> None:
        one, other = pair
        one.begin("a", 5 * BLOCK)
        one.report()
        late, one.told = one.told, []
        other.handle(ResetCaches())
        for each in late:
            other.handle(FromRouter(one.party, each.body))
        assert not self.held(other, 5 * BLOCK)
        assert root_hash(DEFAULT_LAYOUT)


def test_a_lone_router_tells_nothing_and_has_no_timer() -> None:
    config = RouterConfig(model="m", served_model_name="m")
    core = RouterCore(config, Membership(5.0, 60.0), PrefixView(), random.Random(0))
    effects: list[Any] = []
    for event in (PauseRequests(PauseMode.WAIT), ResumeRequests(), ResetCaches()):
        effects += core.handle(event, 1.0)
    assert not [effect for effect in effects if isinstance(effect, TellRouters)]
    assert not core.timers()


def test_metrics_of_several_routers_are_one_text_with_each_family_once() -> None:
    head = "# HELP a Text.\n# TYPE a counter\n"
    own = head + 'a{router="router"} 1.0\n# HELP w W.\n# TYPE w gauge\nw{worker="x"} 3.0\n'
    other = head + 'a{router="router-1"} 2.0\n'
    assert joined_metrics(own.encode(), [other.encode()]).decode() == (
        head + 'a{router="router"} 1.0\na{router="router-1"} 2.0\n# HELP w W.\n# TYPE w gauge\nw{worker="x"} 3.0\n'
    )


def test_rates_are_summed_and_quantiles_are_not() -> None:
    def rates(requests: float, median: float | None, p99: float | None) -> RequestRates:
        return RequestRates(
            seconds=10.0,
            num_in_flight=2,
            num_waiting=1,
            requests_per_second=requests,
            failures_per_second=0.5,
            prompt_tokens_per_second=100.0,
            output_tokens_per_second=10.0,
            ttft_seconds_median=median,
            ttft_seconds_p99=p99,
        )

    found = summed_rates([rates(3.0, 0.1, 0.2), rates(1.0, 0.5, 0.9), rates(0.0, None, None)])
    assert (found.num_in_flight, found.requests_per_second, found.prompt_tokens_per_second) == (6, 4.0, 300.0)
    assert found.ttft_seconds_median == pytest.approx(0.2)
    assert found.ttft_seconds_p99 == pytest.approx(0.9)
