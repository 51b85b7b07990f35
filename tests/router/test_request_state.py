"""The router's state machine of one request: order, deduplication, ends, failures. Pure, with hypothesis."""

from hypothesis import given
from hypothesis import strategies as st

from splitserve.protocol.messages.requests import FailureCode, HandoverReport, RequestFailed, TokenDelta
from splitserve.protocol.request import FinishReason, Party, RequestKey
from splitserve.router.placement.policies import Disaggregated, Local
from splitserve.router.requests.outcome import outcome, route
from splitserve.router.requests.state import NOTHING, Failure, FailureReason, RequestPhase, RequestState
from splitserve.router.requests.timeline.timeline import Timeline
from splitserve.router.requests.token_sequence import MAX_HELD_TOKENS

P, D, M = Party("p0", 1), Party("d0", 2), Party("m0", 3)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
REPORT = HandoverReport(prefill="p0", transport="x", blocks=2, bytes=8, cached_tokens=0, reads=1)


def begin(max_tokens=8, placement=None):
    state = RequestState("r", max_tokens)
    state.begin(placement or Disaggregated(prefill=P, decode=D))
    return state


def delta(state, position, ids, finish=None, **fields):
    return TokenDelta(state.key, position, list(ids), finish_reason=finish, **fields)


def failed(state, code=FailureCode.HANDOVER, message="peer gone"):
    return RequestFailed(state.key, code, message)


def test_decode_repeats_the_first_token_and_it_comes_out_once():
    state = begin(max_tokens=3)
    first = state.on_delta(P, delta(state, 0, [5], num_cached_tokens=4))
    assert list(first.token_ids) == [5] and state.phase is RequestPhase.STREAMING
    assert list(state.on_delta(D, delta(state, 0, [5, 6], handover=REPORT)).token_ids) == [6]
    last = state.on_delta(D, delta(state, 2, [7], LENGTH))
    assert list(last.token_ids) == [7] and last.finish_reason is LENGTH and last.ended and last.aborts == ()
    assert state.num_cached_tokens == 4
    assert outcome(state) == ("disaggregated", "disaggregated", "ok")
    timeline = Timeline(0.0)
    timeline.begin_attempt(Disaggregated(prefill=P, decode=D), 0.0)
    assert route(state, timeline)["handover"]["blocks"] == 2


def test_decode_may_be_heard_before_prefill():
    state = begin(max_tokens=2)
    assert list(state.on_delta(D, delta(state, 0, [5])).token_ids) == [5]
    assert state.on_delta(P, delta(state, 0, [5])) is NOTHING
    assert state.on_delta(D, delta(state, 1, [6], LENGTH)).ended


def test_first_token_that_ends_the_request_aborts_decode():
    state = begin()
    update = state.on_delta(P, delta(state, 0, [2], STOP))
    assert update.ended and update.finish_reason is STOP and update.aborts == (D,)
    assert outcome(state) == ("disaggregated", "local", "ended_with_first_token")


def test_a_second_token_from_prefill_may_end_the_request():
    state = begin(max_tokens=2)
    assert list(state.on_delta(P, delta(state, 0, [2])).token_ids) == [2]
    update = state.on_delta(P, delta(state, 1, [3], LENGTH))
    assert update.ended and update.aborts == (D,)
    assert outcome(state) == ("disaggregated", "local", "ended_with_second_token")


def test_a_gap_is_held_until_it_is_filled():
    state = begin()
    assert state.on_delta(D, delta(state, 2, [7])) is NOTHING
    assert state.on_delta(D, delta(state, 3, [8], STOP)) is NOTHING
    update = state.on_delta(D, delta(state, 0, [5, 6]))
    assert list(update.token_ids) == [5, 6, 7, 8] and update.finish_reason is STOP and update.ended


def test_held_tokens_are_bounded():
    state = begin(max_tokens=10 * MAX_HELD_TOKENS)
    update = state.on_delta(D, delta(state, 1, range(MAX_HELD_TOKENS)))
    assert update is NOTHING
    update = state.on_delta(D, delta(state, MAX_HELD_TOKENS + 1, [1]))
    assert update.failure.reason is FailureReason.CONTRADICTION


