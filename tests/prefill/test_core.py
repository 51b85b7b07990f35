"""Races in a prefill worker: messages that are late, early, repeated, lost or meant for somebody else."""

from collections.abc import Iterator

import pytest

from core_driver import DECODE, KEY, PREFILL, Worker, grant, of, prefill_request, sent
from splitserve.engine.effects import Effect, Incident, Serve
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.protocol.handover.reads import Readers
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.handover import (
    Grant,
    GrantDelayed,
    Offer,
    PeerHello,
    PeerRefused,
    Release,
    Withdrawn,
)
from splitserve.protocol.messages.requests import Abort, RequestFailed, StepTokens
from splitserve.protocol.request import Party, RequestKey, Role
from splitserve.protocol.step import StepPlan
from splitserve.simulation.model import BLOCK_SIZE, LAYOUT, PROTOCOL, ROUTER


@pytest.fixture
def prefill() -> Iterator[Worker]:
    yield Worker(Role.PREFILL, PREFILL)


class TestPrefill:
    @pytest.mark.parametrize("grant_first", [True, False])
    def test_it_computes_once_request_and_grant_are_here_in_any_order(self, prefill: Worker, grant_first: bool) -> None:
        steps = [(DECODE, grant()), (ROUTER, prefill_request())]
        first, second = steps if grant_first else steps[::-1]
        prefill.hear(*first)
        assert prefill.plan() is None
        prefill.hear(*second)
        plan = prefill.plan()
        assert plan is not None
        (offer,) = sent(prefill.commit(plan), Offer)
        assert isinstance(offer, Offer) and (len(offer.spans[0].blocks), offer.num_tokens) == (2, 8)

    def start(self, prefill: Worker, **options: int) -> StepPlan:
        prefill.hear(DECODE, grant())
        prefill.hear(ROUTER, prefill_request(**options))
        plan = prefill.plan()
        assert plan is not None
        return plan

    def finish(self, prefill: Worker, **options: int) -> list[Effect]:
        prefill.commit(self.start(prefill, **options))
        plan = prefill.plan()
        assert plan is not None
        return prefill.commit(plan)

    def test_blocks_stay_until_they_are_released(self, prefill: Worker) -> None:
        effects = self.finish(prefill)
        (offer,) = sent(effects, Offer)
        assert isinstance(offer, Offer) and offer.last and offer.first_tokens == [3]
        (tokens,) = sent(effects, StepTokens)
        assert isinstance(tokens, StepTokens) and tokens.deltas[0].token_ids == [3]
        assert prefill.core.state.blocks.pool.count(BlockState.REFERENCED) == 3
        effects = prefill.hear(DECODE, Release(KEY, True))
        assert sent(effects, RequestFailed) == []
        prefill.assert_idle()

    def test_a_mismatch_drops_the_prefix_cache(self, prefill: Worker) -> None:
        self.finish(prefill)
        prefill.hear(DECODE, Release(KEY, True))
        assert prefill.core.load().blocks_cached == 2
        other = RequestKey("r1")
        prefill.hear(DECODE, grant(other))
        prefill.hear(ROUTER, prefill_request(other))
        for _ in range(2):
            plan = prefill.plan()
            if plan is not None:
                prefill.commit(plan)
        assert of(prefill.hear(DECODE, Release(other, False, mismatch=True)), Incident)
        assert prefill.core.load().blocks_cached == 0
        prefill.assert_idle()

    def test_a_release_by_somebody_else_changes_nothing(self, prefill: Worker) -> None:
        self.finish(prefill)
        prefill.hear(Party("decode-1", 5), Release(KEY, True))
        prefill.hear(Party(DECODE.engine_id, DECODE.incarnation + 1), Release(KEY, True))
        assert prefill.core.state.blocks.pool.count(BlockState.REFERENCED) == 3

    @pytest.mark.parametrize("when", ["in the first step", "between steps", "offered"])
    def test_what_decode_gives_up_is_no_failure_of_the_request(self, prefill: Worker, when: str) -> None:
        plan = self.start(prefill)
        effects: list[Effect] = []
        if when == "in the first step":
            effects += prefill.hear(DECODE, Release(KEY, False))
            assert prefill.core.state.blocks.pool.count(BlockState.REFERENCED) == 3, "the step still writes to them"
            effects += prefill.commit(plan)
        else:
            prefill.commit(plan)
            if when == "offered":
                second = prefill.plan()
                assert second is not None
                prefill.commit(second)
            effects += prefill.hear(DECODE, Release(KEY, False))
        assert sent(effects, RequestFailed) == [], "decode computes the prompt itself"
        prefill.assert_idle()

    def test_a_lease_that_runs_out_ends_the_handover_alone(self, prefill: Worker) -> None:
        prefill.commit(self.start(prefill))
        effects = prefill.wait(PROTOCOL.lease_seconds + 0.2)
        assert sent(effects, RequestFailed) == []
        assert [type(body) for body in sent(effects, Withdrawn)] == [Withdrawn]
        assert prefill.core.load().handover_failures == 1
        prefill.assert_idle()

    def test_a_release_that_comes_before_its_request_ends_it(self, prefill: Worker) -> None:
        prefill.hear(DECODE, Release(KEY, False))
        prefill.hear(ROUTER, prefill_request())
        prefill.assert_idle()

    def test_an_abort_that_comes_before_its_request_ends_it(self, prefill: Worker) -> None:
        prefill.hear(ROUTER, Abort(KEY))
        prefill.hear(ROUTER, prefill_request())
        effects = prefill.hear(DECODE, grant())
        (withdrawn,) = sent(effects, Withdrawn)
        assert isinstance(withdrawn, Withdrawn) and withdrawn.attempt_over, "decode needn't compute it either"
        prefill.assert_idle()

    def test_an_abort_during_a_step(self, prefill: Worker) -> None:
        plan = self.start(prefill)
        effects = prefill.hear(ROUTER, Abort(KEY))
        (withdrawn,) = sent(effects, Withdrawn)
        assert isinstance(withdrawn, Withdrawn) and withdrawn.attempt_over
        assert prefill.core.state.blocks.pool.count(BlockState.REFERENCED) == 3
        effects = prefill.commit(plan)
        assert sent(effects, Offer) == [] and sent(effects, StepTokens) == []
        prefill.assert_idle()

    def test_an_abort_of_what_is_offered_waits_for_the_release_or_the_lease(self, prefill: Worker) -> None:
        self.finish(prefill)
        prefill.hear(ROUTER, Abort(KEY))
        assert prefill.core.state.blocks.pool.count(BlockState.REFERENCED) == 3, "decode may be reading"
        prefill.wait(PROTOCOL.lease_seconds + 0.2)
        prefill.assert_idle()

    def test_a_lost_withdrawal_is_repeated_with_the_next_renewal(self, prefill: Worker) -> None:
        self.finish(prefill)
        prefill.hear(ROUTER, Abort(KEY))
        effects = prefill.hear(DECODE, grant())
        (withdrawn,) = sent(effects, Withdrawn)
        assert isinstance(withdrawn, Withdrawn) and withdrawn.attempt_over, "as it was said the first time"
        assert sent(effects, Offer) == []

    def test_a_first_token_that_ends_the_request_cancels_the_handover(self, prefill: Worker) -> None:
        effects = self.finish(prefill, max_tokens=1)
        (withdrawn,) = sent(effects, Withdrawn)
        assert isinstance(withdrawn, Withdrawn) and withdrawn.attempt_over
        assert not any(isinstance(offer, Offer) and offer.last for offer in sent(effects, Offer))
        prefill.hear(DECODE, Release(KEY, False))
        prefill.assert_idle()

    def test_a_failed_step_fails_its_requests_and_publishes_nothing(self, prefill: Worker) -> None:
        self.start(prefill)
        prefill.core.fail_step("out of luck", prefill.now)
        effects = prefill.tick()
        (failed,) = sent(effects, RequestFailed)
        assert isinstance(failed, RequestFailed) and failed.message == "out of luck"
        assert prefill.core.state.blocks.pool.count(BlockState.CACHED) == 0
        prefill.assert_idle()

    def test_repeated_and_misdirected_messages_are_counted_and_dropped(self, prefill: Worker) -> None:
        prefill.hear(ROUTER, prefill_request())
        prefill.hear(ROUTER, prefill_request())
        prefill.hear(ROUTER, StepTokens([]))
        stranger = Envelope(ROUTER, Party(PREFILL.engine_id, 99), prefill_request(RequestKey("r2")))
        prefill.core.handle(stranger, prefill.now)
        assert prefill.core.load().stale_messages == 3
        assert list(prefill.core.state.sequences) == [KEY]

    def test_a_grant_of_somebody_else_does_not_start_the_request(self, prefill: Worker) -> None:
        prefill.hear(ROUTER, prefill_request())
        prefill.hear(Party("decode-1", 5), grant())
        assert prefill.plan() is None
        prefill.hear(DECODE, grant())
        assert prefill.plan() is not None

    @pytest.mark.parametrize(
        "bad",
        [
            Grant(KEY, 11, 0, 10.0),
            Grant(KEY, 10, 10, 10.0),
            Grant(KEY, 10, 3, 10.0),
            Grant(KEY, 10, -4, 10.0),
            Grant(KEY, 10, 0, float("nan")),
            Grant(KEY, 10, 0, float("inf")),
            Grant(KEY, 10, 0, 0.0),
        ],
    )
    def test_a_grant_that_cannot_be_right_fails_the_request(self, prefill: Worker, bad: Grant) -> None:
        prefill.hear(ROUTER, prefill_request())
        effects = prefill.hear(DECODE, bad)
        assert len(sent(effects, RequestFailed)) == len(sent(effects, Withdrawn)) == 1
        prefill.assert_idle()

    def test_parked_grants_expire(self, prefill: Worker) -> None:
        prefill.hear(DECODE, grant())
        assert prefill.core.load().requests_tracked == 1
        prefill.wait(PROTOCOL.lease_seconds + 0.2)
        prefill.assert_idle()

    def test_it_polls_for_readers_only_while_there_is_something_to_read(self, prefill: Worker) -> None:
        assert of(prefill.hear(DECODE, PeerHello(LAYOUT)), Serve) == [Serve(Readers.READING)]
        prefill.hear(ROUTER, prefill_request())  # waits for its grant
        effects = prefill.wait(PROTOCOL.dead_after_seconds / 2)
        prefill.hear(DECODE, GrantDelayed(KEY))
        effects += prefill.wait(PROTOCOL.dead_after_seconds / 2 + 0.2)
        assert of(effects, Serve) == [Serve(Readers.CONNECTING), Serve(Readers.NONE)]
        assert of(prefill.hear(DECODE, grant()), Serve) == [Serve(Readers.READING)]
        assert of(prefill.wait(3.0), Serve) == []
        assert of(prefill.hear(DECODE, Release(KEY, False)), Serve) == [Serve(Readers.NONE)]

    def test_a_peer_with_another_layout_is_refused_by_name(self, prefill: Worker) -> None:
        other = LayoutRecord("sim", "w", "bfloat16", BLOCK_SIZE, 1, 1, 1)
        (refused,) = sent(prefill.hear(DECODE, PeerHello(other)), PeerRefused)
        assert isinstance(refused, PeerRefused) and "dtype" in refused.reason
