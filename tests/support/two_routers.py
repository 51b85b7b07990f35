"""Two routers' cores that exchange reports by hand. Not a test module."""

import random

from splitserve.benchmarks.router.instant_worker import DEFAULT_LAYOUT
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.request import Party, Role, SamplingParams
from splitserve.router.links.membership import Membership
from splitserve.router.peers import peers
from splitserve.router.placement.prefix_view import PrefixView
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.effects import Effect, TellRouters
from splitserve.router.requests.events import (
    Event,
    FromRouter,
    MeetRouters,
    PauseMode,
    Submit,
    TenantsChanged,
    TimerFired,
    WorkerReady,
)
from splitserve.router.requests.queue.tenants import Tenant, Tenants

WORKERS = (Party("mixed-0", 1), Party("mixed-1", 1))
BLOCK = DEFAULT_LAYOUT.block_size
TENANT = Tenant(name="team", max_requests_in_flight=2, tokens_per_minute=600.0)


class Router:
    """A core, and the messages of it that have not been delivered."""

    def __init__(self, name: str, other: str, *, incarnation: int = 1, workers: tuple[Party, ...] = WORKERS) -> None:
        config = RouterConfig(
            model="m", served_model_name="m", name=name, peers={other: "tcp://127.0.0.1:1"}, max_requests_in_flight=4
        )
        self.party = Party(name, incarnation)
        self.membership = Membership(5.0, 60.0)
        self.prefixes = PrefixView()
        self.core = RouterCore(config, self.membership, self.prefixes, random.Random(0))
        self.now = 100.0
        self.told: list[TellRouters] = []
        self.handle(TenantsChanged(Tenants((TENANT,))))
        for worker in workers:
            self.join(worker)

    def join(self, worker: Party) -> None:
        """Register a worker, and bring its link up."""
        info = WorkerInfo(worker, Role.MIXED, "tcp://w", 1, DEFAULT_LAYOUT, 640, 8, 100_000, 100)
        assert self.membership.register(worker, info, self.now).refusal is None
        self.membership.link_up(worker)
        self.handle(WorkerReady(worker))

    def handle(self, event: Event) -> list[Effect]:
        """Hand an event to the core; return its effects."""
        effects = self.core.handle(event, self.now)
        self.core.check_invariants()
        self.told += [effect for effect in effects if isinstance(effect, TellRouters)]
        return effects

    def begin(self, request_id: str, num_tokens: int = 3) -> ActiveRequest:
        """Submit a request."""
        request = ActiveRequest.new(request_id, [1] * num_tokens, SamplingParams(max_tokens=5), self.now)
        self.handle(Submit(request))
        return request

    def report(self) -> None:
        """Tell the other router the state of this one."""
        self.handle(TimerFired(peers.REPORT))

    def loads(self) -> dict[str, int]:
        """The requests in flight that a policy sees, by worker."""
        views = self.membership.snapshot(self.now).workers
        return {view.party.engine_id: view.num_requests for view in views if view.num_requests}

    @property
    def mode(self) -> PauseMode | None:
        """The mode of the pause; None: there is none."""
        return self.core.pause.mode


def deliver(sender: Router, receiver: Router) -> list[Effect]:
    """Deliver what ``sender`` has told; returns the effects."""
    told, sender.told = sender.told, []
    meant = [each for each in told if each.to in (None, receiver.party)]
    return [effect for each in meant for effect in receiver.handle(FromRouter(sender.party, each.body))]


def two_routers() -> tuple[Router, Router]:
    """Return two routers that have heard each other."""
    one, other = Router("router", "router-1"), Router("router-1", "router")
    for router in (one, other):
        router.handle(MeetRouters())
    for sender, receiver in ((one, other), (other, one)) * 2:
        deliver(sender, receiver)
    return one, other
