"""The timeline of one request: marks of two workers on the router's clock, stages that add up, bounds."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.protocol.messages.marks import MAX_MARKS, Mark, MarkKind, MarkList
from splitserve.protocol.request import Party
from splitserve.router.placement.policies import Disaggregated, Local
from splitserve.router.requests.timeline.clocks import WorkerClock, WorkerClocks
from splitserve.router.requests.timeline.spans import spans_of
from splitserve.router.requests.timeline.stages import UNEXPLAINED, handover_stages, read_times, ttft_stages
from splitserve.router.requests.timeline.timeline import MAX_GAPS, Timeline

P, D, M = Party("prefill-0", 1), Party("decode-0", 2), Party("mixed-0", 3)
EXACT = 1e-9
PREFILL = [
    ("accepted", 10.02),
    ("granted", 10.05),
    ("begun", 10.10),
    ("chunk", 10.15),
    ("chunk", 10.20),
    ("drawn", 10.20),
]
DECODE = [
    ("accepted", 10.02),
    ("granted", 10.03),
    ("reading", 10.16),
    ("offered", 10.21),
    ("posted", 10.22),
    ("read", 10.24),
    ("verified", 10.25),
]
DECODE_STEP = [("begun", 10.26), ("drawn", 10.28)]


def marks(events: list[tuple[str, float]], ahead: float = 0.0) -> list[Mark]:
    """Marks of a worker whose clock is ``ahead`` of the router's."""
    return [Mark(MarkKind(kind), at + ahead, 64 if kind == "chunk" else 0) for kind, at in events]


def disaggregated(
    prefill_ahead: float = 0.0, decode_ahead: float = 0.0, last: Sequence[tuple[str, float]] = ()
) -> Timeline:
    clocks = WorkerClocks()
    timeline = Timeline(10.0, prepared_at=10.004)
    timeline.begin_attempt(Disaggregated(prefill=P, decode=D), 10.01)
    timeline.add_marks(P, marks([*PREFILL, *last], prefill_ahead), clocks, 10.21)
    timeline.on_tokens(1, 10.21)
    timeline.add_marks(D, marks(DECODE, decode_ahead), clocks, 10.26)
    timeline.on_handover(10.26, is_first=False)
    timeline.add_marks(D, marks(DECODE_STEP, decode_ahead), clocks, 10.29)
    timeline.on_tokens(1, 10.29)
    timeline.ended_at = 10.29
    return timeline


def test_stages_add_up_to_the_time_to_first_token() -> None:
    stages = ttft_stages(disaggregated())
    assert list(stages) == [
        "prepare", "queue", "dispatch", "grant_wait", "prefill_queue", "prefill", "delivery", UNEXPLAINED
    ]  # fmt: skip
    assert sum(stages.values()) == pytest.approx(0.21, abs=EXACT)
    assert stages["prepare"] == pytest.approx(0.004) and stages["queue"] == pytest.approx(0.006)
    assert stages["grant_wait"] == pytest.approx(0.03) and stages["prefill_queue"] == pytest.approx(0.05)
    assert stages["prefill"] == pytest.approx(0.10) and stages[UNEXPLAINED] == 0.0


def test_stages_of_the_handover_add_up() -> None:
    (attempt,) = disaggregated().attempts
    stages = handover_stages(attempt)
    assert list(stages) == ["offer", "post", "wire", "verify", "decode_queue", "first_step", UNEXPLAINED]
    assert stages["wire"] == pytest.approx(0.02) and all(seconds >= 0 for seconds in stages.values())
    begin = {mark.kind: mark.at for mark in attempt.prefill_marks}[MarkKind.DRAWN]
    end = {mark.kind: mark.at for mark in attempt.decode_marks}[MarkKind.DRAWN]
    assert sum(stages.values()) == pytest.approx(end - begin, abs=EXACT)
    assert read_times(attempt) == pytest.approx((0.09, 0.04))


def test_a_handover_begins_with_the_last_token_of_prefill() -> None:
    timeline = disaggregated(last=[("second", 10.205)])
    at, at_decode = timeline.attempts[-1].by_kind()
    offer_seconds = at_decode[MarkKind.OFFERED] - at[MarkKind.SECOND]
    assert handover_stages(timeline.attempts[-1])["offer"] == pytest.approx(offer_seconds)
    spans = {span.name: span for span in spans_of(timeline)}
    assert spans["second_token"].seconds == pytest.approx(0.005) and spans["second_token"].process == P.engine_id


