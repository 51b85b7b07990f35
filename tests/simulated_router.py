"""The router's side of the simulator: its production state machines; the simulator plays the event loop's part.

Membership, placement, the failure ladder and the state of each request are the router's own; what is here does what
:mod:`splitserve.router.dispatcher` and :mod:`splitserve.router.fleet` do with sockets and timers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulated_model import ROUTER, expected_output
from splitserve.cluster_report import WorkerState
from splitserve.messages import (
    Abort,
    Body,
    DecodeRequest,
    LocalRequest,
    PeerRef,
    PrefillRequest,
    RequestFailed,
    StepTokens,
    TokenDelta,
    WorkerInfo,
)
from splitserve.request import Party, RequestKey, Role, SamplingParams
from splitserve.router.ladder import backoff_seconds, may_wait, next_step
from splitserve.router.membership import Charge, Membership
from splitserve.router.placement import Disaggregated, NoWorker, Placed, RequestShape, least_loaded
from splitserve.router.request_state import Failure, FailureReason, Phase, RequestState, Update

if TYPE_CHECKING:
    from simulated_worker import SimWorker
    from simulator import Simulator

TICK_SECONDS = 0.25
MAX_ATTEMPTS_ALLOWED = 8
LINK_SECONDS = 0.2  # the longest time that a link takes to come up


@dataclass
class SimRequest:
    prompt: list[int]
    sampling: SamplingParams
    state: RequestState
    deadline: float
    charge: Charge | None = None
    output: list[int] = field(default_factory=list)
    stranded_at: float | None = None
    num_waits: int = 0
    retry: object = None  # the timer that is pending
    attempt_began_at: float = 0.0
    was_helpless: bool = False
    heard: dict[tuple[RequestKey, int], int] = field(default_factory=dict)  # tokens, by attempt and position

    @property
    def shape(self) -> RequestShape:
        return RequestShape(len(self.prompt), self.sampling.max_tokens, len(self.state.delivered_ids))


class SimRouter:
    def __init__(self, sim: "Simulator") -> None:
        self.sim = sim
        self.requests: dict[str, SimRequest] = {}
        self.membership = Membership(sim.protocol.dead_after_seconds, sim.protocol.tombstone_seconds)
        self.orphans: dict[Party, list[RequestKey]] = {}
        self._able_at: list[tuple[float, bool]] = []
        sim.after(TICK_SECONDS, self.tick)

    # ---- membership ----

    def on_started(self, worker: "SimWorker") -> None:
        info = WorkerInfo(
            party=worker.party,
            role=worker.role,
            endpoint="",
            pid=0,
            layout=worker.core.state.layout,
            num_blocks=worker.num_blocks,
            max_num_seqs=4,
            max_model_len=worker.core.state.max_model_len,
            vocab_size=worker.core.state.vocab_size,
        )
        registration = self.membership.register(worker.party, info, self.sim.now)
        assert registration.refusal is None, registration.refusal
        if registration.replaced is not None:
            self.on_lost(registration.replaced)
        self.dial(worker)
        self.heartbeat(worker)

    def dial(self, worker: "SimWorker") -> None:
        self.sim.after(self.sim.random.uniform(0.001, LINK_SECONDS), lambda: self.on_link_up(worker))

    def on_link_up(self, worker: "SimWorker") -> None:
        if worker.alive:
            self.membership.link_up(worker.party)
            for key in self.orphans.pop(worker.party, []):
                self.sim.send(ROUTER, worker.party, Abort(key))
            for request in self.requests.values():
                if request.stranded_at is not None:
                    self.step_down(request)

    def heartbeat(self, worker: "SimWorker") -> None:
        if not worker.can_run(lambda: self.heartbeat(worker)):
            return
        worker.settle()  # the loop wakes up for its heartbeat
        if self.membership.heartbeat(worker.party, worker.core.load(), self.sim.now) is WorkerState.LOST:
            self.dial(worker)
        if worker.drain_clock.has_begun:
            self.membership.drain(worker.party)
        self.sim.after(self.sim.protocol.heartbeat_seconds, lambda: self.heartbeat(worker))

    def tick(self) -> None:
        for party in self.membership.expire(self.sim.now):
            self.on_lost(party)
        self.membership.check_invariants()
        able = any(view.role is not Role.PREFILL for view in self.membership.snapshot(self.sim.now).workers)
        self._able_at.append((self.sim.now, able))
        self.sim.after(TICK_SECONDS, self.tick)

    def on_draining(self, party: Party) -> None:
        self.membership.drain(party)

    def on_leave(self, party: Party) -> None:
        if self.membership.leave(party):
            self.on_lost(party)

    def on_connection_closed(self, party: Party) -> None:
        if self.membership.lose(party):
            self.on_lost(party)

    def on_lost(self, party: Party) -> None:
        for request in list(self.requests.values()):
            key = request.state.key
            update = request.state.on_worker_lost(party, "is lost")
            if update is not None:
                self.orphans.setdefault(party, []).append(key)
                self.apply(request, update)

    # ---- requests ----

    def submit(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, seed=self.sim.random.getrandbits(32))
        deadline = self.sim.now + self.sim.protocol.request_deadline_seconds
        request = SimRequest(prompt, sampling, RequestState(request_id, max_tokens), deadline)
        placement = least_loaded(self.membership.snapshot(self.sim.now), request.shape)
        if isinstance(placement, NoWorker):  # a client would get 503 and try again
            self.sim.after(0.5, lambda: self.submit(request_id, prompt, max_tokens))
            return
        self.requests[request_id] = request
        self.sim.at(deadline, lambda: self.on_deadline(request))
        self.start_attempt(request, placement)
        if self.sim.random.random() < self.sim.faults.abort:
            self.sim.after(self.sim.random.uniform(0.0, 0.3), lambda: self.apply(request, request.state.cancel()))

    def on_deadline(self, request: SimRequest) -> None:
        since = request.stranded_at
        request.was_helpless = since is not None and not any(able for time, able in self._able_at if time >= since)
        self.apply(request, request.state.fail(Failure(FailureReason.DEADLINE, "the request took too long")))

    def start_attempt(self, request: SimRequest, placement: Placed) -> None:
        request.state.begin(placement)
        num_attempts = request.state.num_attempts
        assert num_attempts <= MAX_ATTEMPTS_ALLOWED, f"{request.state.request_id} begins attempt {num_attempts}"
        request.attempt_began_at = self.sim.now
        request.stranded_at, request.num_waits, request.retry = None, 0, None
        request.charge = self.membership.charge(placement, request.shape)
        for party, body in self.messages(request, placement):
            self.sim.send(ROUTER, party, body)

    def messages(self, request: SimRequest, placement: Placed) -> Iterable[tuple[Party, Body]]:
        key, prompt, sampling = request.state.key, request.prompt, request.sampling
        delivered, left = request.state.delivered_ids, request.deadline - self.sim.now
        if isinstance(placement, Disaggregated):
            prefill, decode = PeerRef(placement.prefill, ""), PeerRef(placement.decode, "")
            yield placement.decode, DecodeRequest(key, prompt, sampling, prefill, left, delivered)
            yield placement.prefill, PrefillRequest(key, prompt, sampling, decode, left, delivered)
        else:
            prefix = self.other_worker(placement.worker)
            yield placement.worker, LocalRequest(key, prompt, sampling, left, delivered, prefix)

    def other_worker(self, worker: Party) -> PeerRef | None:
        """One that may have more of a prompt's prefix, as far as anybody knows: any, sometimes."""
        if not self.sim.tier_slots or self.sim.random.random() < 0.3:
            return None
        others = [view.party for view in self.membership.snapshot(self.sim.now).workers if view.party != worker]
        return PeerRef(self.sim.random.choice(others), "") if others else None

    def step_down(self, request: SimRequest) -> None:
        state, now = request.state, self.sim.now
        if state.ended:
            return
        snapshot = self.membership.snapshot(now)
        step = next_step(snapshot, request.shape, least_loaded, state.history)
        if not isinstance(step.placement, NoWorker):
            self.start_attempt(request, step.placement)
            return
        request.stranded_at = now if request.stranded_at is None else request.stranded_at
        if may_wait(snapshot, state.history):  # until the deadline
            request.num_waits += 1
            timer = request.retry = object()
            delay = backoff_seconds(request.num_waits - 1, self.sim.random)
            self.sim.after(delay, lambda: self.on_retry(request, timer))
            return
        self.apply(request, state.fail(Failure(state.history[-1].failure.reason, step.placement.reason)))

    def on_retry(self, request: SimRequest, timer: object) -> None:
        if request.retry is timer:
            self.step_down(request)

    def on_message(self, sender: Party, body: Body) -> None:
        if isinstance(body, StepTokens):
            for delta in body.deltas:
                self.hear(sender, delta)
        elif isinstance(body, RequestFailed):
            self.hear(sender, body)

    def hear(self, sender: Party, news: TokenDelta | RequestFailed) -> None:
        request = self.requests[news.key.request_id]
        state, current, had_ended = request.state, request.state.key, request.state.ended
        workers = state.placement.parties if state.placement is not None else ()
        if isinstance(news, TokenDelta):
            update = state.on_delta(sender, news)
        else:
            update = state.on_request_failed(sender, news)
        if update is not None:
            assert not had_ended, "a message after the end was taken in"
            assert news.key == current and sender in workers, f"a message of {news.key} was taken in for {current}"
            self.apply(request, update)
            if isinstance(news, TokenDelta):
                self.compare(request, news)

    def compare(self, request: SimRequest, news: TokenDelta) -> None:
        """Workers that contradict each other end the request: one of them computed something else."""
        for position, token in enumerate(news.token_ids, start=news.position):
            first = request.heard.setdefault((news.key, position), token)
            is_noticed = request.state.phase is Phase.FAILED
            assert first == token or is_noticed, f"{news.key} goes on with tokens {first} and {token} at {position}"

    def apply(self, request: SimRequest, update: Update) -> None:
        request.output += update.token_ids
        if update.token_ids and request.charge is not None:
            request.charge.first_token_out()
        for party in update.aborts:
            self.sim.send(ROUTER, party, Abort(request.state.key))
        request.state.check_invariants()
        if (update.retry or update.ended) and request.charge is not None:
            request.charge.release()
            request.charge = None
        if update.retry:
            last = request.state.history[-1]
            record = self.membership.get(last.culprit)
            if record is not None and last.failure.reason is not FailureReason.OVERLOADED:
                record.breaker.on_failure(self.sim.now, request.attempt_began_at)
            self.step_down(request)
        elif request.state.phase is Phase.FINISHED and request.state.placement is not None:
            for party in request.state.placement.parties:
                record = self.membership.get(party)
                if record is not None:
                    record.breaker.on_success()

    # ---- how it must end ----

    @property
    def failures(self) -> list[str]:
        """What clients were told of requests that failed."""
        return [r.state.failure.message for r in self.requests.values() if r.state.failure is not None]

    def has_ended(self, num_requests: int) -> bool:
        return len(self.requests) == num_requests and all(request.state.ended for request in self.requests.values())

    def check_end(self) -> None:
        """Every request ended, with the tokens that it should have: all of them, if anybody could help."""
        for request_id, request in self.requests.items():
            assert request.state.ended, f"{request_id} never ended"
            is_complete = request.state.phase is Phase.FINISHED
            was_deceived = request_id in self.sim.liar.deceived
            if self.sim.faults.rounding or was_deceived:
                assert not is_complete or len(request.output) == request.sampling.max_tokens, f"{request_id}: too short"
            else:
                expected = expected_output(request.prompt, request.sampling)
                expected = expected if is_complete else expected[: len(request.output)]
                assert request.output == expected, f"{request_id}: wrong tokens, {request.output} instead of {expected}"
            failure = request.state.failure
            may_fail = request.was_helpless or self.sim.faults.step_error > 0
            may_fail |= was_deceived and failure is not None and failure.reason is FailureReason.CONTRADICTION
            assert failure is None or may_fail, f"{request_id} failed without need: {failure and failure.message}"
        for record in self.membership.records():
            counts = (record.num_requests, record.prefill_tokens, record.context_tokens)
            assert counts == (0, 0, 0), f"{record.info.party} is still charged {counts}"
