"""Reports of ended requests: their metrics, the log's line, traces. All of them are views of the request's timeline."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from itertools import takewhile

from splitserve.protocol.cluster_report import RequestRates, RequestSummary, RequestTrace, RequestTraces
from splitserve.router.admin.activity import WINDOW_SECONDS, Activity, line_of
from splitserve.router.admin.metrics import RouterMetrics
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


class RequestReports:
    """Must be created, used and closed on the event loop's thread. ``writes_lines``: a line in the log per request, not
    only for those that failed."""

    def __init__(self, core: RouterCore, metrics: RouterMetrics, tracing: NoTracing, *, writes_lines: bool) -> None:
        self._core = core
        self._metrics = metrics
        self.tracing = tracing
        self._unix_offset = time.time() - time.monotonic()  # of the clock that timelines use
        self._writes_lines = writes_lines
        self._kept: OrderedDict[str, tuple[RequestSummary, Timeline]] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self.activity = Activity(self._loop.time())
        self._line_due_at = self._loop.time() + WINDOW_SECONDS
        self._timer = self._loop.call_later(SAMPLE_SECONDS, self._sample)

    def close(self) -> None:
        self._timer.cancel()

    def count_tokens(self, effect: CountTokens) -> None:
        """Count tokens that are delivered to a client."""
        self.activity.totals.num_output_tokens += effect.num_tokens
        self._metrics.count_tokens(effect)

    def on_end(self, effect: Ended) -> None:
        """Report a request that has ended."""
        timeline = effect.request.timeline
        summary = summaries.summarize(effect.request, timeline.ended_at)
        self.activity.note_end(summary, timeline.ended_at)
        self._metrics.observe_end(summary)
        self._kept[summary.request_id] = summary, timeline
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        self.tracing.on_end(effect.request.context.trace, summary, timeline, self._unix_offset)
        level = logging.WARNING if summary.status == "failed" else logging.INFO
        if (self._writes_lines or level > logging.INFO) and log.isEnabledFor(level):
            log.log(level, "%s", summaries.line_of(summary), extra={"fields": partial(summaries.fields_of, summary)})

    def rates(self) -> RequestRates:
        """Return the rates of the last seconds."""
        admitted, waiting = self._core.admission.num_admitted, len(self._core.waiting_room)
        return self.activity.rates(admitted, waiting, self._loop.time())

    def ended_since(self, since: float) -> Iterator[tuple[RequestSummary, Timeline]]:
        """Yield those of the kept ended requests that ended after ``since``, the latest first."""
        return takewhile(lambda kept: kept[1].ended_at > since, reversed(self._kept.values()))

    def traces(self, id_begin: str) -> RequestTraces:
        """Return those of the kept ended requests whose ids begin so."""
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