@pytest.mark.parametrize("ahead", [(0.05, -0.05), (-0.05, 0.05), (1e5, 3.0)])
def test_clocks_that_differ_change_nothing(ahead: tuple[float, float]) -> None:
    same, shifted = disaggregated(), disaggregated(*ahead)
    assert ttft_stages(shifted) == pytest.approx(ttft_stages(same), abs=1e-8)
    assert handover_stages(shifted.attempts[0]) == pytest.approx(handover_stages(same.attempts[0]), abs=1e-8)
    assert [span.name for span in spans_of(shifted)] == [span.name for span in spans_of(same)]


def test_the_offset_is_wrong_by_at_most_half_the_shortest_round_trip() -> None:
    clock, ahead, now = WorkerClock(), 5.0, 0.0
    for there, back in ((0.02, 0.001), (0.001, 0.02), (0.003, 0.004)):
        sent_at, now = now, now + there + 0.1 + back
        accepted_at, answered_at = sent_at + there + ahead, sent_at + there + 0.1 + ahead
        clock.note(answered_at - now, accepted_at - sent_at, now)
    assert clock.offset is not None and abs(clock.offset - ahead) <= 0.001 + EXACT


def test_dispatch_and_delivery_are_measured_against_earlier_readings() -> None:
    """A lone request's own ways would come out equal; readings of the clock tell them apart."""
    for ahead in (0.0, 0.05, -0.05):
        clocks, timeline = WorkerClocks(), Timeline(1.0, prepared_at=1.0)
        clocks.note(M, 0.5, 0.5001 + ahead, 0.5002)
        timeline.begin_attempt(Local(M), 1.0)
        events = [("accepted", 1.004), ("begun", 1.005), ("chunk", 1.02), ("drawn", 1.02)]
        timeline.add_marks(M, marks(events, ahead), clocks, 1.021)
        timeline.on_tokens(1, 1.021)
        stages = ttft_stages(timeline)
        assert stages["dispatch"] == pytest.approx(0.004, abs=1.1e-4), ahead
        assert stages["delivery"] == pytest.approx(0.001, abs=1.1e-4), ahead


def test_a_reading_from_the_future_is_ignored() -> None:
    clocks = WorkerClocks()
    clocks.note(M, 9.0, 5.0, 1.0)
    assert clocks.of(M, 1.0).offset is None


def test_a_clock_that_was_set_is_learned_anew() -> None:
    clock = WorkerClock()
    clock.note(-0.001, 0.001, 1.0)
    clock.note(7.999, 8.001, 2.0)
    assert clock.offset == pytest.approx(8.0)


def test_bounds_of_long_ago_are_forgotten() -> None:
    clock = WorkerClock()
    for minute in range(10):  # the clock drifts by 0.1 ms per minute
        clock.note(minute * 1e-4 - 0.001, minute * 1e-4 + 0.001, 61.0 * minute)
    assert clock.offset == pytest.approx(9e-4, abs=2e-4)


def test_time_without_marks_is_unexplained() -> None:
    timeline = Timeline(1.0, prepared_at=1.1)
    timeline.begin_attempt(Local(M), 1.2)
    timeline.on_tokens(1, 1.5)
    stages = ttft_stages(timeline)
    assert stages == pytest.approx({"prepare": 0.1, "queue": 0.1, UNEXPLAINED: 0.3})


def test_failed_attempts_are_a_stage_and_their_marks_do_not_count() -> None:
    clocks, timeline = WorkerClocks(), Timeline(1.0, prepared_at=1.0)
    timeline.begin_attempt(Disaggregated(prefill=P, decode=D), 1.0)
    timeline.fail_attempt("worker_lost", "prefill-0")
    timeline.begin_attempt(Local(M), 3.0)
    events = [("accepted", 3.1), ("begun", 3.2), ("chunk", 3.5), ("drawn", 3.5)]
    timeline.add_marks(M, marks(events), clocks, 3.6)
    timeline.on_tokens(1, 3.6)
    timeline.ended_at = 4.0
    stages = ttft_stages(timeline)
    assert stages["retries"] == pytest.approx(2.0) and sum(stages.values()) == pytest.approx(2.6)
    assert [span.detail for span in spans_of(timeline) if span.name == "attempt"] == ["worker_lost", ""]


