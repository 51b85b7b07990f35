"""The router's core by itself: events in, effects out, no event loop."""

from array import array

import pytest

from router_core import DEADLINE_SECONDS, DECODE, MIXED, PREFILL, Core
from splitserve.protocol.messages.requests import (
    Abort,
    DecodeRequest,
    LocalRequest,
    PrefillRequest,
    StepTokens,
    TokenDelta,
)
from splitserve.protocol.request import FinishReason, Party, RequestKey, Role, SamplingParams
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.links.worker_record import Charges
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.effects import (
    Begun,
    CancelTimer,
    Count,
    CountTokens,
    Deliver,
    Observe,
    Refuse,
    Send,
    SetTimer,
    Stale,
    TellLimits,
)
from splitserve.router.requests.events import (
    AskLimits,
    Cancel,
    Close,
    FromWorker,
    NotSent,
    StopStringReached,
    Submit,
    Timer,
    TimerKind,
    WorkerLost,
)


def test_a_request_goes_to_a_pair_and_back_to_its_client() -> None:
    core = Core(PREFILL, DECODE)
    request = core.submit()
    assert core.of(Begun) == [Begun("r")]
    assert core.sent == [(DECODE, DecodeRequest), (PREFILL, PrefillRequest)]
    assert core.of(SetTimer) == [SetTimer(Timer(TimerKind.DEADLINE, "r"), core.now + DEADLINE_SECONDS)]
    assert core.charges(PREFILL) == Charges(1, 3, 0) and core.charges(DECODE) == Charges(1, 0, 3)
    core.now += 0.25
    core.tokens(PREFILL, request.state.key, 0, 7)
    assert core.of(CountTokens) == [CountTokens(1, 0.25, are_first=True)]
    assert core.charges(PREFILL) == Charges(0, 0, 0)
    core.now += 0.5
    core.tokens(DECODE, request.state.key, 1, 8, finish_reason=FinishReason.STOP)
    [deliver] = core.of(Deliver)
    assert deliver.update.token_ids == [8] and deliver.update.ended
    assert CountTokens(1, 0.5, are_first=False) in core.effects
    assert Count("requests_finished", ("disaggregated", "local", "no_handover_report")) in core.effects
    assert core.of(CancelTimer) == [CancelTimer(Timer(TimerKind.DEADLINE, "r"))]
    assert not core.core.requests and core.charges(DECODE) == Charges()
    core.tokens(DECODE, request.state.key, 2, 9)
    assert [type(effect) for effect in core.effects] == [Stale]


def test_a_lone_decode_worker_takes_a_request_which_counts_as_meant_for_a_pair() -> None:
    core = Core(DECODE)
    request = core.submit()
    assert core.sent == [(DECODE, LocalRequest)] and request.state.was_disaggregated


def test_a_request_whose_worker_was_lost_goes_on_as_soon_as_another_is_ready() -> None:
    core = Core(MIXED)
    request = core.submit()
    core.tokens(MIXED, request.state.key, 0, 7, 8)
    core.lose(MIXED)
    assert request.is_stranded and not core.sent
    [retry] = core.of(SetTimer)
    assert retry.timer == Timer(TimerKind.RETRY, "r") and core.now < retry.at <= core.now + 0.05
    core.fire(TimerKind.RETRY)
    assert not core.sent and core.of(SetTimer)[0].at > core.now + 0.05, "it waits for longer each time"
    core.now += 1.0
    other = Party("mixed-1", 4)
    core.join(other, Role.MIXED)
    [send] = core.of(Send)
    assert send.to == other and send.body.output_ids == [7, 8] and send.body.key.attempt == 1
    assert send.body.deadline_seconds == DEADLINE_SECONDS - 1.0
    assert CancelTimer(retry.timer) in core.effects
    core.join(Party("mixed-2", 5), Role.MIXED)
    assert not core.sent, "once is enough"


def test_a_worker_that_is_back_aborts_what_others_do_now() -> None:
    core, other = Core(MIXED), Party("mixed-1", 4)
    first = core.submit().state.key
    core.join(other, Role.MIXED)
    core.lose(MIXED)
    assert core.sent == [(other, LocalRequest)]
    assert core.join(MIXED) == [Send(MIXED, Abort(first))]
    core.lose(MIXED)
    assert core.join(MIXED) == [], "once is enough"


def test_a_prefill_worker_that_is_back_is_not_told_to_abort_what_decode_goes_on_with() -> None:
    core = Core(PREFILL, DECODE)
    first, second = core.submit("first").state.key, core.submit("second").state.key
    core.tokens(DECODE, first, 0, 7)
    core.lose(PREFILL)
    assert Send(DECODE, Abort(second)) in core.effects and Send(DECODE, Abort(first)) not in core.effects
    assert core.join(PREFILL) == [Send(PREFILL, Abort(second))]


def test_a_message_that_a_link_does_not_take_fails_the_attempt() -> None:
    core = Core(PREFILL, DECODE, MIXED)
    core.submit()
    [decode, prefill] = core.of(Send)
    core.handle(NotSent(decode.to, decode.body))
    assert core.sent[0] == (PREFILL, Abort) and core.sent[1] == (MIXED, LocalRequest)
    assert core.handle(NotSent(prefill.to, prefill.body)) == [], "its attempt is over"
    assert core.handle(NotSent(PREFILL, Abort(decode.body.key))) == []


