"""Reports of ended requests: the log's line, rates of the last seconds, JSON lines."""

import json
import logging
from pathlib import Path

import msgspec
import pytest

from splitserve.common.logs import FORMAT_VARIABLE, HOLD_VARIABLE, set_up_logging
from splitserve.protocol.cluster_report import RequestSummary
from splitserve.protocol.messages.requests import HandoverReport, TokenDelta
from splitserve.protocol.request import FinishReason, Party, SamplingParams
from splitserve.router.admin import activity
from splitserve.router.placement.policies import Disaggregated
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.state import Failure, FailureReason
from splitserve.router.requests.timeline.summary import fields_of, line_of, summarize

P, D = Party("prefill-0", 1), Party("decode-0", 2)


def ended(failure: Failure | None = None) -> RequestSummary:
    request = ActiveRequest.new("my-id-1", [1, 2, 3], SamplingParams(max_tokens=2), 1.0)
    placement = Disaggregated(prefill=P, decode=D)
    request.state.begin(placement)
    request.timeline.begin_attempt(placement, 1.0)
    request.state.on_delta(P, TokenDelta(request.state.key, 0, [5]))
    request.timeline.on_tokens(1, 1.25)
    if failure is not None:
        request.state.fail(failure)
        return summarize(request, 2.0)
    report = HandoverReport("prefill-0", "nixl/cma", 1, 4096, 0, 1)
    request.state.on_delta(D, TokenDelta(request.state.key, 0, [5], handover=report))
    request.timeline.on_handover(1.5, is_first=False)
    request.state.on_delta(D, TokenDelta(request.state.key, 1, [6], FinishReason.LENGTH))
    request.timeline.on_tokens(1, 2.0)
    return summarize(request, 2.0)


def test_the_line_of_a_finished_request_has_its_way_and_its_times() -> None:
    line = line_of(ended())
    assert line == (
        "request my-id-1 finished (length), prefill-0 -> decode-0, prompt=3 cached=0 output=2 ttft_ms=250.0 "
        "itl_ms=750.00 handover_ms=250.00 transport=nixl/cma seconds=1.000"
    )


def test_the_line_of_a_failed_request_has_the_reason() -> None:
    summary = ended(Failure(FailureReason.DEADLINE, "the request took longer than 1 s"))
    assert line_of(summary).startswith("request my-id-1 failed (deadline), ")
    assert line_of(summary).endswith(": the request took longer than 1 s")
    assert fields_of(summary)["status"] == "failed" and "transport" not in fields_of(summary)


def test_json_lines_have_the_fields(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    try:
        set_up_logging("router", "info")
        logging.getLogger("some.where").warning("two\nlines", extra={"fields": lambda: fields_of(ended())})
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    shown = json.loads(line)
    assert shown["level"] == "warning" and shown["process"] == "router" and shown["message"] == "two\nlines"
    assert shown["request_id"] == "my-id-1" and shown["num_output_tokens"] == 2


def test_rates_are_those_of_the_last_seconds() -> None:
    recent = activity.Activity(0.0)
    assert activity.line_of(recent.rates(0, 0, 1.0)) == ""
    for second in range(1, 31):
        if second > 20:
            recent.totals.num_output_tokens += 50
            for _ in range(2):
                recent.note_end(msgspec.structs.replace(ended(), ttft_seconds=0.1), float(second))
        recent.sample(float(second))
    rates = recent.rates(3, 1, 30.0)
    assert rates.seconds == pytest.approx(10.0) and rates.requests_per_second == pytest.approx(2.0)
    assert rates.output_tokens_per_second == pytest.approx(50.0) and rates.ttft_seconds_median == pytest.approx(0.1)
    assert activity.line_of(rates).startswith("last 10 s: 2.0 requests/s, 6 prompt and 50 output tokens/s, 3 in flight")


def test_lines_below_warning_are_held_while_the_file_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    held = tmp_path / "held"
    held.touch()
    monkeypatch.setenv(HOLD_VARIABLE, str(held))
    log = logging.getLogger("some.where")
    try:
        set_up_logging("decode-0", "info")
        log.info("during the start")
        log.warning("a warning of the start")
        held.unlink()
        log.info("after the start")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    shown = capsys.readouterr().err
    assert "during" not in shown and "a warning of the start" in shown and "after the start" in shown
