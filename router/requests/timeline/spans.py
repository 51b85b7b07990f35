"""Spans of a request, from its timeline: intervals by process, as ``splitserve trace``, Perfetto and OpenTelemetry show
them. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from splitserve.protocol.cluster_report import TraceSpan
from splitserve.protocol.messages.marks import Mark, MarkKind
from splitserve.router.requests.timeline.timeline import AttemptTimeline, Timeline

ROUTER = "router"

ROUTER_SPANS = {
    "request": "The whole request, from the arrival of its HTTP request to its end",
    "receive": "Wait on a new connection until the head of the request was read",
    "prepare": "Until its prompt is tokens: body, chat template, tokenizer",
    "queue": "Wait until a worker can take it",
    "attempt": "One attempt on the chosen workers; one that failed has the reason",
    "write": "First token in the router until its event is written to the client's connection",
    "stream": "First to last token delivered",
    "gap": "Time between two deliveries of tokens that was longer than the objective; the tokens before it",
}
"""Spans of the router, with their meanings."""

PREFILL_SPANS = {
    MarkKind.ACCEPTED: ("dispatch", "Way of the request to the worker, and its wait in the worker's inbox"),
    MarkKind.ASKED: ("turn_wait", "Wait of a prompt that others precede, until its grant is asked for"),
    MarkKind.GRANTED: ("grant_wait", "Wait for the grant of decode"),
    MarkKind.PREFIX: ("prefix_read", "Read of a prefix that another worker had"),
    MarkKind.BEGUN: ("prefill_queue", "Wait for the prompt's first step"),
    MarkKind.CHUNK: ("chunk", "Computation of one chunk of the prompt, of so many tokens, with the wait for its step"),
    MarkKind.DRAWN: ("first_token", "Draw of the first token"),
    MarkKind.SECOND: ("second_token", "Draw of the second token, while decode reads the prompt's KV"),
}
"""Spans of the worker that computes the prompt, by the mark that ends them, with their meanings; each begins at the
mark before."""

DECODE_SPANS = {
    MarkKind.ACCEPTED: ("dispatch", "Way of the request to the worker, and its wait in the worker's inbox"),
    MarkKind.ASKED: ("await_turn", "Wait until prefill asks for the grant: other prompts come first there"),
    MarkKind.GRANTED: ("reserve", "Wait for room for the whole prompt"),
    MarkKind.PREFIX: ("prefix_read", "Read of a prefix that another worker had"),
    MarkKind.READING: ("await_offer", "Wait for the first offer of blocks, until their read is posted"),
    MarkKind.OFFERED: ("await_last_offer", "Wait for the last offer, while earlier blocks are read"),
    MarkKind.POSTED: ("post", "Arrival of the last offer until the last read is posted"),
    MarkKind.READ: ("wire", "Last read posted until its bytes have arrived"),
    MarkKind.VERIFIED: ("verify", "Bytes arrived until all blocks are verified"),
    MarkKind.BEGUN: ("decode_queue", "Wait for the first decode step"),
    MarkKind.CHUNK: ("chunk", "Computation of so many tokens of the prompt that were not read"),
    MarkKind.DRAWN: ("first_step", "First decode step, until its token is drawn"),
}
"""Spans of the decode worker, likewise."""

_ALL_SPANS = {**PREFILL_SPANS, **DECODE_SPANS}

WorkerSpans = Mapping[MarkKind, tuple[str, str]]


def spans_of(timeline: Timeline) -> list[TraceSpan]:
    """Return the spans of a request that has ended, the whole one first; times count from the arrival."""
    origin, ended_at = timeline.arrived_at, timeline.ended_at
    spans = [TraceSpan("request", ROUTER, 0.0, ended_at - origin, timeline.num_tokens)]
    if timeline.attempts:
        first_began_at = timeline.attempts[0].began_at
        prepared_at = min(max(timeline.prepared_at, origin), first_began_at)
        read_at = min(max(timeline.read_at, origin), prepared_at)
        if read_at > origin:
            spans.append(TraceSpan("receive", ROUTER, 0.0, read_at - origin))
        spans.append(TraceSpan("prepare", ROUTER, read_at - origin, prepared_at - read_at))
        spans.append(TraceSpan("queue", ROUTER, prepared_at - origin, first_began_at - prepared_at))
    for number, attempt in enumerate(timeline.attempts):
        later = timeline.attempts[number + 1 :]
        spans += _attempt_spans(attempt, origin, later[0].began_at if later else ended_at)
    written_at = min(timeline.first_written_at, ended_at)
    if written_at > timeline.first_token_at:
        seconds = written_at - timeline.first_token_at
        spans.append(TraceSpan("write", ROUTER, timeline.first_token_at - origin, seconds))
    if timeline.num_tokens > 1:
        seconds = timeline.last_token_at - timeline.first_token_at
        spans.append(TraceSpan("stream", ROUTER, timeline.first_token_at - origin, seconds, timeline.num_tokens))
    spans += [TraceSpan("gap", ROUTER, gap.begin - origin, gap.seconds, gap.num_tokens_before) for gap in timeline.gaps]
    return spans


def _attempt_spans(attempt: AttemptTimeline, origin: float, end: float) -> Iterator[TraceSpan]:
    """Yield the spans of an attempt, the router's first, then those of its workers."""
    began_at = attempt.began_at
    yield TraceSpan("attempt", ROUTER, began_at - origin, max(0.0, end - began_at), detail=attempt.failure)
    yield from _worker_spans(attempt, attempt.prefill_marks, attempt.prefill, PREFILL_SPANS, origin)
    yield from _worker_spans(attempt, attempt.decode_marks, attempt.decode, DECODE_SPANS, origin)


def _worker_spans(
    attempt: AttemptTimeline, marks: Sequence[Mark], process: str, names: WorkerSpans, origin: float
) -> Iterator[TraceSpan]:
    """Yield the intervals between a worker's marks, none of them negative."""
    cursor = attempt.began_at
    for mark in sorted(marks, key=lambda mark: mark.at):
        at = max(mark.at, cursor)
        name, _ = names[mark.kind] if mark.kind in names else _ALL_SPANS[mark.kind]
        yield TraceSpan(name, process, cursor - origin, at - cursor, mark.amount)
        cursor = at
