"""Invariants of the router that show from outside: its messages, their recipients, its counts.

The core has invariants of its own, and so has each client (:mod:`splitserve.simulation.router.client`).
"""

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, TypeAlias

from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.requests import (
    Abort,
    DecodeRequest,
    LocalRequest,
    PrefillRequest,
    RequestFailed,
    TokenDelta,
)
from splitserve.protocol.request import Party, RequestKey, Role
from splitserve.router.links.worker_record import Charges
from splitserve.router.peers.peers import REPORT
from splitserve.router.placement.policies import Disaggregated, NoWorker, Placement
from splitserve.router.requests.core import Question
from splitserve.router.requests.effects import Count, Ended
from splitserve.router.requests.ladder import next_step
from splitserve.router.requests.state import RequestPhase, RequestState
from splitserve.router.requests.timeline.stages import handover_stages, ttft_stages

if TYPE_CHECKING:
    from splitserve.simulation.router.client import SimClient
    from splitserve.simulation.router.driver import SimRouter

MAX_ATTEMPTS_ALLOWED = 8
ROUNDING_SECONDS = 1e-9
ROLES = {DecodeRequest: {Role.DECODE}, PrefillRequest: {Role.PREFILL}, LocalRequest: {Role.DECODE, Role.MIXED}}
AnyRequest: TypeAlias = DecodeRequest | PrefillRequest | LocalRequest