def test_a_stranded_request_ends_at_its_deadline() -> None:
    core = Core(MIXED)
    request = core.submit()
    core.lose(MIXED)
    core.fire(TimerKind.DEADLINE)
    [deliver] = core.of(Deliver)
    assert "no worker came that could go on" in deliver.update.failure.message
    assert {cancel.timer.kind for cancel in core.of(CancelTimer)} == {TimerKind.DEADLINE, TimerKind.RETRY}
    assert request.state.ended and core.core.timers() == set()


class TestNewcomers:
    def test_they_wait_for_a_worker_in_order(self) -> None:
        core = Core()
        core.handle(AskLimits("q", core.now))
        core.submit("first")
        core.submit("second")
        assert core.of(SetTimer) == [SetTimer(Timer(TimerKind.WAIT, "second"), core.now + 10.0)]
        core.join(MIXED)
        [told] = core.of(TellLimits)
        assert told.question_id == "q" and told.limits.vocab_size == 100
        assert [begun.request_id for begun in core.of(Begun)] == ["first", "second"]
        assert core.core.timers() == {Timer(TimerKind.DEADLINE, "first"), Timer(TimerKind.DEADLINE, "second")}

    @pytest.mark.parametrize("deadline_share", [0.0, 0.25])
    def test_they_are_refused_when_no_worker_came(self, deadline_share: float) -> None:
        core = Core(no_worker_wait_seconds=600.0 if deadline_share else 10.0)
        core.submit()
        wait_seconds = deadline_share * DEADLINE_SECONDS or 10.0
        assert core.of(SetTimer) == [SetTimer(Timer(TimerKind.WAIT, "r"), core.now + wait_seconds)]
        assert core.fire(TimerKind.WAIT) == [Refuse("r", "no worker is ready")]
        assert core.fire(TimerKind.WAIT) == []

    def test_one_that_arrived_too_long_ago_does_not_wait(self) -> None:
        core = Core()
        assert core.handle(AskLimits("q", core.now - 10.0)) == [Refuse("q", "no worker is ready")]

    def test_those_beyond_the_bound_are_refused_and_those_that_leave_make_room(self) -> None:
        core = Core(max_requests_waiting=1)
        core.submit("first")
        core.submit("second")
        [refuse] = core.effects
        assert refuse == Refuse("second", "no worker is ready, and 1 requests wait for one already")
        core.handle(Cancel("first"))
        assert core.effects == [CancelTimer(Timer(TimerKind.WAIT, "first"))]
        core.submit("third")
        core.join(MIXED)
        assert [begun.request_id for begun in core.of(Begun)] == ["third"]

    def test_bodies_and_prompts_that_wait_take_bounded_memory(self) -> None:
        core, mib = Core(max_waiting_mib=1), 1 << 20
        core.handle(AskLimits("larger than all", core.now, num_bytes=3 * mib))
        assert [type(effect) for effect in core.effects] == [SetTimer], "a single one may be larger"
        refused = Refuse("q", "no worker is ready, and large requests wait for one already")
        assert core.handle(AskLimits("q", core.now, num_bytes=1)) == [refused]
        core.handle(Cancel("larger than all"))
        core.handle(AskLimits("half", core.now, num_bytes=mib // 2))
        prompt = array("i", [1]) * (mib // 8)
        for request_id in ("the other half", "q"):
            sampling = SamplingParams(max_tokens=1)
            core.handle(Submit(ActiveRequest.new(request_id, prompt, sampling, core.now)))
        assert core.effects == [refused]
        core.fire(TimerKind.WAIT, "half")
        assert core.effects == [Refuse("half", "no worker is ready")]
        core.handle(AskLimits("another", core.now, num_bytes=mib // 2))
        assert [type(effect) for effect in core.effects] == [SetTimer]


def test_clients_end_their_requests() -> None:
    core = Core(MIXED)
    for event in (Cancel("r"), StopStringReached("r")):
        request = core.submit()
        core.handle(event)
        assert core.sent == [(MIXED, Abort)] and core.of(Deliver)[0].update.ended and request.state.ended
        assert core.handle(event) == [], "harmless after the end"


def test_a_router_that_closes_ends_all() -> None:
    core = Core(MIXED)
    core.submit("runs")
    core.lose(MIXED)
    core.submit("waits")
    core.handle(Close())
    assert core.of(Refuse) == [Refuse("waits", "the router is shutting down")]
    assert core.of(Deliver)[0].update.failure.reason == "shutdown"
    core.submit("late")
    assert core.effects == [Refuse("late", "the router is shutting down")]


def test_effects_name_metrics_that_there_are() -> None:
    core, seen = Core(PREFILL, DECODE), set[str]()
    request = ActiveRequest.new("r", [1, 2, 3], SamplingParams(max_tokens=5), core.now)
    metrics = RouterMetrics()
    for event in (
        Submit(request),
        FromWorker(PREFILL, StepTokens([TokenDelta(RequestKey("r"), 0, [7])])),
        FromWorker(DECODE, StepTokens([TokenDelta(RequestKey("r"), 1, [8])])),
        WorkerLost(DECODE, "is gone"),
        Cancel("r"),
    ):
        core.handle(event)
        for effect in core.effects:
            if isinstance(effect, Count | Observe):
                assert hasattr(metrics, effect.metric), effect
                seen.add(effect.metric)
    assert seen >= {"e2e_seconds", "requests_finished", "prompt_tokens"}