def test_contradictions_fail_the_request_and_stop_its_workers():
    for messages in (
        [(P, 0, [5], None), (D, 0, [6], None)],  # another first token
        [(D, 1, [5], None), (D, 1, [6], None)],  # another held token
        [(D, 0, [5] * 9, None)],  # beyond max_tokens
        [(D, -1, [5], None)],
        [(D, 1, [5], STOP), (D, 2, [6], None)],  # a token after the end
        [(D, 2, [5], None), (D, 1, [6], STOP)],  # an end before a token
    ):
        state = begin()
        update = None
        for sender, position, ids, finish in messages:
            update = state.on_delta(sender, delta(state, position, ids, finish))
        assert update.failure.reason is FailureReason.CONTRADICTION, messages
        assert set(update.aborts) == {P, D} and state.phase is RequestPhase.FAILED
        assert outcome(state) == ("disaggregated", "failed", "contradiction")


def test_stale_messages_are_dropped():
    state = begin()
    other_attempt = TokenDelta(RequestKey("r", 1), 0, [5])
    assert state.on_delta(P, other_attempt) is None
    assert state.on_delta(M, delta(state, 0, [5])) is None  # not a worker of this attempt
    assert state.on_delta(Party("p0", 99), delta(state, 0, [5])) is None  # another incarnation
    assert state.on_request_failed(M, failed(state)) is None
    assert state.on_worker_lost(M, "died") is None
    state.cancel()
    assert state.on_delta(P, delta(state, 0, [5])) is None
    assert state.on_request_failed(P, failed(state)) is None
    assert state.on_worker_lost(P, "died") is None


def test_a_failed_attempt_aborts_the_survivor_and_may_be_retried():
    state = begin()
    update = state.on_request_failed(P, failed(state, FailureCode.OVERLOADED, "queue full"))
    assert update.retry and not update.ended and update.aborts == (D,)
    assert state.history[-1].failure == Failure(FailureReason.OVERLOADED, "worker p0: queue full")
    assert state.history[-1].culprit == P
    assert state.on_delta(D, delta(state, 0, [5])) is None, "nobody is at work between attempts"
    state = begin()
    update = state.on_worker_lost(D, "died")
    assert update.retry and update.aborts == (P,) and state.history[-1].culprit == D
    assert state.fail(Failure(FailureReason.WORKER_LOST, "nobody is left")).aborts == ()
    assert outcome(state) == ("disaggregated", "failed", "worker_lost")


def test_a_failed_handover_is_blamed_on_prefill_whichever_side_reports_it():
    for sender in (D, P):
        state = begin()
        assert state.on_request_failed(sender, failed(state)).retry
        assert state.history[-1].culprit == P, "decode can go on alone"


def test_what_no_other_worker_would_do_better_fails_the_request():
    for code in (FailureCode.INVALID, FailureCode.DEADLINE):
        state = begin()
        update = state.on_request_failed(P, failed(state, code, "no"))
        assert update.ended and update.failure.reason.value == code.value and update.aborts == (D,)


def test_the_next_attempt_goes_on_after_the_delivered_tokens():
    state = begin(max_tokens=4)
    state.on_delta(P, delta(state, 0, [5]))
    state.on_delta(D, delta(state, 0, [5, 6], handover=REPORT))
    assert state.on_worker_lost(D, "died").retry and state.delivered_ids == [5, 6]
    state.begin(Local(worker=M))
    assert state.key == RequestKey("r", 1)
    assert list(state.on_delta(M, delta(state, 2, [7])).token_ids) == [7]
    assert state.on_delta(M, delta(state, 3, [8], LENGTH)).ended
    assert outcome(state) == ("disaggregated", "local", "after_worker_lost")


def test_prefill_may_die_once_decode_has_the_prompt():
    state = begin()
    state.on_delta(D, delta(state, 0, [5]))
    assert state.on_worker_lost(P, "died") is None
    assert state.on_request_failed(P, failed(state)) is NOTHING
    assert state.cancel().aborts == (D,)


def test_stop_string_cancel_and_deadline_abort_everybody_at_work():
    for end in (
        lambda state: state.finish_at_stop_string(),
        lambda state: state.cancel(),
        lambda state: state.fail(Failure(FailureReason.DEADLINE, "late")),
    ):
        state = begin()
        state.on_delta(P, delta(state, 0, [5]))
        update = end(state)
        assert update.ended and set(update.aborts) == {P, D}
        assert end(state) is NOTHING
        state.check_invariants()
    state = begin(placement=Local(worker=M))
    assert state.cancel().aborts == (M,)
    assert outcome(state) == ("local", "cancelled", "cancelled")


