"""A router's core with its driver's clock, for tests: events in, effects out."""

import random
from typing import Any

from splitserve.benchmarks.router.instant_worker import DEFAULT_LAYOUT
from splitserve.protocol.config import ProtocolConfig, RouterConfig
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.messages.requests import (
    StepTokens,
    TokenDelta,
)
from splitserve.protocol.request import Party, RequestKey, Role, SamplingParams
from splitserve.router.links.membership import Membership
from splitserve.router.links.worker_record import Charges
from splitserve.router.placement.prefix_view import PrefixView
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.effects import (
    Effect,
    Send,
)
from splitserve.router.requests.events import (
    Event,
    FromWorker,
    Submit,
    Timer,
    TimerFired,
    TimerKind,
    WorkerLost,
    WorkerReady,
)

PREFILL, DECODE, MIXED = Party("prefill-0", 1), Party("decode-0", 2), Party("mixed-0", 3)
ROLES = {PREFILL: Role.PREFILL, DECODE: Role.DECODE, MIXED: Role.MIXED}
DEADLINE_SECONDS = 60.0


class Core:
    """A core with its driver's clock; ``effects`` are those of the last event."""

    def __init__(self, *workers: Party, **protocol: Any) -> None:
        settings = ProtocolConfig(request_deadline_seconds=DEADLINE_SECONDS, **protocol)
        config = RouterConfig(model="m", served_model_name="m", protocol=settings, max_requests_in_flight=4)
        self.membership = Membership(5.0, 60.0)
        self.core = RouterCore(config, self.membership, PrefixView(), random.Random(0))
        self.now = 100.0
        self.effects: list[Effect] = []
        for worker in workers:
            self.join(worker)

    def handle(self, event: Event) -> list[Effect]:
        self.effects = self.core.handle(event, self.now)
        self.core.check_invariants()
        return self.effects

    def join(self, worker: Party, role: Role | None = None) -> list[Effect]:
        info = WorkerInfo(
            worker, role or ROLES[worker], f"tcp://{worker.engine_id}", 1, DEFAULT_LAYOUT, 64, 8, 1000, 100
        )
        assert self.membership.register(worker, info, self.now).refusal is None
        self.membership.link_up(worker)
        return self.handle(WorkerReady(worker))

    def lose(self, worker: Party) -> list[Effect]:
        self.membership.lose(worker)
        return self.handle(WorkerLost(worker, "is gone"))

    def submit(self, request_id: str = "r", max_tokens: int = 5) -> ActiveRequest:
        request = ActiveRequest.new(request_id, [1, 2, 3], SamplingParams(max_tokens=max_tokens), self.now)
        self.handle(Submit(request))
        return request

    def tokens(self, sender: Party, key: RequestKey, position: int, *ids: int, **more: Any) -> list[Effect]:
        return self.handle(FromWorker(sender, StepTokens([TokenDelta(key, position, list(ids), **more)])))

    def fire(self, kind: TimerKind, request_id: str = "r") -> list[Effect]:
        return self.handle(TimerFired(Timer(kind, request_id)))

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def sent(self) -> list[tuple[Party, type]]:
        return [(send.to, type(send.body)) for send in self.of(Send)]

    def charges(self, worker: Party) -> Charges:
        record = self.membership.get(worker)
        assert record is not None
        return record.charges
