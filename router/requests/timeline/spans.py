"""Spans of a request, from its timeline: intervals by process, as ``splitserve trace``, Perfetto and OpenTelemetry show
them. Pure."""

from collections.abc import Iterator, Sequence

from splitserve.protocol.cluster_report import TraceSpan
from splitserve.protocol.messages.marks import Mark, MarkKind
from splitserve.router.requests.timeline.timeline import AttemptTimeline, Timeline

ROUTER = "router"

PREFILL_SPANS = {
    MarkKind.GRANTED: "grant_wait",
    MarkKind.PREFIX: "prefix_read",
    MarkKind.BEGUN: "prefill_queue",
    MarkKind.CHUNK: "chunk",
    MarkKind.DRAWN: "first_token",
}
"""Spans of the worker that computes the prompt, by the mark that ends them; each begins at the mark before."""

DECODE_SPANS = {
    MarkKind.GRANTED: "reserve",
    MarkKind.READING: "await_offer",
    MarkKind.OFFERED: "await_last_offer",
    MarkKind.POSTED: "post",
    MarkKind.READ: "wire",
    MarkKind.VERIFIED: "verify",
    MarkKind.BEGUN: "decode_queue",
    MarkKind.DRAWN: "first_step",
}
"""Spans of the decode worker, likewise."""


def spans_of(timeline: Timeline) -> list[TraceSpan]:
    """Return the spans of a request that has ended, the whole one first; times count from the arrival."""
    origin, ended_at = timeline.arrived_at, timeline.ended_at
    spans = [TraceSpan("request", ROUTER, 0.0, ended_at - origin, timeline.num_tokens)]
    if timeline.attempts:
        first_began_at = timeline.attempts[0].began_at
        prepared_at = min(max(timeline.prepared_at, origin), first_began_at)
        spans.append(TraceSpan("prepare", ROUTER, 0.0, prepared_at - origin))
        spans.append(TraceSpan("queue", ROUTER, prepared_at - origin, first_began_at - prepared_at))
    for number, attempt in enumerate(timeline.attempts):
        later = timeline.attempts[number + 1 :]
        spans += _attempt_spans(attempt, origin, later[0].began_at if later else ended_at)
    if timeline.num_tokens > 1:
        seconds = timeline.last_token_at - timeline.first_token_at
        spans.append(TraceSpan("stream", ROUTER, timeline.first_token_at - origin, seconds, timeline.num_tokens))
    spans += [TraceSpan("gap", ROUTER, gap.begin - origin, gap.seconds, gap.num_tokens_before) for gap in timeline.gaps]
    return spans


def _attempt_spans(attempt: AttemptTimeline, origin: float, end: float) -> Iterator[TraceSpan]:
    name = f"attempt ({attempt.failure})" if attempt.failure else "attempt"
    yield TraceSpan(name, ROUTER, attempt.began_at - origin, max(0.0, end - attempt.began_at))
    yield from _worker_spans(attempt, attempt.prefill_marks, attempt.prefill, PREFILL_SPANS, origin)
    yield from _worker_spans(attempt, attempt.decode_marks, attempt.decode, DECODE_SPANS, origin)


def _worker_spans(
    attempt: AttemptTimeline, marks: Sequence[Mark], process: str, names: dict[MarkKind, str], origin: float
) -> Iterator[TraceSpan]:
    """Yield the intervals between a worker's marks, none of them negative."""
    cursor = attempt.began_at
    for mark in sorted(marks, key=lambda mark: mark.at):
        at = max(mark.at, cursor)
        yield TraceSpan(names.get(mark.kind, "dispatch"), process, cursor - origin, at - cursor, mark.amount)
        cursor = at