class RouterChecks:
    """The observer of one router, whose driver reports each message and event to it."""

    def __init__(self, router: "SimRouter") -> None:
        self._router = router
        self.counted: Counter[str] = Counter()
        self._at_work: dict[RequestKey, set[Party]] = defaultdict(set)  # by attempt: workers that still compute it
        self._orphans: dict[Party, dict[RequestKey, float]] = defaultdict(dict)  # by lost worker and attempt: when
        self._heard: dict[tuple[RequestKey, int], int] = {}  # tokens, by attempt and position

    # ---- messages to workers ----

    def on_send(self, to: Party, body: Body) -> None:
        """Check a message to a worker."""
        if isinstance(body, Abort):
            self._check_abort(to, body.key)
        elif isinstance(body, AnyRequest):
            self._check_worker(to, body)
            self._check_request(to, body)
            if isinstance(body, PrefillRequest):
                self._check_turn(to, body)
            for key in (body.key, *body.siblings):
                self._at_work[key].add(to)

    def _check_abort(self, to: Party, key: RequestKey) -> None:
        state = self._state(key)
        is_running = not state.ended and state.placement is not None and state.key == key
        assert not is_running, f"{to} is told to abort {key}, which runs"
        self._at_work[key].discard(to)
        self._orphans[to].pop(key, None)

    def _check_worker(self, to: Party, body: AnyRequest) -> None:
        record = self._router.membership.get(to)
        state = "gone" if record is None else record.state
        assert record is not None and state is WorkerState.READY, f"{body.key} goes to {to}, which is {state}"
        role = record.info.role
        is_prompt_only = body.sampling.max_tokens == 1 and isinstance(body, LocalRequest)  # nothing to decode
        is_spare = isinstance(body, LocalRequest) and self._router.sim.shape.policy == "cost"  # a worker's spare time
        may_run = role in ROLES[type(body)] or is_prompt_only or is_spare
        assert may_run, f"{to} gets a {type(body).__name__}, but its role is {role}"
        needed, room = len(body.token_ids) + body.sampling.max_tokens, record.view(0.0).context_tokens_limit
        if isinstance(body, PrefillRequest):
            needed = min(needed, len(body.token_ids) + len(body.output_ids) + 1)
        assert needed <= room, f"{to} gets a sequence of {needed} tokens, but holds {room}"
        if not isinstance(body, DecodeRequest) and body.prefix is not None:
            self._check_source(to, body.prefix.party)

    def _check_source(self, to: Party, source: Party) -> None:
        assert source != to, f"{to} is to read a prefix from itself"
        record = self._router.membership.get(source)
        state = "gone" if record is None else record.state
        assert state is WorkerState.READY, f"{to} is to read a prefix from {source}, which is {state}"
        is_reset = source not in self._router.core.placer.unreset
        assert is_reset, f"{to} is to read a prefix from {source}, which may have content from before a reset"

    def _check_request(self, to: Party, body: AnyRequest) -> None:
        client, now = self._router.clients[body.key.request_id], self._router.sim.now
        assert client.request is not None, f"{body.key} goes to {to}, but was never submitted"
        left = client.request.arrived_at + self._router.core.deadline_seconds + client.request.held_seconds - now
        more = "gets more than what was left of its deadline"
        assert body.deadline_seconds <= max(left, 0.001) + ROUNDING_SECONDS, f"{body.key} {more}"
        after = f"goes on after {body.output_ids} instead of the delivered tokens {client.output}"
        assert list(body.output_ids) == client.output, f"{body.key} {after}"
        number = body.key.attempt + 1
        assert number <= MAX_ATTEMPTS_ALLOWED, f"{body.key.request_id} begins attempt {number}"

    def _check_turn(self, to: Party, body: PrefillRequest) -> None:
        """Check that room is reserved at once only for a prompt that is next, next but one, or in the next step."""
        record, own = self._router.membership.get(to), self._client(body.key).request
        assert record is not None and own is not None
        keys = record.prompts.keys()
        if own.state.key != body.key or id(own.charge) not in keys:  # the attempt is over already
            return
        charges = {id(request.charge): request.charge for request in self._router.core.requests if request.charge}
        before = itertools.takewhile(lambda key: key != id(own.charge), keys)
        ahead = [charges[key] for key in before if key in charges]
        num_tokens = sum(charge.num_prompt_tokens for charge in ahead)
        is_soon = len(ahead) <= 1 or num_tokens < record.info.max_num_batched_tokens
        assert is_soon or body.late_grant, f"{body.key} is to be granted at once, although {len(ahead)} come first"

    # ---- messages from workers ----

    def on_not_sent(self, to: Party, key: RequestKey) -> None:
        """Forget a request that the worker's link rejected."""
        self._at_work[key].discard(to)

    def on_taken_in(self, sender: Party, news: TokenDelta | RequestFailed, before: "Attempt") -> None:
        """Check a message that changed its request's state, which was as ``before``."""
        assert not before.had_ended, "a message after the end was taken in"
        is_current = news.key == before.key and sender in before.workers
        assert is_current, f"a message of {news.key} was taken in for {before.key}"
        if isinstance(news, RequestFailed):
            self._at_work[news.key].discard(sender)
            return
        if len(before.workers) == 2 and sender == before.workers[1]:
            self._at_work[news.key].discard(before.workers[0])  # prefill's part is over
        if news.finish_reason is not None:
            self._at_work[news.key].discard(sender)
        self._compare(news)

    def _compare(self, news: TokenDelta) -> None:
        """Check that a contradiction between workers ends the request: one of them computed something else."""
        for position, token in enumerate(news.token_ids, start=news.position):
            first = self._heard.setdefault((news.key, position), token)
            is_noticed = self._state(news.key).phase is RequestPhase.FAILED
            assert first == token or is_noticed, f"{news.key} goes on with tokens {first} and {token} at {position}"

    def on_lost(self, worker: Party) -> None:
        """Note the attempts that a lost worker may still compute."""
        for key, workers in self._at_work.items():
            if worker in workers:
                workers.discard(worker)
                self._orphans[worker][key] = self._router.sim.now

    def on_ready(self, worker: Party) -> None:
        """Check the core after a worker's link came up: orphans are aborted, and no request waits that could run."""
        remembered = self._router.sim.now - self._router.sim.protocol.tombstone_seconds
        left_over = [key for key, lost_at in self._orphans.pop(worker, {}).items() if lost_at > remembered]
        assert not left_over, f"{worker} is back, and wasn't told to abort {left_over}"
        core, now = self._router.core, self._router.sim.now
        if core.pause.is_on:
            return
        for request in core.requests:
            if request.is_stranded:
                snapshot = core.placer.snapshot(request.hashes, now)
                step = next_step(snapshot, request.shape, core.placer.policy, request.state.history)
                self._check_waits(request.request_id, step.placement)
        for newcomer_id, newcomer in core.waiting_room.in_line():
            if isinstance(newcomer, Question):
                limits = core.placer.limits(now)
                assert isinstance(limits, NoWorker), f"{newcomer_id} waits, although there are {limits}"
            else:
                self._check_waits(newcomer_id, core.placer.first(newcomer, now))

    @staticmethod
    def _check_waits(request_id: str, placement: Placement) -> None:
        assert isinstance(placement, NoWorker), f"{request_id} waits, although it could run on {placement}"

    # ---- after each event, and at the end ----

    def on_caches_reset(self) -> None:
        """Check that every linked worker has confirmed the reset."""
        peers = self._router.core.peers
        assert not self._router.core.resets.awaited, "a reset is over before all workers have confirmed it"
        late = [party for party, report in self._router.heard.items() if report.reset_done < peers.reset]
        assert not late, f"a reset is over before {late} have carried it out"

    def on_count(self, effect: Count) -> None:
        """Add to a metric."""
        self.counted[effect.metric] += effect.amount

    @staticmethod
    def on_ended(effect: Ended) -> None:
        """Check that the stages of a timeline are adjacent: none is negative, and they add up to the whole."""
        request = effect.request
        timeline, request_id = request.timeline, request.request_id
        stages = ttft_stages(timeline)
        total = timeline.ttft_seconds or 0.0
        assert abs(sum(stages.values()) - total) <= ROUNDING_SECONDS, f"{request_id}: {stages} aren't {total} s"
        others = [handover_stages(attempt) for attempt in timeline.attempts]
        for each in (stages, *others):
            assert all(seconds >= 0.0 for seconds in each.values()), f"{request_id}: a stage is negative: {each}"

    def after_event(self) -> None:
        """Check what must hold between any two events."""
        core = self._router.core
        core.check_invariants()
        self._check_sums()
        pending, due = self._router.pending_timers, core.timers()
        assert pending == due, f"timers are pending that should not be, or the reverse: {pending ^ due}"
        for key, workers in list(self._at_work.items()):
            state = self._state(key)
            if state.ended or state.placement is None or state.key != key:
                assert not workers, f"{workers} were not told to abort {key}"
                del self._at_work[key]

    def _check_sums(self) -> None:
        """Check that policies see what all routers have in flight at a worker, those that are lost left out."""
        if self._router.core.peers.is_alone:
            return
        elsewhere: Counter[Party] = Counter()
        for report in self._router.heard.values():
            for use in report.workers:
                elsewhere[use.worker] += use.num_requests
        for record in self._router.membership.records():
            if record.state is not WorkerState.READY:
                continue
            party, seen = record.info.party, record.view(self._router.sim.now).num_requests
            due = record.num_requests + elsewhere[party]
            assert seen == due, f"policies see {seen} requests at {party}, where all routers together have {due}"

    def at_end(self) -> None:
        """Check that nothing is left over and that each request was counted once."""
        router = self._router
        begun = sum(client.has_begun for client in router.clients.values())
        assert self.counted["requests_finished"] == begun, (
            f"{begun} requests began and ended, but {self.counted['requests_finished']} were counted"
        )
        for record in router.membership.records():
            assert record.charges == Charges(), f"{record.info.party} is still charged {record.charges}"
            assert record.elsewhere is None, f"{record.info.party} is still charged for other routers"
        pending = router.pending_timers - {REPORT}
        assert not pending, f"timers are still pending: {pending}"
        assert not router.core.pause.is_on, "the router is still paused"
        assert not len(router.core.requests), "requests are still active"
        num_admitted = router.core.admission.num_admitted
        assert num_admitted == 0, f"{num_admitted} requests are still admitted"

    def _state(self, key: RequestKey) -> RequestState:
        request = self._client(key).request
        assert request is not None, f"{key} was never submitted"
        return request.state

    def _client(self, key: RequestKey) -> "SimClient":
        return self._router.clients[key.request_id]


class Attempt:
    """The attempt of a request, as it was before a message."""

    def __init__(self, state: RequestState) -> None:
        placement = state.placement
        self.key = state.key
        self.had_ended = state.ended
        self.workers: tuple[Party, ...] = () if placement is None else placement.parties
        assert not isinstance(placement, Disaggregated) or self.workers == (placement.prefill, placement.decode)
