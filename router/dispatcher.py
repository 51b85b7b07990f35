"""Requests to workers and back: admission, placement, fan-out of tokens, aborts, deadlines.

    submit -> place -> DecodeRequest + PrefillRequest, or LocalRequest -> the workers' links
    StepTokens, RequestFailed, a lost worker, the deadline -> RequestState -> Inbox of the HTTP request

Everything runs on one event loop and nothing here blocks. The decisions are made by the pure modules (placement,
membership, request_state); this one carries them out.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from splitserve.bounded import ExpiringMap
from splitserve.config import RouterConfig
from splitserve.messages import (
    Abort,
    Body,
    DecodeRequest,
    FailureCode,
    LocalRequest,
    PeerRef,
    PrefillRequest,
    Profiled,
    RequestFailed,
    StepTokens,
)
from splitserve.request import Party, RequestKey, SamplingParams
from splitserve.router.api_error import ApiError
from splitserve.router.fleet import Fleet
from splitserve.router.inbox import Inbox
from splitserve.router.ladder import backoff_seconds, local_placement, may_wait, next_step
from splitserve.router.membership import MAX_WORKERS, Charge
from splitserve.router.metrics import RouterMetrics
from splitserve.router.objectives import Objectives
from splitserve.router.outcome import outcome
from splitserve.router.placement import (
    Disaggregated,
    Local,
    NoWorker,
    Placed,
    Placement,
    RequestShape,
    Snapshot,
    context_limits,
    policy_by_name,
)
from splitserve.router.prefix_view import MIN_GAIN_BLOCKS, PrefixMatch, PromptHashes, helper_of
from splitserve.router.profiles import Profiles
from splitserve.router.request_state import NOTHING, Failure, FailureReason, Phase, RequestState, Update
from splitserve.router.waiting_room import WaitingRoom, no_worker
from splitserve.token_ids import TokenIds

log = logging.getLogger(__name__)

MAX_SHARE_OF_DEADLINE_WAITED = 0.25
WatchClient: TypeAlias = Callable[[], asyncio.Future[None]]
"""Starts looking whether a client has gone; the future is done when it has."""


@dataclass(slots=True, eq=False)
class Generation:
    """One prompt under way. ``index`` tells it apart in the inbox that it shares with its HTTP request's others."""

    index: int
    token_ids: TokenIds
    sampling: SamplingParams
    inbox: Inbox
    arrived_at: float
    state: RequestState
    hashes: PromptHashes
    charge: Charge | None = None
    deadline: asyncio.TimerHandle | None = None
    attempt_began_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    last_token_clock: float = 0.0  # perf_counter: the event loop may count in milliseconds
    retry: asyncio.TimerHandle | None = None
    num_waits: int = 0
    stranded_at: float = 0.0
    is_fallback: bool = False  # the first attempt is local only because there was no pair

    @property
    def shape(self) -> RequestShape:
        return RequestShape(
            num_prompt_tokens=len(self.token_ids),
            max_tokens=self.sampling.max_tokens,
            num_output_tokens=len(self.state.delivered_ids),
        )

    @property
    def is_stranded(self) -> bool:
        """Whether its worker was lost, and no other one can go on."""
        return bool(self.stranded_at) and not self.state.ended


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_model_len`` bounds a sequence on the largest workers, ``common_model_len`` on every one of them."""

    max_model_len: int
    common_model_len: int
    vocab_size: int


class Dispatcher:
    """Raises :class:`ConfigError` for an unknown policy or a membership address that can't be bound."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self.config = config
        self._policy = policy_by_name(config.policy)
        self.deadline_seconds = config.protocol.request_deadline_seconds
        self._max_in_flight = config.max_requests_in_flight
        self._num_admitted = 0
        self._active: dict[str, Generation] = {}
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._objectives = Objectives(config.ttft_objective_seconds, config.tpot_objective_seconds)
        # of new requests; those whose worker was lost wait until their deadline
        self._wait_seconds = min(
            config.protocol.no_worker_wait_seconds, MAX_SHARE_OF_DEADLINE_WAITED * self.deadline_seconds
        )
        self._waiting_room = WaitingRoom(config.protocol.max_requests_waiting, metrics)
        self._jitter = random.Random()
        # attempts that a lost worker may still be at work on, should it be heard again
        self._orphans: ExpiringMap[Party, list[RequestKey]] = ExpiringMap(
            max_size=MAX_WORKERS, ttl_seconds=config.protocol.tombstone_seconds
        )
        self.fleet = Fleet(
            config, metrics, on_message=self._on_message, on_lost=self._on_worker_lost, on_ready=self._on_worker_ready
        )
        self.profiles = Profiles(self.fleet)
        metrics.watch_workers(self.fleet.membership.records)

    # ---- for the HTTP layer ----

    def admit(self, count: int, param: str | None = None) -> None:
        """Take ``count`` places among the requests in flight, or raise :class:`ApiError` 429 (400 if it never fits)."""
        if count > self._max_in_flight:
            raise ApiError(400, f"{count} prompts in one request; at most {self._max_in_flight} fit", param=param)
        if self._num_admitted + count > self._max_in_flight:
            message = f"{self._num_admitted} requests are in flight and {self._max_in_flight} are allowed: try again"
            raise ApiError(429, message, code="too_many_requests")
        self._num_admitted += count
        self._metrics.requests_in_flight.set(self._num_admitted)

    def release(self, count: int) -> None:
        """Give places back that ``admit`` took."""
        self._num_admitted -= count
        self._metrics.requests_in_flight.set(self._num_admitted)

    def place(self, shape: RequestShape, prompt: PromptHashes | None = None) -> Placement:
        """Where a request of this shape, with this prompt, would run now."""
        if self._closing:
            return NoWorker("the router is shutting down")
        return self._policy(self._snapshot(prompt or PromptHashes(())), shape)

    def _snapshot(self, prompt: PromptHashes) -> Snapshot:
        """The workers, with what each has of the prompt."""
        worth = {party: match.worth_tokens for party, match in self._matches(prompt).items()}
        return self.fleet.membership.snapshot(self._loop.time(), worth)

    def _matches(self, prompt: PromptHashes) -> Mapping[Party, PrefixMatch]:
        """What each worker has of the prompt. Nobody needs to know it of the only one, and hashing takes a while."""
        return self.fleet.prefixes.matches(prompt) if len(self.fleet.membership.records()) > 1 else {}

    async def limits(self, arrived_at: float, watch_client: WatchClient) -> Limits:
        """What prompts must keep, once a request could be placed. Raises as :meth:`WaitingRoom.until` does."""
        return await self._waiting_room.until(self._limits, arrived_at + self._wait_seconds, watch_client)

    def _limits(self) -> Limits | NoWorker:
        lengths = context_limits(self.fleet.membership.snapshot(self._loop.time()))
        vocab_size = self.fleet.membership.vocab_size()
        if self._closing or lengths is None or vocab_size is None:
            placement = self.place(RequestShape(num_prompt_tokens=1, max_tokens=1))
            return placement if isinstance(placement, NoWorker) else NoWorker("no worker is ready")
        return Limits(*lengths, vocab_size)

    def submit(
        self, index: int, token_ids: TokenIds, sampling: SamplingParams, inbox: Inbox, arrived_at: float
    ) -> Generation:
        """Place a prompt and send it off; updates come to ``inbox``. Raises :class:`ApiError` 503 without a worker."""
        generation = self._generation(index, token_ids, sampling, inbox, arrived_at)
        placement = self._first_placement(generation)
        if isinstance(placement, NoWorker):
            raise no_worker(placement.reason)
        return self._begin(generation, placement)

    async def submit_in_time(
        self,
        index: int,
        token_ids: TokenIds,
        sampling: SamplingParams,
        inbox: Inbox,
        arrived_at: float,
        *,
        watch_client: WatchClient,
    ) -> Generation:
        """:meth:`submit`, once there is a worker. Raises as :meth:`WaitingRoom.until` does."""
        generation = self._generation(index, token_ids, sampling, inbox, arrived_at)
        placement: Placed = await self._waiting_room.until(
            lambda: self._first_placement(generation), arrived_at + self._wait_seconds, watch_client
        )
        return self._begin(generation, placement)

    @staticmethod
    def _generation(
        index: int, token_ids: TokenIds, sampling: SamplingParams, inbox: Inbox, arrived_at: float
    ) -> Generation:
        state = RequestState(secrets.token_hex(12), sampling.max_tokens)
        return Generation(index, token_ids, sampling, inbox, arrived_at, state, PromptHashes(token_ids))

    def _first_placement(self, generation: Generation) -> Placement:
        """Where the policy wants it; without a pair, decode alone can help, though nobody planned it so."""
        placement = self.place(generation.shape, generation.hashes)
        if not isinstance(placement, NoWorker) or self._closing:
            return placement
        fallback = self._local_placement(generation)
        generation.is_fallback = fallback is not None
        return placement if fallback is None else fallback

    def _begin(self, generation: Generation, placement: Placed) -> Generation:
        state = generation.state
        self._active[state.request_id] = generation
        self._metrics.prompt_tokens.inc(len(generation.token_ids))
        generation.deadline = self._loop.call_at(
            generation.arrived_at + self.deadline_seconds, self._on_deadline, state.request_id
        )
        self._start_attempt(generation, placement)
        state.was_disaggregated |= generation.is_fallback
        return generation

    def _local_placement(self, generation: Generation) -> Local | None:
        return local_placement(self._snapshot(generation.hashes).workers, generation.shape)

    def finish_at_stop_string(self, generation: Generation) -> None:
        self._apply(generation, generation.state.finish_at_stop_string())

    def cancel(self, generation: Generation) -> None:
        """The client is gone, or has what it wants; harmless when the request has ended."""
        self._apply(generation, generation.state.cancel())

    def close(self) -> None:
        """Fail what is under way and close all sockets. Closing twice is harmless."""
        if self._closing:
            return
        self._closing = True
        self._waiting_room.close()
        failure = Failure(FailureReason.SHUTDOWN, "the router is shutting down")
        for generation in list(self._active.values()):
            self._apply(generation, generation.state.fail(failure))
        self.profiles.close()
        self.fleet.close()

    # ---- to the workers ----

    def _start_attempt(self, generation: Generation, placement: Placed) -> None:
        state = generation.state
        state.begin(placement)
        generation.attempt_began_at = self._loop.time()
        generation.stranded_at, generation.num_waits = 0.0, 0
        generation.charge = self.fleet.membership.charge(placement, generation.shape)
        for party, body in self._messages(generation, placement):
            if not self.fleet.send(party, body):
                refused = RequestFailed(state.key, FailureCode.OVERLOADED, "it takes no more messages")
                self._apply(generation, state.on_request_failed(party, refused) or NOTHING)
                return

    def _step_down(self, generation: Generation) -> None:
        """An attempt has failed: begin the next one where the ladder says, wait for workers, or fail the request."""
        state, now = generation.state, self._loop.time()
        last = state.history[-1]
        snapshot = self._snapshot(generation.hashes)
        step = next_step(snapshot, generation.shape, self._policy, state.history)
        if not isinstance(step.placement, NoWorker):
            self._metrics.ladder_steps.labels(step.rung, last.failure.reason).inc()
            log.info("request %s goes on (%s): %s", state.key, step.rung, last.failure.message)
            self._start_attempt(generation, step.placement)
            return
        if may_wait(snapshot, state.history):  # until the deadline
            generation.stranded_at = generation.stranded_at or now
            delay = backoff_seconds(generation.num_waits, self._jitter)
            generation.num_waits += 1
            generation.retry = self._loop.call_later(delay, self._retry, state.request_id)
            return
        self._metrics.ladder_steps.labels(step.rung, last.failure.reason).inc()
        self._apply(generation, state.fail(Failure(last.failure.reason, step.placement.reason)))

    def _retry(self, request_id: str) -> None:
        generation = self._active.get(request_id)
        if generation is not None:
            self._step_down(generation)

    def _messages(self, generation: Generation, placement: Placed) -> list[tuple[Party, Body]]:
        """What to send for an attempt. Decode comes first: it reserves room while prefill's message travels."""
        key, prompt, sampling = generation.state.key, generation.token_ids, generation.sampling
        delivered = generation.state.delivered_ids
        left_seconds = max(0.001, self.deadline_seconds - (self._loop.time() - generation.arrived_at))
        if not isinstance(placement, Disaggregated):
            prefix = self._prefix_helper(generation.hashes, placement.worker)
            return [(placement.worker, LocalRequest(key, prompt, sampling, left_seconds, delivered, prefix))]
        prefill, decode = self._peer(placement.prefill), self._peer(placement.decode)
        return [
            (placement.decode, DecodeRequest(key, prompt, sampling, prefill, left_seconds, delivered)),
            (placement.prefill, PrefillRequest(key, prompt, sampling, decode, left_seconds, delivered)),
        ]

    def _prefix_helper(self, prompt: PromptHashes, worker: Party) -> PeerRef | None:
        """Whose device or host tier has so much more of the prompt that ``worker`` had best read it from there."""
        matches = self._matches(prompt)
        if not matches:
            return None
        ready = {view.party for view in self.fleet.membership.snapshot(self._loop.time()).workers}
        record = self.fleet.membership.get(worker)
        min_gain = MIN_GAIN_BLOCKS * record.info.layout.block_size if record is not None else 0
        helper = helper_of(worker, {p: match for p, match in matches.items() if p in ready or p == worker}, min_gain)
        return None if helper is None else self._peer(helper)

    def _peer(self, party: Party) -> PeerRef:
        record = self.fleet.membership.get(party)
        assert record is not None, f"{party} was placed but isn't known"
        return PeerRef(party, record.info.endpoint)

    # ---- from the workers ----

    def _on_message(self, sender: Party, body: Body) -> None:
        if isinstance(body, StepTokens):
            for delta in body.deltas:
                generation = self._active.get(delta.key.request_id)
                update = None if generation is None else generation.state.on_delta(sender, delta)
                if generation is None or update is None:
                    self.fleet.drop_stale("tokens", delta.key, sender)
                else:
                    if delta.handover is not None:
                        self._note_handover(generation, update)
                    self._apply(generation, update)
        elif isinstance(body, RequestFailed):
            generation = self._active.get(body.key.request_id)
            update = None if generation is None else generation.state.on_request_failed(sender, body)
            if generation is None or update is None:
                self.fleet.drop_stale("failure", body.key, sender)
            else:
                self._apply(generation, update)
        elif isinstance(body, Profiled):
            if not self.profiles.on_report(sender, body):
                self.fleet.drop_stale("profile", body.profile_id, sender)
        else:
            self.fleet.drop_stale(type(body).__name__, "which a router doesn't take", sender)

    def _on_worker_lost(self, worker: Party, why: str) -> None:
        now = self._loop.time()
        for generation in list(self._active.values()):
            key = generation.state.key
            update = generation.state.on_worker_lost(worker, why)
            if update is not None:
                self._orphans.put(worker, [*(self._orphans.get(worker, now) or ()), key], now)
                self._apply(generation, update)

    def _on_worker_ready(self, worker: Party) -> None:
        """Requests that wait for a worker needn't wait longer. What it did before it was lost, others have done."""
        for key in self._orphans.pop(worker, self._loop.time()) or ():
            self.fleet.send(worker, Abort(key))
        self._waiting_room.call()
        for generation in list(self._active.values()):
            if generation.state.placement is None and generation.retry is not None:
                generation.retry.cancel()
                self._step_down(generation)

    def _on_deadline(self, request_id: str) -> None:
        generation = self._active.get(request_id)
        if generation is not None:
            message = f"the request took longer than {self.deadline_seconds:g} s"
            if generation.is_stranded:
                message += f": no worker came that could go on; {generation.state.history[-1].failure.message}"
            self._apply(generation, generation.state.fail(Failure(FailureReason.DEADLINE, message)))

    def _apply(self, generation: Generation, update: Update) -> None:
        """Carry out what a transition asks for."""
        if update is NOTHING:
            return
        if update.token_ids:
            self._note_tokens(generation, len(update.token_ids))
        for worker in update.aborts:
            self.fleet.send(worker, Abort(generation.state.key))
        if update.retry:
            self._end_attempt(generation)
            self._step_down(generation)
            return
        if update.ended:
            self._retire(generation)
        generation.inbox.put(generation.index, update)

    def _end_attempt(self, generation: Generation) -> None:
        """Take the failed attempt off its workers' counts, and hold it against the one to blame."""
        if generation.charge is not None:
            generation.charge.release()
            generation.charge = None
        attempt = generation.state.history[-1]
        record = self.fleet.membership.get(attempt.culprit)
        if record is not None and attempt.failure.reason is not FailureReason.OVERLOADED:
            record.breaker.on_failure(self._loop.time(), generation.attempt_began_at)

    def _note_tokens(self, generation: Generation, count: int) -> None:
        now = self._loop.time()
        self._metrics.output_tokens.inc(count)
        if generation.charge is not None:
            generation.charge.first_token_out()  # of each attempt: a retry computes the prompt again
        if generation.last_token_at:
            self._metrics.itl_seconds.observe(now - generation.last_token_at)
        else:
            generation.first_token_at = now
            self._metrics.ttft_seconds.observe(now - generation.arrived_at)
        generation.last_token_at, generation.last_token_clock = now, time.perf_counter()

    def _note_handover(self, generation: Generation, update: Update) -> None:
        """Decode is ready. Its report repeats the first token; if that is news, decode was faster than prefill's."""
        seconds = 0.0 if update.token_ids else time.perf_counter() - generation.last_token_clock
        generation.state.handover_seconds = seconds
        self._metrics.handover_seconds.observe(seconds)

    def _retire(self, generation: Generation) -> None:
        del self._active[generation.state.request_id]
        for timer in (generation.deadline, generation.retry):
            if timer is not None:
                timer.cancel()
        if generation.charge is not None:
            generation.charge.release()
        if generation.state.phase is Phase.FINISHED and generation.state.placement is not None:
            for party in generation.state.placement.parties:
                record = self.fleet.membership.get(party)
                if record is not None:
                    record.breaker.on_success()
        self._metrics.e2e_seconds.observe(self._loop.time() - generation.arrived_at)
        self._metrics.requests_finished.labels(*outcome(generation.state)).inc()
        self._judge(generation)

    def _judge(self, generation: Generation) -> None:
        """Count what the request means for the objectives; nothing, if its end was the client's doing."""
        state = generation.state
        if state.phase is Phase.FINISHED:
            times = (generation.arrived_at, generation.first_token_at, generation.last_token_at)
            verdicts = self._objectives.judge(*times, len(state.delivered_ids))
        elif state.failure is not None and state.failure.reason is not FailureReason.INVALID:
            verdicts = self._objectives.missed()
        else:
            return
        for name, met in verdicts:
            self._metrics.objectives.labels(name, str(met).lower()).inc()
