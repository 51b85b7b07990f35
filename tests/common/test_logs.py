"""Lines written at once, and what happens to them where nothing can be written."""

import io
import logging

import pytest

from splitserve.common import logs


def test_records_for_a_closed_stream_raise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that ends reports its last requests, whoever has closed its output."""
    stream = io.StringIO()
    handler = logs._Lines(stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(logging, "raiseExceptions", False)
    record = logging.LogRecord("a", logging.INFO, "", 0, "a line", None, None)
    logs.write_at_once([record, record])
    assert stream.getvalue() == "a line\na line\n"
    stream.close()
    logs.write_at_once([record])
