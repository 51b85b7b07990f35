"""The circuit breaker of a worker: what opens it, for how long, and what it doesn't count."""

from splitserve.protocol.messages.requests import TokenDelta
from splitserve.protocol.request import FinishReason, Party
from splitserve.router.placement.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, Breaker
from splitserve.router.placement.policies import Disaggregated
from splitserve.router.requests.outcome import outcome
from splitserve.router.requests.state import RequestState

PREFILL, DECODE = Party("p0", 1), Party("d0", 2)


def fail(breaker: Breaker, now: float) -> None:
    breaker.on_failure(now, began_at=now - 0.5)


def test_failures_in_a_row_open_it_for_longer_each_time() -> None:
    breaker = Breaker()
    for now in range(1, FAILURES_TO_OPEN):
        fail(breaker, float(now))
        assert breaker.allows(now)
    fail(breaker, 10.0)
    assert not breaker.allows(10.0) and breaker.allows(10.0 + FIRST_PAUSE_SECONDS)
    fail(breaker, 20.0)
    assert not breaker.allows(20.0 + FIRST_PAUSE_SECONDS) and breaker.allows(20.0 + 2 * FIRST_PAUSE_SECONDS)
    for now in range(100, 120):
        fail(breaker, float(now))
    assert breaker.open_until == 119.0 + MAX_PAUSE_SECONDS
    breaker.on_success()
    assert breaker.allows(119.0)


def test_requests_that_fail_together_count_once() -> None:
    breaker = Breaker()
    for _ in range(3 * FAILURES_TO_OPEN):  # a frozen worker's requests
        breaker.on_failure(10.0, began_at=9.0)
    assert breaker.num_failures == 1 and breaker.allows(10.0)
    breaker.on_failure(10.5, began_at=9.9)
    assert breaker.num_failures == 1, "it began before the first failure was known"
    breaker.on_failure(11.0, began_at=10.1)
    assert breaker.num_failures == 2


def test_an_attempt_that_its_first_token_ends_is_no_missing_report() -> None:
    """Continued with one token left: prefill draws it, and decode has nothing to do."""
    state = RequestState("r", max_tokens=3)
    state.begin(Disaggregated(PREFILL, DECODE))
    state.on_delta(DECODE, TokenDelta(state.key, 0, [5, 6]))
    state.on_worker_lost(DECODE, "died")
    state.begin(Disaggregated(PREFILL, DECODE))
    update = state.on_delta(PREFILL, TokenDelta(state.key, 2, [7], finish_reason=FinishReason.LENGTH))
    assert update is not None and update.ended
    assert state.num_attempt_tokens == 1
    assert outcome(state) == ("disaggregated", "local", "ended_with_first_token")
