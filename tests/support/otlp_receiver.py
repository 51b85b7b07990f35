"""A collector that takes traces by OTLP over HTTP on loopback. Not a test module."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from waiting import wait_until


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came over the wire; ids in hexadecimal, times in nanoseconds of Unix time."""

    process: str
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    begin: int
    end: int
    kind: int
    has_failed: bool
    attributes: dict[str, Any]
    events: tuple[str, ...]


@dataclass
class Collector:
    """The spans that came so far, and the paths that they were posted to."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait_for(self, trace_id: str, num_roots: int = 1) -> list[ReceivedSpan]:
        """Wait until the first spans of ``num_roots`` requests of the trace are there, and return all of its spans."""
        wait_until(lambda: sum(span.name == "request" for span in self.trace(trace_id)) >= num_roots)
        return self.trace(trace_id)


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def _spans(body: bytes) -> Iterator[ReceivedSpan]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _values(group.resource.attributes)
        for span in (span for scope in group.scope_spans for span in scope.spans):
            yield ReceivedSpan(
                process=resource["service.instance.id"],
                service=resource["service.name"],
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                trace_state=span.trace_state,
                begin=span.start_time_unix_nano,
                end=span.end_time_unix_nano,
                kind=span.kind,
                has_failed=span.status.code == span.status.STATUS_CODE_ERROR,
                attributes=_values(span.attributes),
                events=tuple(event.name for event in span.events),
            )


@contextmanager
def collector() -> Iterator[Collector]:
    """Yield a collector that listens."""
    received = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.paths.add(self.path)
            received.spans.extend(_spans(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    received.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
