"""Overviews of the running cluster, made when they are asked for, and the samples that they need."""

import asyncio
import socket
import time
from itertools import islice
from pathlib import Path
from typing import Protocol

import msgspec

from splitserve import __version__
from splitserve.protocol.cluster_report import RequestTrace
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.reports.overview import Overview, RouterFigures, Times
from splitserve.router.admin.diagnosis.diagnose import diagnose
from splitserve.router.admin.overview.request_figures import (
    EndedRequest,
    first_tokens,
    handover_stage_figures,
    objective_figures,
    paths_of,
    prompt_figures,
    times_of,
    transport_figures,
    ttft_stage_figures,
)
from splitserve.router.admin.overview.samples import (
    SAMPLE_SECONDS,
    WINDOW_SECONDS,
    HeardLoad,
    LoadSample,
    RouterSample,
    Samples,
)
from splitserve.router.admin.overview.worker_figures import link_problems, link_speeds, tier_hits, worker_figures
from splitserve.router.admin.request_reports import RequestReports
from splitserve.router.links.membership import Membership
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.objectives import Objectives
from splitserve.router.requests.timeline.spans import spans_of

MAX_AGE_SECONDS = 1.0
"""Age of an overview that is given again: however many pages are open, one is made per second."""
MAX_ENDED = 512
"""Requests that an overview is made of, the latest: a few milliseconds of the event loop."""
MAX_ACTIVE = 256
"""Requests in flight that an overview looks at in detail."""
MIN_TOKENS_OF_ITL = 8
NUM_SLOWEST = 12
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Clients(Protocol):
    """The clients' connections, as far as the overview is concerned."""

    def unread(self, now: float) -> tuple[int, float]:
        """Return the number of connections whose client does not read its answer, and the longest such time."""


class NoClients:
    """No connections: the router has not begun to listen."""

    def unread(self, _now: float) -> tuple[int, float]:
        return 0, 0.0


class Overviews:
    """Must be created, used and closed on the event loop's thread."""

    def __init__(self, config: RouterConfig, core: RouterCore, membership: Membership, reports: RequestReports) -> None:
        self.clients: Clients = NoClients()
        self._config = config
        self._objectives = Objectives(config.ttft_objective_ms / 1e3, config.tpot_objective_ms / 1e3)
        self._core = core
        self._membership = membership
        self._reports = reports
        self._samples = Samples()
        self._last: Overview | None = None
        self._made_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._due_at: float | None = None  # the first sample comes late: the router starts meanwhile
        self._timer = self._loop.call_later(SAMPLE_SECONDS, self._sample)

    def close(self) -> None:
        self._timer.cancel()

    def _sample(self) -> None:
        now = time.monotonic()
        lag = 0.0 if self._due_at is None else max(0.0, now - self._due_at)
        self._due_at = now + SAMPLE_SECONDS
        self._timer = self._loop.call_later(SAMPLE_SECONDS, self._sample)
        self._samples.add(RouterSample(now, time.thread_time(), _wait_seconds(), lag))
        records = self._membership.records()
        if self._samples.wants_loads(len(records), now):
            loads = {record.info.party: HeardLoad(record.last_heard, record.load) for record in records}
            self._samples.add_loads(LoadSample(now, loads))

    def overview(self) -> Overview:
        """Return an overview that is at most ``MAX_AGE_SECONDS`` old."""
        now = time.monotonic()
        if self._last is None or now > self._made_at + MAX_AGE_SECONDS:
            found = self._make(now)
            self._last = msgspec.structs.replace(found, diagnosis=diagnose(found))
            self._made_at = now
        return self._last

    def _make(self, now: float) -> Overview:
        since = max(self._began_at, now - WINDOW_SECONDS)
        ended = [EndedRequest(*kept) for kept in islice(self._reports.ended_since(since), MAX_ENDED)]
        if len(ended) == MAX_ENDED:
            since = max(since, ended[-1].timeline.ended_at)
        seconds = max(now - since, 1.0)
        records = self._membership.records()
        active = list(islice(reversed(list(self._core.requests)), MAX_ACTIVE))
        begun = first_tokens(ended, active, since)
        speeds = link_speeds(records)
        return Overview(
            version=__version__,
            machine=socket.gethostname(),
            served_model_name=self._config.served_model_name,
            clock_seconds=time.time(),
            seconds=seconds,
            rates=self._reports.rates(),
            ttft=times_of(each.ttft_seconds for each in begun),
            itl=_itl(ended, active),
            longest_gap=times_of(
                each.summary.longest_gap_seconds for each in ended if each.summary.num_output_tokens > 1
            ),
            stages=ttft_stage_figures(begun),
            handover_stages=handover_stage_figures(ended),
            prompts=prompt_figures(begun),
            hits=tier_hits(records, self._samples),
            transports=transport_figures(ended, speeds, link_problems(records), seconds),
            paths=paths_of(ended),
            objectives=objective_figures(ended, self._objectives),
            router=self._router(now),
            workers=worker_figures(records, self._samples, ended, now),
            slowest=_slowest(ended),
        )

    def _router(self, now: float) -> RouterFigures:
        readiness = self._core.placer.readiness(now)
        num_unread, unread_seconds = self.clients.unread(now)
        queued = self._core.gate.queue.requests()
        busy_share, starved_share = self._samples.shares()
        pause = self._core.pause
        return RouterFigures(
            busy_share=busy_share,
            starved_share=starved_share,
            lag_seconds=self._samples.lag_seconds(),
            num_in_flight=self._core.admission.num_admitted,
            max_in_flight=self._config.max_requests_in_flight,
            num_active=len(self._core.requests),
            num_waiting=len(self._core.waiting_room),
            num_queued=len(queued),
            queued_tokens=sum(len(request.token_ids) for request in queued),
            num_unread=num_unread,
            unread_seconds=unread_seconds,
            is_ready=readiness.is_ready,
            not_ready_reason=readiness.reason,
            pause_mode=str(pause.mode or ""),
            paused_seconds=now - pause.since if pause.is_on else 0.0,
        )


def _wait_seconds() -> float:
    """Return the time in which this thread was runnable and had no core; 0.0 where the system does not count it."""
    try:
        return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _itl(ended: list[EndedRequest], active: list[ActiveRequest]) -> Times:
    """Return the times per output token, those of requests in flight included."""
    timelines = [each.timeline for each in ended]
    timelines += [each.timeline for each in active if each.timeline.num_tokens >= MIN_TOKENS_OF_ITL]
    return times_of(seconds for timeline in timelines if (seconds := timeline.itl_seconds) is not None)


def _slowest(ended: list[EndedRequest]) -> list[RequestTrace]:
    """Return the requests whose client waited longest for a token, the first or a later one."""
    offset = time.time() - time.monotonic()
    waited = sorted(ended, key=lambda each: -max(each.summary.ttft_seconds or 0.0, each.summary.longest_gap_seconds))
    return [
        RequestTrace(summary=each.summary, began_at=each.timeline.arrived_at + offset, spans=spans_of(each.timeline))
        for each in waited[:NUM_SLOWEST]
    ]
