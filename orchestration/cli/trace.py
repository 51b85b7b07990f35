"""``splitserve trace``: the timelines of requests that have ended, as text or as a file for Perfetto."""

import argparse
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.operate import add_operators_key_option
from splitserve.orchestration.cli.options import HelpFormatter
from splitserve.protocol.cluster_report import RequestTrace, RequestTraces

LANE_WIDTH = 40
MICROSECONDS = 1e6


def add_trace_command(commands: Any) -> None:
    """Add the command to ``commands``, the result of :meth:`argparse.ArgumentParser.add_subparsers`."""
    parser = commands.add_parser(
        "trace",
        help="show where a request's time went, over all processes",
        description="Show the timeline of a request that has ended: the router keeps the last 1024.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "request_id", metavar="REQUEST_ID", help="X-Request-Id of the answer, or the longer id in the log"
    )
    parser.add_argument("--against", default="http://127.0.0.1:8000", metavar="URL", help="endpoint of the cluster")
    add_operators_key_option(parser)
    parser.add_argument("--perfetto", default="", metavar="FILE", help="write a trace that ui.perfetto.dev opens")
    parser.set_defaults(run=run_trace)


def run_trace(options: argparse.Namespace) -> int:
    """Print the traces, or write them to a file. Raises :class:`ConfigError`."""
    from splitserve.orchestration.doctor.http import Endpoint
    from splitserve.orchestration.spec.expansion import read_operators_key

    endpoint = Endpoint(options.against, read_operators_key(options.api_key_file))
    answer = endpoint.get(f"/admin/requests/{quote(options.request_id, safe='')}")
    if answer.status == HTTPStatus.NOT_FOUND:
        raise ConfigError(
            f"{options.against} knows no ended request {options.request_id}: give the X-Request-Id of one of its last "
            "1024 answers"
        )
    if answer.status != HTTPStatus.OK:
        raise ConfigError(
            f"{options.against} answered {answer.status} to GET /admin/requests: is it a Splitserve router?"
        )
    traces = endpoint.decoded(answer, RequestTraces).traces
    if options.perfetto:
        try:
            Path(options.perfetto).write_bytes(msgspec.json.encode(chrome_trace(traces)))
        except OSError as error:
            raise ConfigError(f"can't write {options.perfetto}: {error.strerror or error}") from error
        print(f"{options.perfetto}: {len(traces)} requests; open it at https://ui.perfetto.dev")
        return 0
    print("\n\n".join(trace_text(trace) for trace in traces))
    return 0


def trace_text(trace: RequestTrace) -> str:
    """Return the spans of a request as lines with a bar each, and the stages of its time to first token."""
    summary = trace.summary
    total = max(summary.seconds, 1e-9)
    lines = [f"request {summary.request_id}: {summary.status} ({summary.reason}) after {1e3 * summary.seconds:.2f} ms"]
    width = max(len(span.process) for span in trace.spans)
    for span in sorted(trace.spans, key=lambda span: span.begin):
        begin = min(LANE_WIDTH - 1, max(0, int(LANE_WIDTH * span.begin / total)))
        length = max(1, min(LANE_WIDTH - begin, round(LANE_WIDTH * span.seconds / total)))
        lane = (" " * begin + "=" * length).ljust(LANE_WIDTH)
        times = f"{1e3 * span.begin:10.3f} {1e3 * span.seconds:10.3f} ms"
        amount = f" ({span.amount} tokens)" if span.amount else ""
        detail = f" ({span.detail})" if span.detail else ""
        lines.append(f"  {span.process:{width}} |{lane}| {times}  {span.name}{detail}{amount}")
    for title, stages in (("time to first token", summary.ttft_stages), ("hand-over", summary.handover_stages)):
        if stages:
            shown = ", ".join(f"{stage} {1e3 * seconds:.3f}" for stage, seconds in stages.items())
            lines.append(f"  {title}: {1e3 * sum(stages.values()):.3f} ms = {shown}")
    return "\n".join(lines)


def chrome_trace(traces: list[RequestTrace]) -> dict[str, Any]:
    """Return the traces in Chrome's trace event format: a process per process, a thread per request."""
    found = {span.process for trace in traces for span in trace.spans}
    processes = sorted(found, key=lambda name: (name != "router", name))
    ids = {process: number for number, process in enumerate(processes, 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
        for process, pid in ids.items()
    ]
    origin = min((trace.began_at for trace in traces), default=0.0)
    for thread, trace in enumerate(traces, 1):
        request_id = trace.summary.request_id
        for process in sorted({span.process for span in trace.spans}):
            name = {"name": f"request {request_id}"}
            events.append({"ph": "M", "name": "thread_name", "pid": ids[process], "tid": thread, "args": name})
        for span in trace.spans:
            begin = trace.began_at - origin + span.begin
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": "request",
                    "pid": ids[span.process],
                    "tid": thread,
                    "ts": begin * MICROSECONDS,
                    "dur": span.seconds * MICROSECONDS,
                    "args": {"request_id": request_id, "tokens": span.amount, "reason": span.detail},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