def test_a_further_choice_has_the_stages_of_the_shared_prompt() -> None:
    primary, clocks = disaggregated(), WorkerClocks()
    sibling = Timeline(10.0, prepared_at=10.004)
    sibling.begin_attempt(Disaggregated(prefill=P, decode=D), 10.01, primary)
    clocks.of(D, 10.0).note(0.0, 0.0, 10.0)
    sibling.add_marks(D, marks([("begun", 10.27), ("drawn", 10.30)]), clocks, 10.31)
    sibling.on_tokens(1, 10.31)
    stages = ttft_stages(sibling)
    assert stages["handover"] > 0 and stages["choice"] > 0 and stages[UNEXPLAINED] == 0.0
    assert sum(stages.values()) == pytest.approx(0.31)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 20), min_size=7, max_size=7), st.floats(10, 12), st.sets(st.integers(0, 5)))
def test_no_stage_is_negative_whatever_workers_say(times: list[float], end: float, missing: set[int]) -> None:
    kinds = ["accepted", "granted", "begun", "chunk", "drawn", "verified"]
    events: list[Any] = [(kind, at) for n, (kind, at) in enumerate(zip(kinds, times, strict=False)) if n not in missing]
    timeline = Timeline(10.0, prepared_at=times[-1])
    timeline.begin_attempt(Disaggregated(prefill=P, decode=D), 10.0)
    for sender in (P, D) if events else ():
        timeline.add_marks(sender, marks(events), WorkerClocks(), end)
    timeline.on_tokens(1, end)
    timeline.ended_at = end
    for stages in (ttft_stages(timeline), handover_stages(timeline.attempts[0])):
        assert all(seconds >= 0 for seconds in stages.values())
    assert sum(ttft_stages(timeline).values()) == pytest.approx(end - 10.0, abs=EXACT)
    assert all(span.seconds >= 0 for span in spans_of(timeline))


def test_gaps_above_the_objective_are_noted_within_bounds() -> None:
    timeline = Timeline(0.0, gap_seconds=0.1)
    timeline.begin_attempt(Local(M), 0.0)
    times = itertools.accumulate([1.0, *[0.05, 0.2] * 50])
    for now in times:
        timeline.on_tokens(1, now)
    assert timeline.num_gaps == 50 and len(timeline.gaps) == MAX_GAPS
    assert timeline.longest_gap_seconds == pytest.approx(0.2)
    assert timeline.itl_seconds == pytest.approx(0.125)
    assert math.isinf(Timeline(0.0).gap_seconds)


def test_marks_of_a_long_prompt_are_bounded_and_lose_no_token() -> None:
    kept = MarkList()
    kept.add(MarkKind.ACCEPTED, 0.0)
    kept.begin(0.5)
    kept.begin(0.6)
    for number in range(1000):
        kept.add_chunk(1.0 + number, 8)
    kept.add(MarkKind.DRAWN, 2000.0)
    taken = kept.take()
    assert len(taken) <= MAX_MARKS and taken[-1].kind is MarkKind.DRAWN
    assert sum(mark.amount for mark in taken if mark.kind is MarkKind.CHUNK) == 8000
    assert [mark.at for mark in taken if mark.kind is MarkKind.BEGUN] == [0.5]
    assert kept.take() == []


def test_the_write_to_the_client_is_a_stage_of_its_own() -> None:
    timeline = disaggregated()
    before, waited = ttft_stages(timeline), timeline.ttft_seconds
    timeline.on_written(10.213)
    timeline.on_written(10.5)  # a later event
    stages = ttft_stages(timeline)
    assert "write" not in before and stages["write"] == pytest.approx(0.003)
    assert timeline.ttft_seconds == pytest.approx(waited + 0.003) and {**before, "write": 0.003} == pytest.approx(
        stages
    )
    (span,) = (span for span in spans_of(timeline) if span.name == "write")
    assert span.begin + span.seconds == pytest.approx(0.213)


def test_nothing_is_written_before_the_first_token() -> None:
    timeline = Timeline(1.0)
    timeline.on_written(1.5)
    assert timeline.ttft_seconds is None and not timeline.first_written_at


def test_the_wait_on_a_new_connection_is_a_stage_of_its_own() -> None:
    timeline = disaggregated()
    timeline.read_at = 10.003
    stages = ttft_stages(timeline)
    assert stages["receive"] == pytest.approx(0.003) and stages["prepare"] == pytest.approx(0.001)
    assert sum(stages.values()) == pytest.approx(0.21, abs=EXACT)
    names = [span.name for span in spans_of(timeline)]
    assert names[:4] == ["request", "receive", "prepare", "queue"]
