"""A simulated cluster: production cores of router and workers under virtual time, a seeded network and disasters."""

import heapq
import itertools
import random
from collections.abc import Callable

from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.handover import Offer
from splitserve.protocol.request import Party, Role
from splitserve.simulation.faults import Faults, Shape
from splitserve.simulation.lies import Liar
from splitserve.simulation.model import PROTOCOL, HashedModel, Model, is_router
from splitserve.simulation.operators import Operators
from splitserve.simulation.router.driver import SimRouter
from splitserve.simulation.router.group import SimRouters
from splitserve.simulation.waits import check_waits
from splitserve.simulation.worker.cache_checks import check_index
from splitserve.simulation.worker.driver import SimWorker
from splitserve.simulation.worker.peer_checks import check_peers
from splitserve.simulation.worker.tiers import SharedServer

WAITS_SECONDS = 0.1  # from one look at who waits for whom to the next
DISASTER_SECONDS = 2.0  # disasters begin within this time
HANDOVER_KILL_SHARE = 0.1  # probability that an offer is its sender's last, while such kills are to come


class Simulator:
    """One run of a cluster: equal arguments give an equal run.

    The owner submits requests by ``router.submit`` at times of its choice (:meth:`at`), moves time on (:meth:`run`),
    and checks the end (:meth:`check_end`).
    """

    def __init__(
        self,
        seed: int,
        faults: Faults,
        shape: Shape,
        protocol: ProtocolConfig = PROTOCOL,
        model: Model | None = None,
    ) -> None:
        self.shape = shape
        self.random = random.Random(seed)
        self.model = model or HashedModel()
        self.faults = faults
        self.protocol = protocol
        self.partitions: list[tuple[float, float, set[str]]] = []
        self.mutes: list[tuple[float, float, str]] = []
        self.now = 0.0
        self.workers: dict[str, SimWorker] = {}  # every incarnation, by its party
        self._living: dict[str, SimWorker] = {}  # the youngest incarnation, by its name
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._events: list[tuple[float, Party | None, Party | None, object]] = []
        self._link_busy_until: dict[tuple[Party, Party], float] = {}
        self._num_handover_kills = faults.handover_kills  # those still to come
        self._unsent_since: dict[Party, float] = {}  # messages of dead workers after this time were never sent
        self.routers = SimRouters(self, shape.routers)
        self.liar = Liar(self)
        self.operators = Operators(self)
        self.tier_slots = shape.tier_slots
        self.window = shape.window
        self.shared = SharedServer(self.random, shape.shared_chunk)
        for name, role, num_blocks in shape.workers():
            self.start_worker(name, role, num_blocks)
        self._plan_disasters()
        self.after(WAITS_SECONDS, self._check_waits)

    # ---- time and network ----

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Run ``action`` at a time."""
        heapq.heappush(self._queue, (time, next(self._counter), action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Run ``action`` in ``delay`` seconds."""
        self.at(self.now + delay, action)

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self._events.append((self.now, None, None, text))

    @property
    def trace(self) -> list[str]:
        """All messages and notes so far, a line each."""
        return [
            f"{time:9.4f} {what if sender is None or to is None else f'{sender.engine_id} -> {to.engine_id}: {what}'}"
            for time, sender, to, what in self._events
        ]

    def send(self, sender: Party, to: Party, body: Body) -> None:
        """Deliver a message after a while, in order on a router's link; between peers it may get lost or repeated."""
        if self.faults.lies and isinstance(body, Offer):
            body = self.liar.twist(sender, body)
        if isinstance(body, Offer) and self._num_handover_kills:
            self._kill_in_handover(sender)
        self._events.append((self.now, sender, to, body))
        envelope, sent_at = Envelope(sender, to, body), self.now
        if is_router(sender) or is_router(to):  # one connection, which keeps the order
            arrival = max(self.now + self.random.uniform(0.0005, 0.01), self._link_busy_until.get((sender, to), 0.0))
            self._link_busy_until[sender, to] = arrival
            self.at(arrival, lambda: self._deliver(envelope, sent_at))
            return
        copies = 1
        if self._is_cut(sender, to) or self.random.random() < self.faults.drop:
            copies = 0
        elif self.random.random() < self.faults.duplicate:
            copies = 2
        for _ in range(copies):
            self.after(self.random.uniform(0.0, self.faults.max_delay), lambda: self._deliver(envelope, sent_at))

    def _is_cut(self, sender: Party, to: Party) -> bool:
        pair = {sender.engine_id, to.engine_id}
        return any(start <= self.now < end and pair == cut for start, end, cut in self.partitions) or any(
            start <= self.now < end and sender.engine_id == name for start, end, name in self.mutes
        )

    def _deliver(self, envelope: Envelope, sent_at: float) -> None:
        """Hand a message to its address, where a later incarnation may be than the one that it is meant for."""
        assert envelope.to is not None
        if sent_at >= self._unsent_since.get(envelope.sender, float("inf")):
            return
        if is_router(envelope.to):
            self.routers.on_message(envelope.to, envelope.sender, envelope.body)
        else:
            self._living[envelope.to.engine_id].deliver(envelope)

    # ---- workers start, end and freeze ----

    def start_worker(self, name: str, role: Role, num_blocks: int) -> None:
        """Start a new incarnation of a worker."""
        worker = SimWorker(self, name, role, num_blocks, self.random.getrandbits(32))
        self.workers[str(worker.party)] = self._living[name] = worker
        self.note(f"{worker.party} starts")
        self.routers.on_started(worker)

    def kill(self, worker: SimWorker, restart_after: float) -> None:
        """Kill a worker as by SIGKILL: connections close, reads end, and a new incarnation takes its name later."""
        if worker.alive:
            self.note(f"{worker.party} is killed")
            worker.alive = False
            self._unsent_since[worker.party] = self.now - self.random.uniform(0.0, 0.01)
            self.after(
                self.random.uniform(0.001, 0.02),
                lambda: self.routers.each(lambda router: router.on_connection_closed(worker.party)),
            )
            self.after(restart_after, lambda: self._restart(worker))

    def _kill_in_handover(self, source: Party) -> None:
        """Perhaps kill the source of an offer, soon."""
        if self.random.random() < HANDOVER_KILL_SHARE:
            self._num_handover_kills -= 1
            when, restart_after = self.random.uniform(0.0, 0.02), self.random.uniform(0.1, 2.0)
            self.after(when, lambda: self.kill(self.workers[str(source)], restart_after))

    def freeze(self, worker: SimWorker, seconds: float) -> None:
        """Freeze a worker as by SIGSTOP, with SIGCONT later: nothing in it moves, and no other process learns of it."""
        if worker.alive:
            self.note(f"{worker.party} is frozen for {seconds:.1f} s")
            worker.frozen_until = max(worker.frozen_until, self.now + seconds)

    def drain(self, worker: SimWorker, seconds: float) -> None:
        """Drain a worker as by SIGTERM; its core decides when it leaves (:meth:`leave`)."""
        del seconds
        self.note(f"{worker.party} drains")
        worker.drain()

    def leave(self, worker: SimWorker) -> None:
        """End a worker that has drained, and restart it later."""
        assert worker.alive, f"{worker.party} leaves, but has ended before"
        self.note(f"{worker.party} leaves: {worker.drain_clock.reason}")
        worker.alive = False
        self.routers.each(lambda router: router.on_leave(worker.party))
        self.after(self.random.uniform(0.1, 2.0), lambda: self._restart(worker))

    def _restart(self, worker: SimWorker) -> None:
        self.start_worker(worker.party.engine_id, worker.role, worker.num_blocks)

    def living(self, name: str) -> SimWorker:
        """Return the youngest incarnation of this name."""
        return self._living[name]

    def _plan_disasters(self) -> None:
        names, faults = self.names, self.faults
        for _ in range(faults.partitions):
            start = self.random.uniform(0.0, DISASTER_SECONDS)
            pair = {self.random.choice([n for n in names if n.startswith(role)] or names) for role in ("pre", "dec")}
            self.partitions.append((start, start + self.random.uniform(0.0, faults.partition_seconds), pair))
        for _ in range(faults.mutes):
            start = self.random.uniform(0.0, DISASTER_SECONDS)
            self.mutes.append((start, start + faults.partition_seconds, self.random.choice(names)))
        for number, act, low, high in (
            (faults.kills, self.kill, 0.1, 2.0),
            (faults.freezes, self.freeze, 1.0, 9.0),
            (faults.drains, self.drain, 0.0, 0.0),
        ):
            for _ in range(number):
                name, seconds = self.random.choice(names), self.random.uniform(low, high)
                when = self.random.uniform(0.0, DISASTER_SECONDS)
                self.at(when, lambda a=act, n=name, s=seconds: a(self.living(n), s))  # type: ignore[misc]

        self.operators.plan(DISASTER_SECONDS)
        for _ in range(faults.router_kills):
            when, seconds = self.random.uniform(0.0, DISASTER_SECONDS), self.random.uniform(0.1, 2.0)
            self.at(when, lambda s=seconds: self.routers.kill(s))  # type: ignore[misc]

    # ---- running ----

    @property
    def router(self) -> SimRouter:
        """The first router."""
        return self.routers.first

    @property
    def names(self) -> list[str]:
        """The workers' names, sorted."""
        return sorted(self._living)

    @property
    def living_workers(self) -> list[SimWorker]:
        """The workers that run."""
        return [worker for worker in self._living.values() if worker.alive]

    @property
    def num_handovers(self) -> int:
        """Number of completed hand-overs: a run without any proves nothing about them."""
        return sum(worker.core.state.counters.handovers for worker in self.workers.values())

    @property
    def num_handover_failures(self) -> int:
        """Number of hand-overs that decode workers saw fail, or that prefill gave up before a grant."""
        decode = (worker for worker in self.workers.values() if worker.role is Role.DECODE)
        num_seen = sum(worker.core.state.counters.handover_failures for worker in decode)
        return num_seen + sum(worker.turns.num_given_up for worker in self.workers.values())

    def run(self, until: float) -> None:
        """Run all that happens until a time, which it is then."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = until

    def _check_waits(self) -> None:
        check_waits(worker for worker in self.workers.values() if worker.alive)
        self.after(WAITS_SECONDS, self._check_waits)

    def check_end(self) -> None:
        """Check that every request ended as it should, and that no block, copy, request or charge is left over."""
        self.routers.check_end()
        self.operators.check_end()
        alive = [worker for worker in self.workers.values() if worker.alive]
        check_index(alive)
        for worker in alive:
            worker.core.tick(worker.clock)
            check_peers(worker)
            for pool in worker.core.state.blocks.pools:
                assert pool.count(BlockState.REFERENCED) == 0, f"{worker.party}: blocks are still referenced"
                assert pool.count(BlockState.QUARANTINED) == 0, f"{worker.party}: blocks are still quarantined"
            assert worker.core.state.blocks.tiers.is_idle, f"{worker.party}: copies are still in flight"
            is_linked = self.routers.is_linked(worker.party)
            assert not (worker.core.state.is_frozen and is_linked), f"{worker.party} is still frozen"
            assert worker.core.load().requests_tracked == 0, f"{worker.party}: requests are still tracked"
