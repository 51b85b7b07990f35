"""Attributes of spans: their meanings, and their values for a request. The names ``gen_ai`` are OpenTelemetry's."""

from typing import Any

from splitserve.protocol.cluster_report import RequestSummary, TraceSpan

RESOURCE_ATTRIBUTES = {
    "service.name": "`splitserve-router`, or `splitserve-worker`",
    "service.instance.id": "`router`, or the worker's engine id",
    "service.version": "version of Splitserve",
}
ATTRIBUTES = {
    "gen_ai.request.model": "served model's name",
    "gen_ai.usage.input_tokens": "tokens of the prompt",
    "gen_ai.usage.output_tokens": "tokens that were delivered",
    "gen_ai.response.finish_reasons": "`stop` or `length`; absent without an end of the output",
    "splitserve.request_id": "the request's id, which begins with X-Request-Id",
    "splitserve.status": "`finished`, `failed` or `cancelled`",
    "splitserve.intended": "`disaggregated` or `local`, as first placed",
    "splitserve.actual": "`disaggregated`, `local`, `failed` or `cancelled`",
    "splitserve.reason": "reason of `splitserve.actual`; `ok` if it was intended",
    "splitserve.prefill": "worker that computed the prompt, in the last attempt",
    "splitserve.decode": "worker that decoded, in the last attempt",
    "splitserve.attempts": "number of attempts",
    "splitserve.cached_tokens": "tokens of the prompt that were cached",
    "splitserve.transport": "transport of the hand-over; absent without one",
    "splitserve.handover_bytes": "bytes that the hand-over read; absent without one",
}
SPAN_ATTRIBUTES = {
    "splitserve.tokens": "tokens that the span is about, where it is about some",
    "splitserve.reason": "of an attempt that failed",
}


def attributes_of(summary: RequestSummary, model: str) -> dict[str, Any]:
    """Return the attributes of a request's first span."""
    attributes: dict[str, Any] = {
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": summary.num_prompt_tokens,
        "gen_ai.usage.output_tokens": summary.num_output_tokens,
        "splitserve.request_id": summary.request_id,
        "splitserve.status": summary.status,
        "splitserve.intended": summary.intended,
        "splitserve.actual": summary.actual,
        "splitserve.reason": summary.reason,
        "splitserve.prefill": summary.prefill,
        "splitserve.decode": summary.decode,
        "splitserve.attempts": summary.num_attempts,
        "splitserve.cached_tokens": summary.num_cached_tokens,
    }
    if summary.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (summary.finish_reason,)
    if summary.transport:
        attributes["splitserve.transport"] = summary.transport
        attributes["splitserve.handover_bytes"] = summary.handover_bytes
    return attributes


def attributes_of_span(span: TraceSpan) -> dict[str, Any]:
    """Return the attributes of any other span."""
    attributes: dict[str, Any] = {"splitserve.tokens": span.amount} if span.amount else {}
    if span.detail:
        attributes["splitserve.reason"] = span.detail
    return attributes
