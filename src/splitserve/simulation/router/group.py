"""The simulated routers on one port: the first one, and others that may die and start again."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from splitserve.protocol.kv_event_batch import KVEvent
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.routers import RouterReport, SentPrefixes
from splitserve.protocol.request import Party, SamplingParams
from splitserve.router.requests.events import Event, FromRouter, MeetRouters, PauseRequests, ResumeRequests, RouterLost
from splitserve.simulation.model import ROUTER
from splitserve.simulation.router.driver import SimRouter

if TYPE_CHECKING:
    from splitserve.simulation.simulator import Simulator
    from splitserve.simulation.worker.driver import SimWorker

FOLLOW_SECONDS = 0.3
"""Time in which all routers follow what an operator asks one of them for, if no message gets lost."""


class SimRouters:
    """``number`` routers. Workers know the last incarnation of each."""

    def __init__(self, sim: "Simulator", number: int) -> None:
        self._sim = sim
        names = [ROUTER.engine_id, *(f"{ROUTER.engine_id}-{index}" for index in range(1, number))]
        self._names = names if number > 1 else []
        self._last = {name: SimRouter(sim, Party(name, 1), [each for each in names if each != name]) for name in names}
        self._all = list(self._last.values())  # every incarnation
        self._busy_until: dict[tuple[Party, Party], float] = {}
        self._num_acts = 0  # of operators
        self._unanswered: tuple[SimRouter, Event] | None = None  # the last pause or resumption, and the asked router
        for router in self._all if number > 1 else []:
            sim.after(sim.random.uniform(0.0, 0.01), lambda r=router: r.handle(MeetRouters()))  # type: ignore[misc]

    @property
    def first(self) -> SimRouter:
        """The first router, which never dies."""
        return self._all[0]

    @property
    def living(self) -> list[SimRouter]:
        """Routers that run, the first one first."""
        return [router for router in self._last.values() if router.alive]

    # ---- clients and operators ----

    def submit(self, index: int, prompt: list[int], wanted: int | SamplingParams, num_choices: int = 1) -> None:
        """Start the client number ``index``, at any router."""
        living = self.living
        living[index % len(living)].submit(f"r{index}", prompt, wanted, num_choices)

    def conversation(self, index: int) -> list[int]:
        """Return the prompt of the client number ``index``, with the output that it has so far."""
        client = next(router.clients[f"r{index}"] for router in self._all if f"r{index}" in router.clients)
        return client.prompt + client.output

    def ask(self, event: Event) -> None:
        """Have an operator ask any router; all must follow, unless something else comes between."""
        asked = self.any_living()
        if isinstance(event, PauseRequests | ResumeRequests):
            self._unanswered = asked, event
        self._num_acts += 1
        number = self._num_acts
        asked.handle(event)
        if isinstance(event, PauseRequests) and not (self._sim.faults.drop or self._sim.faults.router_kills):
            self._sim.after(FOLLOW_SECONDS, lambda: self._check_follows(event, number))

    def on_pause_followed(self, router: SimRouter) -> None:
        """Let a router answer the operators who have asked it for a pause or its end."""
        if self._unanswered is not None and self._unanswered[0] is router:
            self._unanswered = None

    def _check_follows(self, event: PauseRequests, number: int) -> None:
        for router in self.living if number == self._num_acts else []:
            mode = router.core.pause.mode
            assert mode is event.mode, f"{router.party} does not follow the pause: {mode} instead of {event.mode}"

    def any_living(self) -> SimRouter:
        """Return a router that an operator may ask."""
        living = self.living
        return living[0] if len(living) == 1 else self._sim.random.choice(living)

    # ---- workers ----

    def each(self, act: Callable[[SimRouter], None]) -> None:
        """Let each living router do something."""
        for router in self.living:
            act(router)

    def on_started(self, worker: "SimWorker") -> None:
        """Register a new worker with each router."""
        self.each(lambda router: router.on_started(worker))
        worker.core.on_routers(self._known_to_workers, worker.clock)

    @property
    def _known_to_workers(self) -> set[Party]:
        return {router.party for router in self._last.values()}

    def on_message(self, to: Party, sender: Party, body: Body) -> None:
        """Deliver a worker's message to a router, if that lives."""
        router = self._last[to.engine_id]
        if router.alive and router.party == to:
            router.on_message(sender, body)

    def on_kv_events(self, worker: "SimWorker", events: list[KVEvent]) -> None:
        """Publish a worker's KV events."""
        self.each(lambda router: router.on_kv_events(worker, events))

    def is_linked(self, party: Party) -> bool:
        """Return whether a router has a link to the worker."""
        return any(router.is_linked(party) for router in self.living)

    # ---- between routers ----

    def tell(self, sender: Party, to: Party | None, body: RouterReport | SentPrefixes) -> None:
        """Deliver a message to one router, or to all others, after a while and in order; it may get lost."""
        for name in self._names:
            if name == sender.engine_id or (to is not None and name != to.engine_id):
                continue
            receiver = self._last[name]
            if self._sim.random.random() < self._sim.faults.drop or (to is not None and receiver.party != to):
                continue
            key = (sender, receiver.party)
            arrival = max(self._sim.now + self._sim.random.uniform(0.0005, 0.01), self._busy_until.get(key, 0.0))
            self._busy_until[key] = arrival
            self._sim.at(arrival, lambda r=receiver: self._arrive(r, sender, body))  # type: ignore[misc]

    @staticmethod
    def _arrive(receiver: SimRouter, sender: Party, body: RouterReport | SentPrefixes) -> None:
        if receiver.alive:
            receiver.on_router_message(FromRouter(sender, body))

    def kill(self, restart_after: float) -> None:
        """Kill a router other than the first one as by SIGKILL, and start it again later."""
        victims = [router for router in self.living if router is not self.first]
        if not victims:
            return
        victim = self._sim.random.choice(victims)
        self._sim.note(f"{victim.party} is killed")
        victim.alive = False
        if self._unanswered is not None and self._unanswered[0] is victim:
            self.ask(self._unanswered[1])  # the operator sees the connection end, and asks another
        for router in self.living:
            notice = self._sim.random.uniform(0.001, 0.02)
            self._sim.after(notice, lambda r=router: r.on_router_lost(RouterLost(victim.party)) if r.alive else None)  # type: ignore[misc]
        self._sim.after(restart_after, lambda: self._restart(victim))

    def _restart(self, victim: SimRouter) -> None:
        name, incarnation = victim.party.engine_id, victim.party.incarnation + 1
        router = SimRouter(self._sim, Party(name, incarnation), [each for each in self._names if each != name])
        self._last[name] = router
        self._all.append(router)
        self._sim.note(f"{router.party} starts")
        router.handle(MeetRouters())
        self.each(lambda other: other.handle(MeetRouters()))  # their connections are up again
        self._sim.after(self._sim.random.uniform(0.01, 0.2), lambda: self._meet_workers(router))

    def _meet_workers(self, router: SimRouter) -> None:
        """Let all workers register with a router that has started; those that started later have done so."""
        for worker in self._sim.living_workers:
            if router.membership.get(worker.party) is None:
                self._meet(router, worker)

    def _meet(self, router: SimRouter, worker: "SimWorker") -> None:
        if router.alive and worker.can_run(lambda: self._meet(router, worker)):
            worker.core.on_routers(self._known_to_workers, worker.clock)
            router.on_started(worker)  # its heartbeat wakes the loop, which may be the end of a worker that drains

    # ---- the end ----

    def has_ended(self, num_requests: int) -> bool:
        """Return whether all prompts were submitted, and have ended or were those of a router that died."""
        num_prompts = sum(router.num_prompts for router in self._all)
        return num_prompts == num_requests and all(router.is_done for router in self._all)

    def check_end(self) -> None:
        """Check the end at each router that lives."""
        self.each(lambda router: router.check_end())
