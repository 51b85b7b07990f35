"""The asyncio shell of :class:`splitserve.router.requests.core.RouterCore`: sockets, timers, and clients that await
answers.

    HTTP request -> submit_in_time -> core.handle(Submit) -> effects: the workers' links, timers, metrics, its Inbox
    tokens, joined by links/arrivals; other messages, timers, clients that leave -> core.handle(...)

Everything runs on one event loop and nothing here blocks. No decision is made here.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from splitserve.common.turns import Turns
from splitserve.protocol.cluster_report import RequestRates, RequestTraces
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.requests import ClockReading, Profiled
from splitserve.protocol.messages.routers import MAX_QUESTION_CHARS
from splitserve.protocol.request import Party, SamplingParams
from splitserve.protocol.token_ids import TokenIds
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.admin.operations import Operations
from splitserve.router.admin.overview.overviews import Overviews
from splitserve.router.admin.profiles import Profiles
from splitserve.router.admin.request_reports import RequestReports
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.inbox import Inbox
from splitserve.router.links.arrivals import joined
from splitserve.router.links.fleet import Fleet
from splitserve.router.peers.exchange import Exchange
from splitserve.router.peers.sums import joined_traces, summed_rates
from splitserve.router.placement.placer import Limits, Readiness
from splitserve.router.requests.active_request import NO_CONTEXT, ActiveRequest, RequestContext
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.effects import (
    Begun,
    CachesAreReset,
    CancelTimer,
    Count,
    CountTokens,
    Deliver,
    Effect,
    Ended,
    Log,
    Observe,
    PauseIsFollowed,
    Refuse,
    Send,
    SetTimer,
    Stale,
    TellLimits,
    TellRouters,
)
from splitserve.router.requests.events import (
    AskLimits,
    Cancel,
    Close,
    Event,
    FromWorker,
    NotSent,
    StopStringReached,
    Submit,
    TenantsChanged,
    Timer,
    TimerFired,
    WorkerLost,
    WorkerReady,
)
from splitserve.router.requests.queue.classes import Classes
from splitserve.router.requests.queue.tenants import NO_TENANTS, OWN, read_tenants
from splitserve.router.requests.waiting_room import no_worker
from splitserve.router.tracing.tracing import tracing_of

log = logging.getLogger(__name__)

WatchClient: TypeAlias = Callable[[], asyncio.Future[None]]
"""Function that begins to watch a client's connection; its future is done when the client has disconnected."""


class ClientGoneError(Exception):
    """The client closed its connection while its request waited for a worker."""


