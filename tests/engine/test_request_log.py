"""A worker's lines about requests: one when its work is done, with the request's id, and one for each failure."""

import logging

import pytest

from splitserve.engine.io.request_log import RequestLog
from splitserve.protocol.messages.marks import Mark, MarkKind
from splitserve.protocol.messages.requests import Abort, FailureCode, RequestFailed, StepTokens, TokenDelta
from splitserve.protocol.request import FinishReason, RequestKey

KEY = RequestKey("my-own-id-0a1b", 2)


def lines(caplog: pytest.LogCaptureFixture, *deltas: TokenDelta, writes_lines: bool = True) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        RequestLog(writes_lines=writes_lines).note_sent(StepTokens(list(deltas)))
    return caplog.messages


def marks(*kinds: str) -> list[Mark]:
    return [Mark(MarkKind(kind), 1.0 + 0.01 * number) for number, kind in enumerate(kinds)]


def test_prefill_has_a_line_at_the_first_token(caplog: pytest.LogCaptureFixture) -> None:
    delta = TokenDelta(KEY, 0, [5], num_cached_tokens=64, marks=marks("accepted", "granted", "begun", "chunk", "drawn"))
    assert lines(caplog, delta) == [f"request {KEY} prefilled, cached=64, ms=40.0"]
    assert "my-own-id-0a1b" in str(KEY)


def test_decode_has_a_line_at_the_end_alone(caplog: pytest.LogCaptureFixture) -> None:
    first = TokenDelta(KEY, 0, [5], marks=marks("accepted", "granted", "verified"))
    second = TokenDelta(KEY, 1, [6], marks=marks("begun", "drawn"))
    last = TokenDelta(KEY, 7, [7], FinishReason.LENGTH)
    assert lines(caplog, first, second, last) == [f"request {KEY} finished (length), output=8"]
    assert lines(caplog, last, writes_lines=False) == []


def test_failures_have_a_line_in_any_case(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(writes_lines=False)
    with caplog.at_level(logging.INFO):
        log.note_sent(Abort(KEY))
        log.note_sent(RequestFailed(KEY, FailureCode.HANDOVER, "prefill-0 is gone"))
        log.note_sent(RequestFailed(KEY, FailureCode.OVERLOADED, "1024 requests are here already"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"request {KEY} failed here (handover): prefill-0 is gone"),
        ("INFO", f"request {KEY} failed here (overloaded): 1024 requests are here already"),
    ]
