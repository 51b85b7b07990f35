"""Export of traces by OTLP over HTTP, with OpenTelemetry's SDK (extra ``otel``): imported only if it is asked for.

Spans are made of the timeline of a request that has ended, so nothing is noted for them while it runs. The library
batches and sends them in a thread of its own.
"""

import logging
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from splitserve import __version__
from splitserve.protocol.cluster_report import RequestSummary, TraceSpan
from splitserve.router.requests.timeline.spans import ROUTER, spans_of
from splitserve.router.requests.timeline.timeline import Timeline
from splitserve.router.tracing.attributes import attributes_of, attributes_of_span
from splitserve.router.tracing.context import TraceContext, new_span_id

TRACES_PATH = "/v1/traces"
EXPORT_SECONDS = 5.0
CLOSE_SECONDS = 1.5
MAX_SPANS_QUEUED = 1 << 15
MAX_RESOURCES = 1024

_SCOPE = InstrumentationScope("splitserve", __version__)
_NANOSECONDS = 1e9

log = logging.getLogger(__name__)


class OtlpExporter:
    """The exporter. ``endpoint``: base URL of a collector, or a URL with a path, to which the traces go."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._model = model
        self._resources: dict[str, Resource] = {}
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(traces_url(endpoint), timeout=EXPORT_SECONDS), max_queue_size=MAX_SPANS_QUEUED
        )

    def export(self, context: TraceContext, summary: RequestSummary, timeline: Timeline, unix_offset: float) -> None:
        """Queue the spans of a request. ``unix_offset``: Unix time less the timeline's clock."""
        began_at = timeline.arrived_at + unix_offset
        root, attempt = context.span_id, context.span_id
        for span in spans_of(timeline):
            if span.name == "request":
                self._processor.on_end(self._root(span, context, summary, began_at))
                continue
            span_id = new_span_id()
            parent = root if span.process == ROUTER else attempt
            if span.name == "attempt":
                attempt = span_id
            self._processor.on_end(self._span(span, context, span_id, parent, began_at))

    def flush(self) -> None:
        """Send what is queued now."""
        self._processor.force_flush()

    def close(self) -> None:
        """Send what is queued, but wait for the collector a short time only."""
        closing = threading.Thread(target=self._processor.shutdown, name="end-of-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.warning("the last traces were not sent: the collector did not answer within %g s", CLOSE_SECONDS)

    def _root(self, span: TraceSpan, context: TraceContext, summary: RequestSummary, began_at: float) -> ReadableSpan:
        has_failed = summary.status == "failed"
        status = Status(StatusCode.ERROR, summary.message) if has_failed else Status(StatusCode.UNSET)
        parent = _span_context(context, context.parent_id, is_remote=True) if context.parent_id else None
        ttft = summary.ttft_seconds
        return ReadableSpan(
            span.name,
            context=_span_context(context, context.span_id),
            parent=parent,
            resource=self._resource(span.process),
            attributes=attributes_of(summary, self._model),
            events=() if ttft is None else (Event("first_token", timestamp=_nanoseconds(began_at + ttft)),),
            kind=SpanKind.SERVER,
            status=status,
            start_time=_nanoseconds(began_at + span.begin),
            end_time=_nanoseconds(began_at + span.begin + span.seconds),
            instrumentation_scope=_SCOPE,
        )

    def _span(
        self, span: TraceSpan, context: TraceContext, span_id: int, parent_id: int, began_at: float
    ) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=_span_context(context, span_id),
            parent=_span_context(context, parent_id),
            resource=self._resource(span.process),
            attributes=attributes_of_span(span),
            status=Status(StatusCode.ERROR, span.detail) if span.detail else Status(StatusCode.UNSET),
            start_time=_nanoseconds(began_at + span.begin),
            end_time=_nanoseconds(began_at + span.begin + span.seconds),
            instrumentation_scope=_SCOPE,
        )

    def _resource(self, process: str) -> Resource:
        """Return the resource of a process: the router, or a worker."""
        found = self._resources.get(process)
        if found is None:
            if len(self._resources) >= MAX_RESOURCES:
                self._resources.clear()
            service = "splitserve-router" if process == ROUTER else "splitserve-worker"
            attributes = {"service.name": service, "service.instance.id": process, "service.version": __version__}
            found = self._resources[process] = Resource.create(attributes)
        return found


def traces_url(endpoint: str) -> str:
    """Return the URL that traces are posted to."""
    scheme, _, rest = endpoint.partition("://")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host}/{path}" if path else f"{scheme}://{host}{TRACES_PATH}"


def _span_context(context: TraceContext, span_id: int, *, is_remote: bool = False) -> SpanContext:
    state = TraceState.from_header([context.state.decode("latin-1")]) if context.state else None
    return SpanContext(context.trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED), state)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
