"""``splitserve bench observability``: CPU time that timeline, log, metrics and traces add to the router.

    splitserve bench observability --rounds 30

The router's core and its reports handle the messages of requests, as they come over the wire, by turns with all of it,
with traces of 1% and of all requests besides, and without any of it: no marks in the messages, no timeline, no metrics,
no log. Figures are CPU time of the process with its threads, the least of the rounds: other processes only add to it.
The log goes to a file. What traces of 1% add follows from those of all, since it is less than the clock's noise.
"""

import argparse
import asyncio
import contextlib
import logging
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from splitserve.benchmarks.common.arguments import positive
from splitserve.benchmarks.common.report import add_result_options, keep_result, table
from splitserve.benchmarks.router.worker_script import DEFAULT_LAYOUT
from splitserve.common.collector import Collector
from splitserve.common.logs import set_up_logging
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.marks import Mark, MarkKind
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.messages.requests import HandoverReport, StepTokens, TokenDelta
from splitserve.protocol.request import FinishReason, Party, RequestKey, Role, SamplingParams
from splitserve.protocol.wire import decode, encode
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.admin.request_reports import RequestReports
from splitserve.router.links.membership import Membership
from splitserve.router.placement.policies import Placed
from splitserve.router.placement.prefix_view import PrefixView
from splitserve.router.requests.active_request import ActiveRequest, RequestContext
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.effects import Count, CountTokens, Ended, Observe
from splitserve.router.requests.events import Event, FromWorker, Submit
from splitserve.router.requests.settlement import Settlement
from splitserve.router.requests.state import RequestPhase, Update
from splitserve.router.requests.timeline.timeline import Timeline
from splitserve.router.tracing.context import begin_trace
from splitserve.router.tracing.tracing import NoTracing, Tracing

if TYPE_CHECKING:
    from splitserve.router.tracing.exporter import OtlpExporter

PREFILL, DECODE = Party("prefill-0", 1), Party("decode-0", 2)
PREFILL_MARKS = [MarkKind.ACCEPTED, MarkKind.GRANTED, MarkKind.BEGUN, MarkKind.CHUNK, MarkKind.CHUNK, MarkKind.DRAWN]
DECODE_MARKS = [
    MarkKind.ACCEPTED, MarkKind.GRANTED, MarkKind.READING, MarkKind.OFFERED, MarkKind.POSTED, MarkKind.READ,
    MarkKind.VERIFIED, MarkKind.BEGUN, MarkKind.DRAWN,
]  # fmt: skip
NUM_PROMPT_TOKENS = 512
STEP_SECONDS = 0.01
BATCH = 100
FEW, MANY = 2, 66  # output tokens of a request
TRACE_RATIO = 0.01
REPORTED_TOGETHER = 10
"""Requests in a batch of reports: as many end within ``REPORT_SECONDS`` at 100 per second, far from a full router."""
WITH, TRACED, ALL_TRACED, WITHOUT = "with", "with traces of 1%", "with traces of all", "without"


class NoTimeline(Timeline):
    """A timeline that notes nothing but the number of tokens, which the core asks for."""

    def begin_attempt(self, placement: Placed, now: float, primary: Timeline | None = None) -> None:
        """Do nothing."""

    def on_tokens(self, count: int, now: float) -> float:
        """Count the tokens."""
        del now
        self.num_tokens += count
        return 0.0


class NoSettlement(Settlement):
    """A settlement that releases charges, and counts nothing."""

    def on_tokens(self, request: ActiveRequest, count: int, now: float) -> None:
        """Release the charge of the prompt."""
        del count
        if request.charge is not None:
            request.charge.first_token_out(now)

    def on_handover(self, request: ActiveRequest, update: Update, now: float) -> None:
        """Do nothing."""

    def on_end(self, request: ActiveRequest, now: float) -> None:
        """Release the charge; note what placement learns from the end."""
        self._release(request, now)
        if request.state.phase is RequestPhase.FINISHED and request.state.placement is not None:
            self._note_output(request)
            for record in map(self._membership.get, request.state.placement.parties):
                if record is not None:
                    record.breaker.on_success()


