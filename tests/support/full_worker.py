"""A router's core beside workers that run few requests at a time: one, at first."""

import random
from typing import Any

from splitserve.benchmarks.router.instant_worker import DEFAULT_LAYOUT
from splitserve.protocol.config import RequestClass, RouterConfig
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.messages.requests import StepTokens, TokenDelta
from splitserve.protocol.request import FinishReason, Party, Role, SamplingParams
from splitserve.router.links.membership import Membership
from splitserve.router.placement.prefix_view import PrefixView
from splitserve.router.requests.active_request import ActiveRequest, RequestContext
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.effects import Begun, Effect, Refuse
from splitserve.router.requests.events import (
    Event,
    FromWorker,
    Submit,
    TenantsChanged,
    TimerFired,
    WorkerLost,
    WorkerReady,
)
from splitserve.router.requests.queue.gate import TRY_MORE, TURN_SECONDS
from splitserve.router.requests.queue.tenants import Tenant, Tenants

WORKER = Party("m0", 1)
CLASSES = (RequestClass(name="chat", ttft_ms=1000), RequestClass(name="batch", ttft_ms=60_000, priority=10))


class FullWorker:
    """A core whose one worker runs one request at a time. ``router``: more of the router's configuration."""

    def __init__(self, *tenants: Tenant, slots: int = 1, **router: Any) -> None:
        config = RouterConfig(model="m", served_model_name="m", classes=CLASSES, **router)
        self.membership = membership = Membership(1e9, 60.0)
        self.core = RouterCore(config, membership, PrefixView(), random.Random(0))
        self.now = 100.0
        self.begun: list[str] = []
        self.refused: dict[str, Refuse] = {}
        self.requests: dict[str, ActiveRequest] = {}
        self.join(WORKER, slots=slots)
        self.handle(TenantsChanged(Tenants(tenants)))

    def join(self, worker: Party, *, slots: int = 1, max_model_len: int = 10_000, role: Role = Role.MIXED) -> None:
        """Register a worker, and bring its link up."""
        address = f"tcp://{worker.engine_id}"
        info = WorkerInfo(worker, role, address, 1, DEFAULT_LAYOUT, 1 << 16, slots, max_model_len, 100)
        assert self.membership.register(worker, info, self.now).refusal is None
        self.membership.link_up(worker)
        self.handle(WorkerReady(worker))

    def lose(self, worker: Party) -> None:
        """Lose a worker."""
        self.membership.lose(worker)
        self.handle(WorkerLost(worker, "is gone"))

    def handle(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.core.check_invariants()
        self.begun += [effect.request_id for effect in effects if isinstance(effect, Begun)]
        self.refused |= {effect.request_id: effect for effect in effects if isinstance(effect, Refuse)}
        return effects

    def submit(
        self,
        request_id: str,
        name: str = "chat",
        tenant: str = "a",
        *,
        num_tokens: int = 90,
        max_tokens: int = 10,
        prompt_logprobs: int | None = None,
        **context: Any,
    ) -> None:
        chosen = {each.name: each for each in CLASSES}[name]
        full = RequestContext(request_class=chosen, tenant=tenant, **context)
        sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        request = ActiveRequest.new(request_id, [1] * num_tokens, sampling, self.now, full)
        self.requests[request_id] = request
        self.handle(Submit(request))

    def finish(self, request_id: str) -> None:
        self.token(request_id, finish_reason=FinishReason.STOP)

    def token(self, request_id: str, finish_reason: FinishReason | None = None) -> None:
        """Let the worker of a request send its next token."""
        state = self.requests[request_id].state
        assert state.placement is not None
        delta = TokenDelta(state.key, len(state.delivered_ids), [7], finish_reason=finish_reason)
        self.handle(FromWorker(state.placement.parties[-1], StepTokens([delta])))

    def try_more(self) -> int:
        """Let the queue take its further turns; return their number."""
        num_turns = 0
        while TRY_MORE in self.core.timers():
            self.now += TURN_SECONDS
            self.handle(TimerFired(TRY_MORE))
            num_turns += 1
        return num_turns

    def finish_all(self, seconds: float = 0.0) -> list[str]:
        """Finish what runs, one after the other, until nothing waits; return the order."""
        number = 0
        while number < len(self.begun):
            self.now += seconds
            self.finish(self.begun[number])
            number += 1
        return self.begun
