"""Tracing as the rest of the router uses it: with a collector, or a null object that makes nothing."""

from typing import Protocol

from splitserve.common.errors import ConfigError
from splitserve.protocol.cluster_report import RequestSummary
from splitserve.protocol.config import RouterConfig
from splitserve.router.requests.timeline.timeline import Timeline
from splitserve.router.tracing.context import Headers, TraceContext, begin_trace


class Exporter(Protocol):
    """:class:`splitserve.router.tracing.exporter.OtlpExporter`, which needs OpenTelemetry."""

    def export(
        self, context: TraceContext, summary: RequestSummary, timeline: Timeline, unix_offset: float
    ) -> None: ...

    def close(self) -> None: ...


class NoTracing:
    """Tracing that is off."""

    def begin(self, _headers: Headers) -> TraceContext | None:
        """Return None: the request is in no trace."""
        return None

    def on_end(
        self, _context: TraceContext | None, _summary: RequestSummary, _timeline: Timeline, _unix_offset: float
    ) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Tracing(NoTracing):
    """Tracing that is on: each HTTP request is in a trace, and spans of those that are sampled are exported."""

    def __init__(self, exporter: Exporter, sampling_ratio: float) -> None:
        self._exporter = exporter
        self._sampling_ratio = sampling_ratio

    def begin(self, headers: Headers) -> TraceContext | None:
        """Return the context of an HTTP request with these headers."""
        return begin_trace(headers, self._sampling_ratio)

    def on_end(
        self, context: TraceContext | None, summary: RequestSummary, timeline: Timeline, unix_offset: float
    ) -> None:
        """Export the spans of a request that has ended. ``unix_offset``: Unix time less the timeline's clock."""
        if context is not None and context.is_sampled:
            self._exporter.export(context, summary, timeline, unix_offset)

    def close(self) -> None:
        """Send the last spans."""
        self._exporter.close()


def tracing_of(config: RouterConfig) -> NoTracing:
    """Return the tracing that is configured. Raises :class:`ConfigError` if OpenTelemetry is missing."""
    if not config.otlp_endpoint:
        return NoTracing()
    try:
        from splitserve.router.tracing.exporter import OtlpExporter
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint needs OpenTelemetry's SDK: pip install 'splitserve[otel]' ({error})"
        ) from error
    return Tracing(OtlpExporter(config.otlp_endpoint, config.served_model_name), config.trace_ratio)
