"""The place of a request in a trace: what clients send, what they get, which requests are sampled."""

import pytest

from splitserve.router.tracing.context import TraceContext, begin_trace

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def begun(traceparent: str, ratio: float = 0.0, **more: str) -> TraceContext:
    headers = [(b"host", b"h"), (b"traceparent", traceparent.encode())]
    return begin_trace(headers + [(name.encode(), value.encode()) for name, value in more.items()], ratio)


def test_a_clients_trace_goes_on_with_its_decision_and_its_state() -> None:
    context = begun(PARENT, tracestate="vendor=abc")
    assert (context.trace_id, context.parent_id) == (int(TRACE, 16), int(SPAN, 16)) and context.is_sampled
    assert context.headers() == [
        (b"traceparent", f"00-{TRACE}-{context.span_id:016x}-01".encode()),
        (b"tracestate", b"vendor=abc"),
    ]
    assert not begun(f"00-{TRACE}-{SPAN}-00", ratio=1.0).is_sampled
    assert begun(f"00-{TRACE}-{SPAN}-03").is_sampled


def test_a_later_version_may_have_more_fields() -> None:
    assert begun(f"01-{TRACE}-{SPAN}-01-more").parent_id == int(SPAN, 16)


@pytest.mark.parametrize(
    "wrong",
    ["", "nonsense", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{SPAN}-01",
     f"{PARENT}-more", PARENT.upper(), f"00-{TRACE}-{SPAN}-1"],
)  # fmt: skip
def test_a_wrong_header_begins_a_new_trace(wrong: str) -> None:
    context = begun(wrong, tracestate="vendor=abc")
    assert context.trace_id != int(TRACE, 16) and context.trace_id and not context.parent_id and not context.state


def test_the_ratio_decides_without_a_client() -> None:
    counts = {ratio: sum(begin_trace([], ratio).is_sampled for _ in range(4000)) for ratio in (0.0, 0.25, 1.0)}
    assert counts[0.0] == 0 and counts[1.0] == 4000 and 800 < counts[0.25] < 1200


def test_further_requests_of_an_http_request_are_below_its_first() -> None:
    context = begun(PARENT)
    child = context.child()
    assert (child.trace_id, child.parent_id) == (context.trace_id, context.span_id) and child.is_sampled
    assert child.span_id != context.span_id