class Dispatcher:
    """The core with its driver. Raises :class:`ConfigError` for an unknown policy or an address that can't be bound."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self.config = config
        self._loop = asyncio.get_running_loop()
        self.turns = Turns()
        self.classes = Classes.declared(config.classes, config.ttft_objective_ms, config.tpot_objective_ms)
        self.tenants = NO_TENANTS
        self._is_closed = False
        self._is_performing = False
        self._later: list[Effect] = []  # effects of events that came while effects were performed
        self._num_questions = 0
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._inboxes: dict[str, tuple[Inbox, int]] = {}  # by id of a begun request: its inbox, and its index there
        self._answers: dict[str, asyncio.Future[Limits | Refuse | None]] = {}  # None: the request has begun
        self.fleet = Fleet(
            config,
            metrics,
            on_messages=self._on_messages,
            on_lost=self._on_worker_lost,
            on_ready=self._on_worker_ready,
        )
        self.core = RouterCore(config, self.fleet.membership, self.fleet.prefixes, random.Random())
        self.deadline_seconds = self.core.deadline_seconds
        self.profiles = Profiles(self.fleet)
        self.reports = RequestReports(self.core, metrics, tracing_of(config), writes_lines=config.request_log)
        self.overviews = Overviews(config, self.core, self.fleet.membership, self.reports)
        self.operations = Operations(self.core, self.fleet, self._handle)
        self.exchange = Exchange(config, self.fleet, self.core.peers, self._handle)
        self.exchange.answers = {
            "metrics": lambda _: metrics.render(with_workers=False),
            "rates": lambda _: msgspec.json.encode(self.reports.rates()),
            "traces": lambda id_begin: msgspec.json.encode(self.reports.traces(id_begin)),
        }
        self._performers: dict[type, Callable[[Any], None]] = {
            Send: self._send,
            TellRouters: self._tell_routers,
            Deliver: self._deliver,
            Begun: lambda effect: self._answer(effect.request_id, None),
            TellLimits: lambda effect: self._answer(effect.question_id, effect.limits),
            Refuse: lambda effect: self._answer(effect.request_id, effect),
            SetTimer: self._set_timer,
            CancelTimer: self._cancel_timer,
            Count: metrics.count,
            CountTokens: self.reports.count_tokens,
            Ended: self._on_ended,
            CachesAreReset: lambda _effect: self.operations.on_caches_reset(),
            PauseIsFollowed: lambda _effect: self.operations.on_pause_followed(),
            Observe: metrics.observe,
            Stale: lambda effect: self.fleet.drop_stale(effect.kind, effect.detail, effect.sender),
            Log: lambda effect: log.warning("%s", effect.text),
        }
        metrics.watch_workers(self.fleet.membership.records)
        metrics.watch_requests(
            lambda: self.core.admission.num_admitted,
            lambda: len(self.core.waiting_room),
            lambda: len(self.core.gate.queue),
        )
        metrics.watch_mode(lambda: self.core.placer.is_aggregated, lambda: self.core.placer.held)

    # ---- for the HTTP layer; times of arrival are the event loop's ----

    def admit(self, count: int, param: str | None = None, tenant: str = OWN) -> None:
        """Take ``count`` slots among the requests in flight, all and the tenant's. Raises :class:`ApiError` 429, or
        400 if it never fits."""
        self.core.admission.admit(count, param)
        try:
            self.core.usage.admit(self.tenants.named(tenant), count, time.monotonic(), param)
        except ApiError:
            self.core.admission.release(count)
            raise

    def release(self, count: int, tenant: str = OWN) -> None:
        """Release slots that ``admit`` took."""
        self.core.admission.release(count)
        self.core.usage.release(tenant, count)

    def load_tenants(self) -> None:
        """Read the file of tenants, if there is one. Raises :class:`ConfigError`; the tenants then stay as they are."""
        if self.config.tenants_file:
            own_keys = {"the API key": self.config.api_key, "the admin key": self.config.admin_key}
            self.tenants = read_tenants(Path(self.config.tenants_file), own_keys)
            self._handle(TenantsChanged(self.tenants))

    def readiness(self) -> Readiness:
        """Return whether a request could be served now."""
        return self.core.placer.readiness(time.monotonic())

    async def rates(self) -> RequestRates:
        """Return the rates of all routers on the port."""
        answers = await self.exchange.ask("rates")
        others = [msgspec.json.decode(answer, type=RequestRates) for answer in answers.values()]
        return summed_rates([self.reports.rates(), *others]) if others else self.reports.rates()

    async def traces(self, id_begin: str) -> RequestTraces:
        """Return the ended requests whose ids begin so, of all routers on the port."""
        answers = await self.exchange.ask("traces", id_begin[:MAX_QUESTION_CHARS])
        others = [msgspec.json.decode(answer, type=RequestTraces) for answer in answers.values()]
        return joined_traces([self.reports.traces(id_begin), *others])

    async def limits(self, arrived_at: float, num_bytes: int, watch_client: WatchClient) -> Limits:
        """Return the bounds of prompts, once a request could be placed. ``num_bytes``: size of the request's body.

        Raises :class:`ApiError` 503 if no worker comes in time, and :class:`ClientGoneError`.
        """
        found = self.core.placer.limits(time.monotonic())
        if isinstance(found, Limits):  # nearly always: there are workers
            return found
        self._num_questions += 1
        question_id = f"question-{self._num_questions}"
        limits = await self._ask(question_id, AskLimits(question_id, arrived_at, num_bytes), watch_client)
        assert isinstance(limits, Limits), "a question about limits is answered by limits"
        return limits

    async def submit_in_time(
        self,
        index: int,
        token_ids: TokenIds,
        sampling: SamplingParams,
        inbox: Inbox,
        arrived_at: float,
        *,
        watch_client: WatchClient,
        context: RequestContext = NO_CONTEXT,
        num_choices: int = 1,
    ) -> ActiveRequest:
        """Begin a request once a worker can take it; its updates come to ``inbox`` under ``index``, those of its
        siblings, the other choices, under the indices after that.

        Raises :class:`ApiError` 503 if no worker comes in time, and :class:`ClientGoneError`.
        """
        await self.turns.take(arrived_at)
        request_id = f"{context.client_id}-{secrets.token_hex(4)}" if context.client_id else secrets.token_hex(12)
        self._inboxes[request_id] = (inbox, index)
        request = ActiveRequest.new(request_id, token_ids, sampling, arrived_at, context, prepared_at=time.monotonic())
        for choice in range(1, num_choices):
            sibling = request.add_sibling(f"{request_id}-{choice}", choice)
            self._inboxes[sibling.request_id] = (inbox, index + choice)
        try:
            for _ in self.core.placer.hash_in_parts(request.hashes):
                await self.turns.take(arrived_at)
            await self._ask(request_id, Submit(request), watch_client)
        except BaseException:
            for each in (request, *request.siblings):
                self.cancel(each)  # it has begun if the client left in the same turn of the loop
                self._inboxes.pop(each.request_id, None)
            raise
        return request

    async def _ask(self, newcomer_id: str, event: AskLimits | Submit, watch_client: WatchClient) -> Limits | None:
        """Submit a newcomer to the core, and wait for its answer while the client is connected."""
        answer: asyncio.Future[Limits | Refuse | None] = self._loop.create_future()
        self._answers[newcomer_id] = answer
        try:
            self._handle(event)
            if not answer.done():
                gone = watch_client()
                await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise ClientGoneError
        except BaseException:
            self._handle(Cancel(newcomer_id))
            raise
        finally:
            del self._answers[newcomer_id]
        found = answer.result()
        if isinstance(found, Refuse):
            raise _refusal(found)
        return found

    def finish_at_stop_string(self, request: ActiveRequest) -> None:
        """End a request whose text has reached a stop string; harmless if the request has ended."""
        if not request.state.ended:
            self._handle(StopStringReached(request.request_id))

    def cancel(self, request: ActiveRequest) -> None:
        """Cancel a request whose client is gone or has its whole answer; harmless if the request has ended."""
        if not request.state.ended:
            self._handle(Cancel(request.request_id))

    def close(self) -> None:
        """Fail what is in flight and close all sockets. Closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self._handle(Close())
        self.profiles.close()
        self.operations.close()
        self.reports.close()
        self.overviews.close()
        self.exchange.close()
        self.fleet.close()

    # ---- events of the workers ----

    def _on_messages(self, sender: Party, bodies: list[Body]) -> None:
        """Handle a worker's messages that came together. An error in one doesn't keep the others from being handled."""
        for body in joined(bodies):
            try:
                self._on_message(sender, body)
            except Exception as error:
                what = f"{type(body).__name__} of worker {sender}"
                self._loop.call_exception_handler({"message": what, "exception": error})

    def _on_message(self, sender: Party, body: Body) -> None:
        if isinstance(body, ClockReading):
            self.core.clocks.note(sender, body.asked_at, body.at, time.monotonic())
        elif not isinstance(body, Profiled):
            self._handle(FromWorker(sender, body))
        elif not self.profiles.on_report(sender, body):
            self.fleet.drop_stale("profile", body.profile_id, sender)

    def _on_worker_lost(self, worker: Party, why: str) -> None:
        self._handle(WorkerLost(worker, why))

    def _on_worker_ready(self, worker: Party) -> None:
        self._handle(WorkerReady(worker))

    # ---- effects ----

    def _handle(self, event: Event) -> None:
        """Let the core handle an event and perform its effects, in order; those of a failed send come last.

        An error in one effect doesn't keep the others from being performed: for the core they are done.
        The time is read from CLOCK_MONOTONIC, as the event loop's is, but now: the loop's may be a millisecond late.
        """
        effects = self.core.handle(event, time.monotonic())
        if self._is_performing:
            self._later += effects
            return
        self._is_performing = True
        try:
            while effects:
                for effect in effects:
                    try:
                        self._performers[type(effect)](effect)
                    except Exception as error:
                        what = f"the effect {type(effect).__name__}"
                        self._loop.call_exception_handler({"message": what, "exception": error})
                effects, self._later = self._later, []
        finally:
            self._is_performing = False

    def _send(self, effect: Send) -> None:
        is_sent = False
        try:
            is_sent = self.fleet.send(effect.to, effect.body)
        finally:  # after an error, too
            if not is_sent:
                self._handle(NotSent(effect.to, effect.body))

    def _tell_routers(self, effect: TellRouters) -> None:
        self.exchange.tell(effect)

    def _deliver(self, effect: Deliver) -> None:
        found = self._inboxes.get(effect.request_id)
        if found is None:  # no client waits for it any more
            return
        if effect.update.ended:
            del self._inboxes[effect.request_id]
        inbox, index = found
        inbox.put(index, effect.update)

    def _on_ended(self, effect: Ended) -> None:
        request = effect.request
        num_tokens = request.timeline.num_tokens + (0 if request.sampling.choice else len(request.token_ids))
        self.core.usage.note_tokens(self.tenants.named(request.context.tenant), num_tokens, time.monotonic())
        self.reports.on_end(effect)

    def _answer(self, newcomer_id: str, answer: Limits | Refuse | None) -> None:
        future = self._answers.get(newcomer_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def _set_timer(self, effect: SetTimer) -> None:
        self._cancel_timer(CancelTimer(effect.timer))
        self._timers[effect.timer] = self._loop.call_at(effect.at, self._on_timer, effect.timer)

    def _cancel_timer(self, effect: CancelTimer) -> None:
        handle = self._timers.pop(effect.timer, None)
        if handle is not None:
            handle.cancel()

    def _on_timer(self, timer: Timer) -> None:
        del self._timers[timer]
        self._handle(TimerFired(timer))


def _refusal(refuse: Refuse) -> ApiError:
    if refuse.retry_after_seconds:
        return ApiError(
            429, f"{refuse.reason}: try again", code="overloaded", retry_after_seconds=refuse.retry_after_seconds
        )
    return no_worker(refuse.reason)
