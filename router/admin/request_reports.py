"""Reports of ended requests: their metrics, the log's line, traces. All of them are views of the request's timeline.

Requests are reported in batches, at most ``REPORT_SECONDS`` after their end, and at once when a report is asked for or
a request failed: the code and the memory of a report are then at hand for the next one, which halves its cost.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from itertools import takewhile

from splitserve.common.logs import write_at_once
from splitserve.protocol.cluster_report import RequestRates, RequestSummary, RequestTrace, RequestTraces
from splitserve.router.admin.activity import WINDOW_SECONDS, Activity, line_of
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.effects import CountTokens, Ended
from splitserve.router.requests.timeline import summary as summaries
from splitserve.router.requests.timeline.spans import spans_of
from splitserve.router.requests.timeline.timeline import Timeline
from splitserve.router.tracing.tracing import NoTracing

log = logging.getLogger(__name__)

MAX_KEPT = 1024
"""Number of ended requests whose timelines are kept for ``splitserve trace``."""
SAMPLE_SECONDS = 1.0
REPORT_SECONDS = 0.1
MAX_UNREPORTED = 64


class RequestReports:
    """Must be created, used and closed on the event loop's thread. ``writes_lines``: a line in the log per request, not
    only for those that failed."""

    def __init__(self, core: RouterCore, metrics: RouterMetrics, tracing: NoTracing, *, writes_lines: bool) -> None:
        self._core = core
        self._metrics = metrics
        self.tracing = tracing
        self._unix_offset = time.time() - time.monotonic()  # of the clock that timelines use
        self._writes_lines = writes_lines
        self._unreported: list[ActiveRequest] = []
        self._report_timer: asyncio.TimerHandle | None = None  # set while some are unreported
        self._kept: OrderedDict[str, tuple[RequestSummary, Timeline]] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self.activity = Activity(self._loop.time())
        self._line_due_at = self._loop.time() + WINDOW_SECONDS
        self._timer = self._loop.call_later(SAMPLE_SECONDS, self._sample)
        self._totals, self._num_tokens_counted = self.activity.totals, 0
        self._observe_ttft, self._observe_itl = metrics.ttft_seconds.observe, metrics.itl_seconds.observe
        metrics.before_collection = self._complete_metrics

    def close(self) -> None:
        self.report_ended()
        self._timer.cancel()

    def count_tokens(self, effect: CountTokens) -> None:
        """Count tokens that are delivered to a client."""
        self._totals.num_output_tokens += effect.num_tokens
        (self._observe_ttft if effect.are_first else self._observe_itl)(effect.seconds)

    def on_end(self, effect: Ended) -> None:
        """Report a request that has ended, soon."""
        self._unreported.append(effect.request)
        if len(self._unreported) >= MAX_UNREPORTED or effect.request.state.failure is not None:
            self.report_ended()
        elif self._report_timer is None:
            self._report_timer = self._loop.call_later(REPORT_SECONDS, self.report_ended)

    def report_ended(self) -> None:
        """Report the requests that have ended and aren't reported."""
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        if not self._unreported:
            return
        ended, self._unreported = self._unreported, []
        records = []
        for request in ended:
            summary = self._report(request)
            level = logging.WARNING if summary.status == "failed" else logging.INFO
            if (self._writes_lines or level > logging.INFO) and log.isEnabledFor(level):
                records.append(self._record(summary, level, request.timeline.ended_at))
        write_at_once(records)

    def _complete_metrics(self) -> None:
        """Bring the metrics up to date: counting a token there takes a lock."""
        self.report_ended()
        self._metrics.output_tokens.inc(self._totals.num_output_tokens - self._num_tokens_counted)
        self._num_tokens_counted = self._totals.num_output_tokens

    def _report(self, request: ActiveRequest) -> RequestSummary:
        """Report a request, except for its line; return its summary."""
        timeline = request.timeline
        summary = summaries.summarize(request, timeline.ended_at)
        self.activity.note_end(summary, timeline.ended_at)
        self._metrics.observe_end(summary)
        self._kept[summary.request_id] = summary, timeline
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        self.tracing.on_end(request.context.trace, summary, timeline, self._unix_offset)
        return summary

    def _record(self, summary: RequestSummary, level: int, ended_at: float) -> logging.LogRecord:
        """Return the record of a request's line, with the time of its end."""
        record = logging.LogRecord(log.name, level, "", 0, summaries.line_of(summary), None, None)
        record.created = ended_at + self._unix_offset
        record.msecs = 1e3 * (record.created % 1)
        record.fields = partial(summaries.fields_of, summary)
        return record

    def rates(self) -> RequestRates:
        """Return the rates of the last seconds."""
        self.report_ended()
        admitted, waiting = self._core.admission.num_admitted, len(self._core.waiting_room)
        return self.activity.rates(admitted, waiting, self._loop.time())

    def ended_since(self, since: float) -> Iterator[tuple[RequestSummary, Timeline]]:
        """Yield those of the kept ended requests that ended after ``since``, the latest first."""
        self.report_ended()
        return takewhile(lambda kept: kept[1].ended_at > since, reversed(self._kept.values()))

    def traces(self, id_begin: str) -> RequestTraces:
        """Return those of the kept ended requests whose ids begin so."""
        self.report_ended()
        found = [kept for request_id, kept in self._kept.items() if request_id.startswith(id_begin)]
        return RequestTraces(
            traces=[
                RequestTrace(
                    summary=summary, began_at=timeline.arrived_at + self._unix_offset, spans=spans_of(timeline)
                )
                for summary, timeline in found
            ]
        )

    def _sample(self) -> None:
        now = self._loop.time()
        self._timer = self._loop.call_later(SAMPLE_SECONDS, self._sample)
        self._unix_offset = time.time() - time.monotonic()  # the system's clock may be set
        if now >= self._line_due_at:
            self._line_due_at = now + WINDOW_SECONDS
            line = line_of(self.rates())
            if line:
                log.info("%s", line)
        self.activity.sample(now)
