"""Graceful drain: new requests are refused, what is here goes on, and the end comes exactly when nothing is left."""

import pytest

from core_driver import DECODE, KEY, PREFILL, Worker, decode_request, grant, prefill_request, sent
from splitserve.engine.drain import SETTLE_SECONDS, Drain
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.handover import Grant, Offer, Release, Withdrawn
from splitserve.protocol.messages.requests import DecodeRequest, FailureCode, LocalRequest, RequestFailed, StepTokens
from splitserve.protocol.request import Party, RequestKey, Role, SamplingParams
from splitserve.router.links.membership import Membership
from splitserve.simulation.model import PROTOCOL, ROUTER
from worker_views import info

NEW = RequestKey("new", 0)


class TestWhenItMayGo:
    def drain(self) -> Drain:
        drain = Drain(drain_seconds=5.0)
        assert not drain.is_over(True, 0.0) and drain.next_deadline() == float("inf")
        drain.begin(1.0)
        return drain

    def test_it_goes_once_it_was_idle_for_a_moment(self) -> None:
        drain = self.drain()
        assert not drain.is_over(False, 1.0)
        assert not drain.is_over(True, 2.0)
        assert drain.next_deadline() == pytest.approx(2.0 + SETTLE_SECONDS)
        assert drain.is_over(True, 2.0 + SETTLE_SECONDS)
        assert drain.reason == "idle after 1.00 s"

    def test_a_request_that_comes_in_between_starts_the_moment_anew(self) -> None:
        drain = self.drain()
        drain.is_over(True, 2.0)
        assert not drain.is_over(False, 2.1)
        assert not drain.is_over(True, 2.3)
        assert drain.is_over(True, 2.3 + SETTLE_SECONDS)

    def test_it_goes_at_the_latest_when_its_time_is_over(self) -> None:
        drain = self.drain()
        assert drain.next_deadline() == 6.0
        assert not drain.is_over(False, 5.9)
        assert drain.is_over(False, 6.0)
        assert drain.reason == "not idle within 5 s"


class TestPrefill:
    @pytest.fixture
    def prefill(self) -> Worker:
        return Worker(Role.PREFILL, PREFILL)

    def test_new_requests_are_refused_whatever_comes_first(self, prefill: Worker) -> None:
        prefill.core.drain()
        (failed,) = sent(prefill.hear(ROUTER, prefill_request(NEW)), RequestFailed)
        assert isinstance(failed, RequestFailed) and failed.code is FailureCode.OVERLOADED
        assert sent(prefill.hear(DECODE, grant(NEW)), Withdrawn)
        other = RequestKey("other", 0)
        assert sent(prefill.hear(DECODE, grant(other)), Withdrawn)
        assert sent(prefill.hear(ROUTER, prefill_request(other)), RequestFailed)
        assert prefill.core.is_idle
        prefill.assert_idle()

    def test_a_grant_that_waits_for_its_request_is_answered(self, prefill: Worker) -> None:
        prefill.hear(DECODE, grant())
        assert not prefill.core.is_idle
        prefill.core.drain()
        assert sent(prefill.tick(), Withdrawn)
        assert prefill.core.is_idle

    def test_what_is_offered_is_served_until_decode_has_read_it(self, prefill: Worker) -> None:
        prefill.hear(ROUTER, prefill_request())
        prefill.core.drain()
        prefill.hear(DECODE, grant())  # the grant of a request that was here before
        for _ in range(2):
            plan = prefill.plan()
            assert plan is not None
            effects = prefill.commit(plan)
        assert [offer.last for offer in sent(effects, Offer) if isinstance(offer, Offer)] == [True]
        assert not prefill.core.is_idle
        prefill.wait(PROTOCOL.lease_seconds * 0.9)
        assert not prefill.core.is_idle
        prefill.hear(DECODE, Release(KEY, True))
        assert prefill.core.is_idle
        prefill.assert_idle()

    def test_what_nobody_reads_ends_with_its_lease(self, prefill: Worker) -> None:
        prefill.hear(ROUTER, prefill_request())
        prefill.hear(DECODE, grant())
        plan = prefill.plan()
        assert plan is not None
        prefill.core.drain()
        assert not prefill.core.is_idle, "a step is in flight"
        prefill.commit(plan)
        prefill.wait(PROTOCOL.lease_seconds + 0.2)
        assert prefill.core.is_idle


class TestDecode:
    @pytest.fixture
    def decode(self) -> Worker:
        return Worker(Role.DECODE, DECODE)

    def test_running_requests_finish_and_new_ones_are_refused(self, decode: Worker) -> None:
        decode.hear(ROUTER, LocalRequest(KEY, [1, 2, 3], SamplingParams(max_tokens=3), 60.0))
        decode.core.drain()
        local = LocalRequest(RequestKey("other", 0), [1], SamplingParams(max_tokens=1), 60.0)
        for request in (decode_request(NEW), local):
            assert sent(decode.hear(ROUTER, request), RequestFailed)
        tokens = 0
        while (plan := decode.plan()) is not None:
            assert not decode.core.is_idle
            tokens += len(sent(decode.commit(plan), StepTokens))
        assert tokens == 3
        assert decode.core.is_idle
        decode.assert_idle()

    def test_a_request_that_waits_for_its_kv_still_gets_it(self, decode: Worker) -> None:
        decode.hear(ROUTER, decode_request())
        decode.core.drain()
        assert sent(decode.wait(PROTOCOL.renew_interval_seconds * 1.5), Grant), "its lease isn't renewed any more"
        assert not decode.core.is_idle


class TestMembership:
    def test_a_draining_worker_gets_nothing_new_and_keeps_what_it_has(self) -> None:
        members, worker = Membership(5.0, 60.0), info("a", role=Role.MIXED)
        members.register(worker.party, worker, 0.0)
        members.link_up(worker.party)
        assert members.drain(worker.party) and not members.drain(worker.party)
        assert members.snapshot(0.0).workers == ()
        members.link_up(worker.party)
        members.register(worker.party, worker, 1.0)
        assert members.heartbeat(worker.party, WorkerLoad(), 2.0) is WorkerState.DRAINING
        assert members.snapshot(2.0).workers == ()
        record = members.get(worker.party)
        assert record is not None and record.state is WorkerState.DRAINING
        assert members.expire(7.1) == [worker.party], "its requests must hear of its death"

    def test_a_lost_worker_and_an_unknown_one_do_not_drain(self) -> None:
        members, worker = Membership(5.0, 60.0), info("a", role=Role.MIXED)
        assert not members.drain(Party("nobody", 1))
        members.register(worker.party, worker, 0.0)
        members.lose(worker.party)
        assert not members.drain(worker.party)


def test_the_refusals_name_the_reason() -> None:
    decode = Worker(Role.DECODE, DECODE)
    decode.core.drain()
    request = decode_request(NEW)
    assert isinstance(request, DecodeRequest)
    (failed,) = sent(decode.hear(ROUTER, request), RequestFailed)
    assert isinstance(failed, RequestFailed) and "draining" in failed.message
