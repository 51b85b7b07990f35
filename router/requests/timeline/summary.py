"""Summary of a request that has ended, made once from its state and timeline for metrics, logs and traces. Pure."""

import msgspec

from splitserve.protocol.cluster_report import RequestSummary
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.outcome import outcome
from splitserve.router.requests.timeline.stages import all_stages


def summarize(request: ActiveRequest, now: float) -> RequestSummary:
    """Return the summary of a request that ends ``now``."""
    state, timeline = request.state, request.timeline
    intended, actual, reason = outcome(state)
    last, handover = timeline.attempts[-1], state.handover
    ttft_stages, handover_stages = all_stages(timeline, has_handover=handover is not None)
    return RequestSummary(
        request_id=state.request_id,
        status=state.phase.value,
        intended=intended,
        actual=actual,
        reason=reason,
        message="" if state.failure is None else state.failure.message,
        finish_reason="" if state.output.finish_reason is None else state.output.finish_reason.value,
        prefill=last.prefill,
        decode=last.decode,
        num_attempts=state.num_attempts,
        num_prompt_tokens=len(request.token_ids),
        num_cached_tokens=state.num_cached_tokens,
        num_known_tokens=request.num_known_tokens,
        num_output_tokens=timeline.num_tokens,
        seconds=now - timeline.arrived_at,
        ttft_seconds=timeline.ttft_seconds,
        itl_seconds=timeline.itl_seconds,
        longest_gap_seconds=timeline.longest_gap_seconds,
        num_gaps=timeline.num_gaps,
        handover_seconds=last.handover_seconds,
        transport="" if handover is None else handover.transport,
        handover_bytes=0 if handover is None else handover.bytes,
        handover_read_seconds=0.0 if handover is None else handover.read_seconds,
        ttft_stages=ttft_stages,
        handover_stages=handover_stages,
        request_class=request.context.request_class.name,
        tenant=request.context.tenant,
        predicted_ttft_seconds=request.predicted_ttft_seconds,
        handover_reads=0 if handover is None else handover.reads,
    )


def fields_of(summary: RequestSummary) -> dict[str, object]:
    """Return the summary for a log of JSON lines, without empty fields; ``failure`` is what :attr:`message` is, since
    each line has a message of its own."""
    fields = msgspec.structs.asdict(summary)
    fields["failure"] = fields.pop("message")
    return {name: value for name, value in fields.items() if value not in ("", None, {})}


def line_of(summary: RequestSummary) -> str:
    """Return the summary as one line for people: ``request ID finished: prefill-0 -> decode-0, prompt=512 ...``."""
    workers = summary.prefill
    if summary.decode != summary.prefill:
        workers += f" -> {summary.decode}"
    prompt, cached, output = summary.num_prompt_tokens, summary.num_cached_tokens, summary.num_output_tokens
    parts = [f"prompt={prompt} cached={cached} output={output}"]
    if summary.num_attempts > 1:
        parts.append(f"attempts={summary.num_attempts}")
    if summary.ttft_seconds is not None:
        parts.append(f"ttft_ms={1e3 * summary.ttft_seconds:.1f}")
    if summary.predicted_ttft_seconds is not None:
        parts.append(f"predicted_ttft_ms={1e3 * summary.predicted_ttft_seconds:.1f}")
    if summary.itl_seconds is not None:
        parts.append(f"itl_ms={1e3 * summary.itl_seconds:.2f}")
    if summary.handover_seconds is not None:
        parts.append(f"handover_ms={1e3 * summary.handover_seconds:.2f} transport={summary.transport}")
    parts.append(f"seconds={summary.seconds:.3f}")
    why = summary.reason if summary.reason != "ok" else summary.finish_reason or "ok"
    message = f": {summary.message}" if summary.message else ""
    return f"request {summary.request_id} {summary.status} ({why}), {workers}, {' '.join(parts)}{message}"