def test_a_new_attempt_keeps_delivered_tokens_and_drops_the_old_attempts_messages():
    state = begin()
    old = delta(state, 1, [6])
    state.on_delta(D, delta(state, 0, [5]))
    state.on_delta(D, delta(state, 2, [99]))  # held: never delivered, so not authoritative
    assert state.begin(Local(worker=M)) == (D,)
    assert state.key.attempt == 1
    assert state.on_delta(D, old) is None
    assert state.on_delta(D, delta(state, 1, [6])) is None  # D has no part in the new attempt
    update = state.on_delta(M, delta(state, 1, [6, 7], LENGTH))
    assert list(update.token_ids) == [6, 7] and update.ended
    assert state.output.output_ids == [5, 6, 7]


@st.composite
def _deliveries(draw):
    """Correct tokens of both workers, cut, repeated and shuffled at will, with stale messages among them."""
    output = draw(st.lists(st.integers(0, 50), min_size=1, max_size=12))
    spans = []
    cut = 0
    while cut < len(output):
        end = draw(st.integers(cut + 1, len(output)))
        spans.append((D, cut, end))
        cut = end
    spans += draw(st.lists(st.sampled_from(spans), max_size=4))
    spans.append((P, 0, 1))
    stale = draw(st.lists(st.sampled_from([(D, RequestKey("r", 7)), (M, RequestKey("r", 0))]), max_size=3))
    messages = [("true", *span) for span in spans] + [("stale", *each) for each in stale]
    return output, draw(st.permutations(messages))


@given(_deliveries())
def test_whatever_the_network_does_tokens_come_out_once_in_order_and_never_after_the_end(case):
    output, messages = case
    state = begin(max_tokens=len(output))
    delivered = []
    num_ends = 0
    for kind, sender, *rest in messages:
        if kind == "stale":
            assert state.on_delta(sender, TokenDelta(rest[0], 0, [1])) is None
            continue
        begin_at, end_at = rest
        finish = LENGTH if end_at == len(output) else None
        was_ended = state.ended
        update = state.on_delta(sender, delta(state, begin_at, output[begin_at:end_at], finish))
        state.check_invariants()
        assert (update is None) == was_ended
        if update is not None:
            delivered += update.token_ids
            num_ends += update.ended
            assert (update.finish_reason is LENGTH) == update.ended
            assert delivered == output[: len(delivered)]
    assert delivered == output and num_ends == 1 and state.phase is RequestPhase.FINISHED


_EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("delta"),
            st.sampled_from([P, D, M]),
            st.integers(-1, 5),
            st.lists(st.integers(0, 2), max_size=4),
            st.sampled_from([None, STOP, LENGTH]),
        ),
        st.tuples(st.just("failed"), st.sampled_from([P, D, M])),
        st.tuples(st.just("lost"), st.sampled_from([P, D, M])),
        st.sampled_from([("cancel",), ("stop",), ("retry_local",), ("retry_pair",)]),
    ),
    max_size=15,
)


@given(_EVENTS)
def test_no_sequence_of_events_breaks_the_invariants(events):
    state = begin(max_tokens=4)
    delivered = []
    for kind, *rest in events:
        was_ended = state.ended
        update = None
        if kind == "delta":
            sender, position, ids, finish = rest
            update = state.on_delta(sender, delta(state, position, ids, finish))
        elif kind == "failed":
            update = state.on_request_failed(rest[0], failed(state))
        elif kind == "lost":
            update = state.on_worker_lost(rest[0], "died")
        elif kind == "cancel":
            update = state.cancel()
        elif kind == "stop":
            update = state.finish_at_stop_string()
        elif not was_ended:
            state.begin(Local(worker=M) if kind == "retry_local" else Disaggregated(prefill=P, decode=D))
        state.check_invariants()
        if update is not None:
            delivered += update.token_ids
            assert update.ended == (state.ended and not was_ended)
            assert not (was_ended and update is not NOTHING)
        assert state.output.output_ids == delivered
