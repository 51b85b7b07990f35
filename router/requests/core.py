"""Decisions of the router about requests, pure: ``handle(event, now)`` returns the effects to perform.

    Submit -> admission's slots, placement -> Send to the workers, or a wait in the waiting room
    FromWorker, WorkerLost, NotSent, TimerFired -> RequestState -> Deliver, Send(Abort), the next attempt
    WorkerReady -> stranded requests continue, then those in the waiting room begin, in order of arrival

No sockets, event loop or clock: the asyncio shell (:mod:`splitserve.router.requests.dispatcher`) and the fault
simulator drive the same core. Membership and the prefix view are updated beside it, by the part that receives the
workers' messages.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.operators import PrefixCacheReset, ResetPrefixCache, SetFrozen
from splitserve.protocol.messages.requests import (
    Abort,
    FailureCode,
    PromptLogprobs,
    RequestFailed,
    StepTokens,
    TokenDelta,
)
from splitserve.protocol.request import Party
from splitserve.router.links.membership import Membership
from splitserve.router.peers.peers import REPORT, Peers
from splitserve.router.placement.next_turns import NextTurns
from splitserve.router.placement.placer import SHUTTING_DOWN, Placer
from splitserve.router.placement.policies import NoWorker, Placed, policy_by_name
from splitserve.router.placement.prefix_view import PrefixView
from splitserve.router.placement.seen_prefixes import SeenPrefixes
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.admission import Admission
from splitserve.router.requests.attempts import Attempts
from splitserve.router.requests.effects import Count, Effect, Outbox, Send, Stale, TellLimits
from splitserve.router.requests.events import (
    AskLimits,
    Cancel,
    Close,
    Event,
    FromRouter,
    FromWorker,
    MeetRouters,
    NotSent,
    PauseMode,
    PauseRequests,
    ResetCaches,
    ResumeRequests,
    RouterLost,
    StopStringReached,
    Submit,
    TenantsChanged,
    Timer,
    TimerFired,
    TimerKind,
    WorkerLost,
    WorkerReady,
)
from splitserve.router.requests.objectives import Objectives
from splitserve.router.requests.operations.agreement import Agreement
from splitserve.router.requests.operations.cache_reset import AGAIN
from splitserve.router.requests.operations.pause import ABORTED, PAUSED, TELL
from splitserve.router.requests.orphans import Orphans
from splitserve.router.requests.queue.gate import TRY_MORE, Gate
from splitserve.router.requests.queue.tenants import NO_TENANTS
from splitserve.router.requests.queue.usage import TenantUsage
from splitserve.router.requests.settlement import Settlement
from splitserve.router.requests.state import NOTHING, Failure, FailureReason
from splitserve.router.requests.table import RequestTable
from splitserve.router.requests.timeline.clocks import WorkerClocks
from splitserve.router.requests.waiting_room import WaitingRoom

MAX_SHARE_OF_DEADLINE_WAITED = 0.25


@dataclass(frozen=True, slots=True)
class Question:
    """An AskLimits without an answer so far."""


Newcomer: TypeAlias = ActiveRequest | Question


class RouterCore:
    """The core. ``chosen`` draws the jitter of waits. Raises :class:`ConfigError` for an unknown policy."""

    def __init__(
        self, config: RouterConfig, membership: Membership, prefixes: PrefixView, chosen: random.Random
    ) -> None:
        protocol = config.protocol
        self._membership = membership
        self.admission = Admission(config.max_requests_in_flight)
        self.deadline_seconds = protocol.request_deadline_seconds
        objectives = Objectives(config.ttft_objective_ms / 1e3, config.tpot_objective_ms / 1e3)
        self.placer = Placer(policy_by_name(config.policy), membership, prefixes, objectives)
        self._outbox = Outbox()
        # Wait of new requests; a request whose worker was lost waits until its deadline.
        wait_seconds = min(protocol.no_worker_wait_seconds, MAX_SHARE_OF_DEADLINE_WAITED * self.deadline_seconds)
        self.waiting_room: WaitingRoom[Newcomer] = WaitingRoom(
            protocol.max_requests_waiting, protocol.max_waiting_mib << 20, wait_seconds, self._outbox, self._serve
        )
        self.clocks = WorkerClocks()
        self.usage = TenantUsage()
        self.peers = Peers(
            config, membership, prefixes, admission=self.admission, usage=self.usage, outbox=self._outbox
        )
        self._agreement = Agreement(
            self.peers,
            membership,
            self.placer,
            self._outbox,
            on_pause=self._pause,
            on_resume=self._resume,
            on_room=self._on_room,
        )
        self.pause, self.resets = self._agreement.pause, self._agreement.resets
        self._seen_prefixes = SeenPrefixes()
        self.next_turns = NextTurns()
        self._orphans = Orphans(protocol.tombstone_seconds)
        attempts = Attempts(self.placer, membership, self._outbox, chosen, self.deadline_seconds)
        note_computed = self.placer.note_computed
        self._settlement = Settlement(membership, objectives, self._outbox, note_computed, self._note_output)
        self.requests = RequestTable(attempts, self._settlement, membership, self._outbox, self.deadline_seconds)
        self.gate = Gate(
            self.placer,
            membership,
            self._outbox,
            self._begin,
            self.requests.num_of_tenant,
            let_wait=self._let_wait,
            deadline_seconds=self.deadline_seconds,
            tenants=NO_TENANTS,
            is_open=not (config.classes or config.tenants_file or config.ttft_objective_ms),
        )
        self._handlers = self._make_handlers()

    def _make_handlers(self) -> dict[type, Callable[[Any, float], None]]:
        return {
            AskLimits: self._on_ask_limits,
            Submit: self._on_submit,
            Cancel: self._on_cancel,
            StopStringReached: self._on_stop_string,
            FromWorker: self._on_message,
            NotSent: self._on_not_sent,
            WorkerReady: self._on_worker_ready,
            WorkerLost: self._on_worker_lost,
            TimerFired: self._on_timer,
            TenantsChanged: self._on_tenants_changed,
            PauseRequests: self._agreement.on_pause,
            ResumeRequests: self._agreement.on_resume,
            ResetCaches: self._agreement.on_reset_caches,
            MeetRouters: self._agreement.on_meet_routers,
            FromRouter: self._agreement.on_from_router,
            RouterLost: self._agreement.on_router_lost,
            Close: self._on_close,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Return the effects of the event, for the driver to perform in order."""
        num_freed = self._settlement.num_freed
        self._handlers[type(event)](event, now)
        if self._settlement.num_freed != num_freed:
            self._on_room(now)
        if self.peers.is_urgent:
            num_waiting = len(self.waiting_room) + len(self.gate.queue)
            self.peers.report(len(self.requests), num_waiting, now)
        return self._outbox.take()

    def _on_room(self, now: float) -> None:
        """Begin queued requests: workers may have been relieved of others."""
        if len(self.gate.queue) and not self.pause.is_on:
            self.gate.pump(now)

    # ---- clients ----

    def _on_ask_limits(self, event: AskLimits, now: float) -> None:
        self.waiting_room.arrive(event.question_id, Question(), event.num_bytes, event.arrived_at, now)

    def _on_submit(self, event: Submit, now: float) -> None:
        request = event.request
        self.waiting_room.arrive(request.request_id, request, request.num_bytes, request.arrived_at, now)

    def _let_wait(self, request: ActiveRequest, lacking: NoWorker, now: float) -> None:
        """Let a request of the queue wait for another worker: the one that could take it is gone."""
        self.waiting_room.keep(request.request_id, request, request.num_bytes, lacking, since=now, now=now)

    def _serve(self, newcomer_id: str, newcomer: Newcomer, now: float) -> NoWorker | None:
        """Answer a question or begin a request, or return why no worker can."""
        if isinstance(newcomer, Question):
            limits = self.placer.limits(now)
            if isinstance(limits, NoWorker):
                return limits
            self._outbox.put(TellLimits(newcomer_id, limits))
            return None
        return NoWorker(PAUSED) if self.pause.is_on else self.gate.arrive(newcomer, now)

    def _begin(self, request: ActiveRequest, placement: Placed, now: float) -> None:
        for each in (request, *request.siblings):
            each.cache_epoch = self.placer.cache_epoch
        self.requests.begin(request, placement, now)
        self.peers.note_placed(len(request.token_ids), now)
        request.num_known_tokens = self._seen_prefixes.note(request.hashes)  # placement has hashed its blocks
        reason = self.next_turns.reason(
            request.hashes, request.token_ids, request.num_known_tokens, request.context.session
        )
        if reason is not None:
            self._outbox.put(Count("next_turns", (reason.value,)))

    def _note_output(self, request: ActiveRequest) -> None:
        """Take a finished output into account: for placement, and for the comparison with the next turn's prompt."""
        self.placer.note_output(request)
        output_ids = request.state.output.output_ids
        self.next_turns.remember(request.hashes, request.token_ids, output_ids, request.context.session)

    def _on_cancel(self, event: Cancel, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is None:
            if self.gate.leave(event.request_id):
                self._on_room(now)  # others may have waited for this one only
            else:
                self.waiting_room.leave(event.request_id)
        else:
            self.requests.apply(request, request.state.cancel(), now)

    def _on_stop_string(self, event: StopStringReached, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is not None:
            self.requests.apply(request, request.state.finish_at_stop_string(), now)

    # ---- workers ----

    def _on_message(self, event: FromWorker, now: float) -> None:
        sender, body = event.sender, event.body
        if isinstance(body, StepTokens):
            for delta in body.deltas:
                self._on_delta(sender, delta, now)
        elif isinstance(body, PromptLogprobs):
            self._on_prompt_logprobs(sender, body, now)
        elif isinstance(body, RequestFailed):
            self._on_request_failed(sender, body, now)
        elif isinstance(body, PrefixCacheReset):
            if not self.resets.on_confirmed(sender, body):
                self._outbox.put(Stale("confirmation", f"reset {body.reset_id}", sender))
        else:
            self._outbox.put(Stale(type(body).__name__, "which a router doesn't take", sender))

    def _on_delta(self, sender: Party, delta: TokenDelta, now: float) -> None:
        request = self.requests.get(delta.key.request_id)
        update = None if request is None else request.state.on_delta(sender, delta)
        if request is None or update is None:
            self._outbox.put(Stale("tokens", str(delta.key), sender))
            return
        if delta.marks:
            request.timeline.add_marks(sender, delta.marks, self.clocks, now)
        if delta.handover is not None and not request.sampling.choice:  # the other choices share the first one's
            self._settlement.on_handover(request, update, now)
        self.requests.apply(request, update, now)

    def _on_prompt_logprobs(self, sender: Party, message: PromptLogprobs, now: float) -> None:
        request = self.requests.get(message.key.request_id)
        updates = None if request is None else request.state.on_prompt_logprobs(sender, message)
        if request is None or updates is None:
            self._outbox.put(Stale("log-probabilities", str(message.key), sender))
            return
        for update in updates:
            self.requests.apply(request, update, now)

    def _on_request_failed(self, sender: Party, failed: RequestFailed, now: float) -> None:
        request = self.requests.get(failed.key.request_id)
        update = None if request is None else request.state.on_request_failed(sender, failed)
        if request is None or update is None:
            self._outbox.put(Stale("failure", str(failed.key), sender))
        else:
            self.requests.apply(request, update, now)

    def _on_not_sent(self, event: NotSent, now: float) -> None:
        """Fail the attempts that weren't sent. A lost Abort is harmless: the worker ends by itself."""
        if isinstance(event.body, SetFrozen):
            self.pause.on_not_sent(event.to, now)
        elif isinstance(event.body, ResetPrefixCache):
            self.resets.on_not_sent(now)
        for key in event.attempts:
            request = self.requests.get(key.request_id)
            if request is not None:
                refused = RequestFailed(key, FailureCode.OVERLOADED, "it takes no more messages")
                self.requests.apply(request, request.state.on_request_failed(event.to, refused) or NOTHING, now)

    def _on_worker_lost(self, event: WorkerLost, now: float) -> None:
        for request in self.requests:
            key = request.state.key
            update = request.state.on_worker_lost(event.worker, event.why)
            if update is not None:
                self._orphans.add(event.worker, key, now)
                self.requests.apply(request, update, now)
        self.resets.on_lost()

    def _on_worker_ready(self, event: WorkerReady, now: float) -> None:
        """Serve requests that wait for a worker. Abort the worker's own from before its loss: others continue them."""
        self.peers.on_worker_ready(event.worker)
        self.pause.on_ready(event.worker)
        self.resets.on_ready(event.worker)
        for key in self._orphans.take(event.worker, now):
            self._outbox.put(Send(event.worker, Abort(key)))
        for request in self.requests:
            if request.is_stranded:
                self.requests.go_on(request, now)
        self._serve_waiting(now)

    def _serve_waiting(self, now: float) -> None:
        self.waiting_room.serve_all(now)
        if not self.pause.is_on:
            self.gate.pump(now)

    # ---- time ----

    def _on_timer(self, event: TimerFired, now: float) -> None:
        kind, request_id = event.timer.kind, event.timer.request_id
        if kind is TimerKind.WAIT:
            self.waiting_room.on_timer(request_id, now)
            return
        if kind is TimerKind.QUEUE:
            self.gate.on_timer(request_id)
            self._on_room(now)
            return
        if event.timer == TELL:
            self.pause.on_timer()
        elif event.timer == AGAIN:
            self.resets.on_timer()
        elif event.timer == REPORT:
            self._agreement.on_report_due(now)
        elif event.timer == TRY_MORE:
            self.gate.on_try_more(now, is_paused=self.pause.is_on)
        request = self.requests.get(request_id)
        if request is not None and kind is TimerKind.DEADLINE:
            self.requests.expire(request, now)
        elif request is not None and request.is_stranded:
            self.requests.go_on(request, now)

    def _on_tenants_changed(self, event: TenantsChanged, _now: float) -> None:
        self.gate.queue.tenants = self.peers.tenants = event.tenants

    # ---- operators ----

    def _pause(self, mode: PauseMode, now: float) -> None:
        """Pause, or change the mode of the pause: requests that were frozen go on, or end."""
        if mode is self.pause.mode:
            return
        self.pause.begin(mode, now, self.peers.pause.number)
        self.waiting_room.wait_for(self.deadline_seconds, now)
        if mode is PauseMode.KEEP:
            self.requests.freeze(now)
            return
        self.requests.thaw(now)
        if mode is PauseMode.ABORT:
            for request in self.requests:
                self.requests.apply(request, request.state.fail(Failure(FailureReason.PAUSED, ABORTED)), now)

    def _resume(self, now: float) -> None:
        if not self.pause.is_on:
            return
        self.pause.end(self.peers.pause.number)
        self.requests.thaw(now)
        self.waiting_room.wait_for(None, now)
        self._serve_waiting(now)

    def _on_close(self, _event: Close, now: float) -> None:
        self.placer.is_closing = True
        self.waiting_room.close(SHUTTING_DOWN)
        self.gate.close(SHUTTING_DOWN)
        for request in self.requests:
            self.requests.apply(request, request.state.fail(Failure(FailureReason.SHUTDOWN, SHUTTING_DOWN)), now)

    # ---- invariants ----

    def check_invariants(self) -> None:
        """Raise AssertionError if counts, timers and attempts contradict each other."""
        self.requests.check_invariants()
        self.waiting_room.check_invariants()
        self.gate.queue.check_invariants()
        self._membership.check_invariants()
        self.peers.check_invariants()

    def timers(self) -> set[Timer]:
        """Return the timers that must be pending."""
        found = {Timer(TimerKind.WAIT, newcomer_id) for newcomer_id, _ in self.waiting_room.in_line()}
        of_operators = ((TELL, self.pause.repeats), (AGAIN, self.resets.repeats))
        of_all = (*of_operators, (REPORT, self.peers.is_reporting), (TRY_MORE, self.gate.is_trying))
        found |= {timer for timer, is_set in of_all if is_set}
        found |= {Timer(TimerKind.QUEUE, request.request_id) for request in self.gate.queue.requests()}
        for request in self.requests:
            if self.requests.frozen_since is None:
                found.add(Timer(TimerKind.DEADLINE, request.request_id))
            if request.is_stranded:
                found.add(Timer(TimerKind.RETRY, request.request_id))
        return found