class Arm:
    """A router's core with its reports, or without them."""

    def __init__(self, exporter: "OtlpExporter | None" = None, ratio: float = 0.0, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._exporter = exporter
        self._tracing = NoTracing() if exporter is None else Tracing(exporter, ratio)
        self._trace_ratio = ratio
        membership = Membership(5.0, 60.0)
        self._core = RouterCore(
            RouterConfig(model="m", served_model_name="m"), membership, PrefixView(), random.Random(0)
        )
        for party, role in ((PREFILL, Role.PREFILL), (DECODE, Role.DECODE)):
            info = WorkerInfo(party, role, f"tcp://{party.engine_id}", 1, DEFAULT_LAYOUT, 1 << 20, 64, 1 << 20, 1000)
            membership.register(party, info, time.monotonic())
            membership.link_up(party)
        metrics = RouterMetrics("m")
        self.reports = RequestReports(self._core, metrics, self._tracing, writes_lines=True)
        self._performers: dict[type, Callable[[Any], None]] = {}
        if is_on:
            self._performers = {
                Count: metrics.count,
                CountTokens: self.reports.count_tokens,
                Ended: self.reports.on_end,
                Observe: metrics.observe,
            }
        else:
            quiet = object.__new__(NoSettlement)
            quiet.__dict__.update(self._core._settlement.__dict__)
            self._core._settlement = self._core.requests._settlement = quiet

    def run(self, messages: Sequence[tuple[str, Sequence[tuple[float, bytes]]]]) -> float:
        """Return the CPU seconds of the requests with these ids and messages."""
        prompt, now = array("i", range(NUM_PROMPT_TOKENS)), time.monotonic()
        collector = Collector()  # as the router's
        collector.start()
        began_at = time.process_time()
        for number, (request_id, payloads) in enumerate(messages, 1):
            num_tokens = len(payloads) - 1  # the first one comes twice
            context = RequestContext(
                request_id, trace=begin_trace((), self._trace_ratio) if self._trace_ratio else None
            )
            request = ActiveRequest.new(request_id, prompt, SamplingParams(max_tokens=num_tokens), now, context)
            if not self.is_on:
                request.timeline = NoTimeline(now)
            self._handle(Submit(request), now)
            for later, payload in payloads:
                envelope = decode(payload)
                self._handle(FromWorker(envelope.sender, envelope.body), now + later)
            assert request.state.ended, "the messages don't end the request"
            if not number % REPORTED_TOGETHER:
                self.reports.report_ended()
        if self._exporter is not None:
            self._exporter.flush()
        spent = time.process_time() - began_at
        collector.stop()
        return spent

    def _handle(self, event: Event, now: float) -> None:
        for effect in self._core.handle(event, now):
            perform = self._performers.get(type(effect))
            if perform is not None:
                perform(effect)


def messages_of(request_id: str, num_tokens: int, *, has_marks: bool) -> Iterator[tuple[float, bytes]]:
    """Yield the messages of both workers about a request, with the seconds after its arrival at which they come."""
    key, began_at = RequestKey(request_id), time.monotonic()

    def marks(kinds: Sequence[MarkKind], later: float) -> list[Mark]:
        first = began_at + later - 1e-4 * len(kinds)
        return [Mark(kind, first + 1e-4 * n, 256) for n, kind in enumerate(kinds)] if has_marks else []

    def message(sender: Party, delta: TokenDelta) -> bytes:
        return encode(Envelope(sender, None, StepTokens([delta])))

    yield STEP_SECONDS, message(PREFILL, TokenDelta(key, 0, [1], marks=marks(PREFILL_MARKS, STEP_SECONDS)))
    report = HandoverReport("prefill-0", "nixl/cma", 8, 1 << 20, 0, 1)
    yield 2 * STEP_SECONDS, message(DECODE, TokenDelta(key, 0, [1], handover=report))
    for position in range(1, num_tokens):
        later = (position + 2) * STEP_SECONDS
        reason = FinishReason.LENGTH if position == num_tokens - 1 else None
        more = marks(DECODE_MARKS, later) if position == 1 else []
        yield later, message(DECODE, TokenDelta(key, position, [1], finish_reason=reason, marks=more))


def measure(rounds: int, collector: str) -> dict[str, dict[str, float]]:
    """Return the microseconds of CPU time per request and per token, by arm, and what the arms add."""
    arms = {WITH: Arm(), WITHOUT: Arm(is_on=False)}
    exporter = _exporter(collector) if collector else None
    if exporter is not None:
        arms |= {TRACED: Arm(exporter, TRACE_RATIO), ALL_TRACED: Arm(exporter, 1.0)}
    seconds: dict[str, dict[int, list[float]]] = {name: {FEW: [], MANY: []} for name in arms}
    for turn in range(rounds):
        names = list(arms) if turn % 2 else list(reversed(arms))
        for num_tokens in (FEW, MANY):
            for name in names:
                ids = [f"{turn}-{num_tokens}-{number}" for number in range(BATCH)]
                messages = [(each, list(messages_of(each, num_tokens, has_marks=arms[name].is_on))) for each in ids]
                seconds[name][num_tokens].append(arms[name].run(messages) / BATCH)
    for arm in arms.values():
        arm.reports.close()
    if exporter is not None:
        exporter.close()
    return {name: _costs(found, seconds[WITHOUT]) for name, found in seconds.items()}


def _exporter(collector: str) -> "OtlpExporter":
    from splitserve.router.tracing.exporter import OtlpExporter  # which needs the extra "otel"

    return OtlpExporter(collector, "m")


def trace_costs(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the microseconds that a sampled request adds, and what traces of 1% add to each request."""
    if ALL_TRACED not in rows:
        return {}
    sampled = rows[ALL_TRACED]["us_per_request_of_many"] - rows[WITH]["us_per_request_of_many"]
    return {"us_per_sampled_request": sampled, "us_per_request_at_1_percent": TRACE_RATIO * sampled}


def _costs(found: dict[int, list[float]], without: dict[int, list[float]]) -> dict[str, float]:
    """Return the costs of an arm, and what it adds to the arm without."""
    added = {number: min(found[number]) - min(without[number]) for number in found}
    per_token = (added[MANY] - added[FEW]) / (MANY - FEW)
    return {
        "us_per_request_of_few": 1e6 * min(found[FEW]),
        "us_per_request_of_many": 1e6 * min(found[MANY]),
        "added_us_per_request": 1e6 * (added[FEW] - FEW * per_token),
        "added_us_per_token": 1e6 * per_token,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench that ``argv`` describes."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="splitserve bench observability", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=positive, default=30, help="turns of each arm")
    parser.add_argument(
        "--otlp-endpoint", default="", metavar="URL", help="collector for the arm with traces; empty: none"
    )
    add_result_options(parser)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryFile("w") as log, contextlib.redirect_stderr(log):
        set_up_logging("router", "info")
        rows = asyncio.run(_measure(options))
        logging.getLogger().handlers.clear()
    headers = ["arm", "us/request", "us/request", "added us/request", "added us/token"]
    print(table([(name, *(round(value, 2) for value in row.values())) for name, row in rows.items()], headers))
    print(f"of {FEW} and of {MANY} output tokens; added: against {WITHOUT!r}, apart from its tokens")
    traces = trace_costs(rows)
    if traces:
        print("traces: {:.0f} us per sampled request; at 1% {:.1f} us per request".format(*traces.values()))
    keep_result("observability", arguments, {"results": rows, "traces": traces}, options)
    return 0


async def _measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    return measure(options.rounds, options.otlp_endpoint)


if __name__ == "__main__":
    sys.exit(main())
