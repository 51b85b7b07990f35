"""The router's side of the simulator: its production state machines; the simulator plays the event loop's part.

Membership, placement, the failure ladder and the state of each request are the router's own; what is here does what
:mod:`splitserve.router.dispatcher` and :mod:`splitserve.router.fleet` do with sockets and timers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitserve.messages import (
    Abort,
    Body,
    DecodeRequest,
    LocalRequest,
    PeerRef,
    PrefillRequest,
    RequestFailed,
    StepTokens,
    WorkerInfo,
)
from splitserve.request import Party, RequestKey, SamplingParams
from splitserve.router.ladder import backoff_seconds, may_wait, next_step
from splitserve.router.membership import Membership, WorkerState
from splitserve.router.placement import Disaggregated, NoWorker, Placed, RequestShape, least_loaded
from splitserve.router.request_state import Failure, RequestState, Update

if TYPE_CHECKING:
    from simulator import Simulator, SimWorker

ROUTER = Party("router", 1)


@dataclass
class SimRequest:
    prompt: list[int]
    sampling: SamplingParams
    state: RequestState
    output: list[int] = field(default_factory=list)
    failed: str | None = None
    aborted: bool = False
    stranded_at: float | None = None

    @property
    def shape(self) -> RequestShape:
        return RequestShape(len(self.prompt), self.sampling.max_tokens, len(self.state.delivered_ids))


class SimRouter:
    def __init__(self, sim: "Simulator") -> None:
        self.sim = sim
        self.requests: dict[str, SimRequest] = {}
        self.membership = Membership(sim.protocol.dead_after_seconds, sim.protocol.tombstone_seconds)
        self.orphans: dict[Party, list[RequestKey]] = {}
        sim.after(0.25, self.tick)

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
        self.membership.link_up(worker.party)
        if registration.replaced is not None:
            self.on_lost(registration.replaced)
        self.heartbeat(worker)

    def heartbeat(self, worker: "SimWorker") -> None:
        if not worker.alive or worker.thaws_first(lambda: self.heartbeat(worker)):
            return
        if self.membership.heartbeat(worker.party, worker.core.load(), self.sim.now) is WorkerState.LOST:
            self.membership.link_up(worker.party)
            for key in self.orphans.pop(worker.party, []):
                self.sim.send(ROUTER, worker.party, Abort(key))
        self.sim.after(self.sim.protocol.heartbeat_seconds, lambda: self.heartbeat(worker))

    def tick(self) -> None:
        for party in self.membership.expire(self.sim.now):
            self.on_lost(party)
        self.sim.after(0.25, self.tick)

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
        request = SimRequest(prompt, sampling, RequestState(request_id, max_tokens))
        placement = least_loaded(self.membership.snapshot(self.sim.now), request.shape)
        if isinstance(placement, NoWorker):  # a client would get 503 and try again
            self.sim.after(0.5, lambda: self.submit(request_id, prompt, max_tokens))
            return
        self.requests[request_id] = request
        self.start_attempt(request, placement)
        if self.sim.random.random() < self.sim.faults.abort:
            self.sim.after(self.sim.random.uniform(0.0, 0.3), lambda: self.abort(request))

    def start_attempt(self, request: SimRequest, placement: Placed) -> None:
        request.state.begin(placement)
        request.stranded_at = None
        key, delivered = request.state.key, request.state.delivered_ids
        if isinstance(placement, Disaggregated):
            prefill, decode = PeerRef(placement.prefill, ""), PeerRef(placement.decode, "")
            to_decode = DecodeRequest(key, request.prompt, request.sampling, prefill, 60.0, delivered)
            to_prefill = PrefillRequest(key, request.prompt, request.sampling, decode, 60.0, delivered)
            self.sim.send(ROUTER, placement.decode, to_decode)
            self.sim.send(ROUTER, placement.prefill, to_prefill)
        else:
            local = LocalRequest(key, request.prompt, request.sampling, 60.0, delivered)
            self.sim.send(ROUTER, placement.worker, local)

    def step_down(self, request: SimRequest) -> None:
        state, now = request.state, self.sim.now
        if state.ended:
            return
        step = next_step(self.membership.snapshot(now), request.shape, least_loaded, state.history)
        if not isinstance(step.placement, NoWorker):
            self.start_attempt(request, step.placement)
            return
        request.stranded_at = now if request.stranded_at is None else request.stranded_at
        waited = now - request.stranded_at
        if may_wait(state.history) and waited < self.sim.protocol.no_worker_wait_seconds:
            self.sim.after(backoff_seconds(1, self.sim.random), lambda: self.step_down(request))
        else:
            failure = Failure(state.history[-1].failure.reason, step.placement.reason)
            self.apply(request, state.fail(failure))

    def abort(self, request: SimRequest) -> None:
        if not request.state.ended:
            request.aborted = True
            self.apply(request, request.state.cancel())

    def on_message(self, sender: Party, body: Body) -> None:
        if isinstance(body, StepTokens):
            for delta in body.deltas:
                request = self.requests[delta.key.request_id]
                had_ended = request.state.ended
                update = request.state.on_delta(sender, delta)
                if update is not None:
                    assert not (update.token_ids and had_ended), "a token after the end"
                    self.apply(request, update)
        elif isinstance(body, RequestFailed):
            request = self.requests[body.key.request_id]
            update = request.state.on_request_failed(sender, body)
            if update is not None:
                self.apply(request, update)

    def apply(self, request: SimRequest, update: Update) -> None:
        request.output += update.token_ids
        for party in update.aborts:
            self.sim.send(ROUTER, party, Abort(request.state.key))
        if update.failure is not None:
            request.failed = update.failure.message
        request.state.check_invariants()
        if update.retry:
            record = self.membership.get(request.state.history[-1].culprit)
            if record is not None:
                record.breaker.on_failure(self.sim.now)
            self.step_down(request)

    def check_end(self, expected_output: Callable[[list[int], SamplingParams], list[int]], *, may_fail: bool) -> None:
        """Every request ended with the tokens of an undisturbed worker; none failed unless ``may_fail``."""
        for request_id, request in self.requests.items():
            assert request.state.ended, f"{request_id} never ended"
            expected = expected_output(request.prompt, request.sampling)
            if request.aborted or request.failed:
                assert request.output == expected[: len(request.output)], f"{request_id}: wrong tokens before its end"
                assert may_fail or request.aborted, f"{request_id} failed: {request.failed}"
            else:
                assert request.output == expected, f"{request_id}: {request.output} instead of {expected}"
