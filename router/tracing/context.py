"""The trace that a request belongs to, as W3C Trace Context describes it (headers ``traceparent`` and ``tracestate``).

Whether a request is sampled is decided here at its arrival; its spans are made of its timeline once it has ended.
"""

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

_TRACEPARENT = re.compile(
    rb"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_MAX_TRACE_STATE_BYTES = 512
_SAMPLED = 1
_RATIO_BITS = 64  # of the trace id that decide, as in OpenTelemetry's sampler by ratio

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The position of a request in a trace. Ids are positive; spans of a request are below ``span_id``."""

    trace_id: int
    span_id: int  # of the request's own first span
    parent_id: int = 0  # of the client's span; 0: the trace begins here
    is_sampled: bool = False
    state: bytes = b""  # the client's tracestate, which goes on unchanged

    def child(self) -> "TraceContext":
        """Return the context of another request of the same HTTP request."""
        return TraceContext(self.trace_id, new_span_id(), self.span_id, self.is_sampled, self.state)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that pass the context on."""
        flags = _SAMPLED if self.is_sampled else 0
        parent = f"00-{self.trace_id:032x}-{self.span_id:016x}-{flags:02x}".encode()
        return [(b"traceparent", parent), *([(b"tracestate", self.state)] if self.state else [])]


def begin_trace(headers: Headers, sampling_ratio: float) -> TraceContext:
    """Return the context of a new request: a part of the client's trace, if it sent one, else a new trace.

    The client's decision to sample counts; without one, ``sampling_ratio`` of the traces are sampled.
    """
    found = {name: value for name, value in headers if name in (b"traceparent", b"tracestate")}
    match = _TRACEPARENT.fullmatch(found[b"traceparent"].strip()) if b"traceparent" in found else None
    if match is None or not _is_valid(match):
        trace_id = random.getrandbits(128) or 1
        is_sampled = trace_id % (1 << _RATIO_BITS) < sampling_ratio * (1 << _RATIO_BITS)
        return TraceContext(trace_id, new_span_id(), is_sampled=is_sampled)
    state = found.get(b"tracestate", b"").strip()
    return TraceContext(
        trace_id=int(match["trace"], 16),
        span_id=new_span_id(),
        parent_id=int(match["span"], 16),
        is_sampled=bool(int(match["flags"], 16) & _SAMPLED),
        state=state if len(state) <= _MAX_TRACE_STATE_BYTES else b"",
    )


def new_span_id() -> int:
    """Return a random id."""
    return random.getrandbits(64) or 1


def _is_valid(match: re.Match[bytes]) -> bool:
    """Return whether the ids aren't 0 and the version may have what follows: version 00 has nothing more."""
    has_ids = int(match["trace"], 16) and int(match["span"], 16)
    return bool(has_ids) and match["version"] != b"ff" and not (match["version"] == b"00" and match["more"])
