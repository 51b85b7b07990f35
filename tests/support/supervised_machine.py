"""A machine under a cluster's supervisor, in virtual time. Not a test module."""

import random
from collections.abc import Iterable

import msgspec

from splitserve.orchestration.cluster.roster import Action, Drain, Kill, Start, WorkerPhase
from splitserve.orchestration.cluster.supervision import Snapshot, Supervisor
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig

ENGINE = EngineConfig(model="./some/model")


def spec_of(prefill: int = 2, decode: int = 2, mixed: int = 0) -> ClusterSpec:
    return simple_spec(ENGINE, num_prefill=prefill, num_decode=decode, num_mixed=mixed)


def changed(spec: ClusterSpec) -> ClusterSpec:
    """The next revision: other threads in each pool."""
    pools = [msgspec.structs.replace(pool, threads=pool.threads + 1) for pool in spec.pools]
    return msgspec.structs.replace(spec, pools=pools)


class Machine:
    """Carries out actions under a clock of its own. Processes do nothing by themselves: the test says what they do."""

    def __init__(self, spec: ClusterSpec, *, room: int | None = None, restart: bool = True) -> None:
        self.now = 0.0
        self.room = room
        self.running: dict[str, ClusterSpec] = {}
        self.asked: set[str] = set()
        self.log: list[str] = []
        self.supervisor = Supervisor(spec, restart=restart, has_room=self.has_room, chosen=random.Random(0))
        self.supervisor.want_all(self.now)
        self.go_on()

    def lose_supervisor(self) -> None:
        """Another one goes on with what was remembered, and hears again of those that are ready."""
        before = self.supervisor
        data = msgspec.json.encode(before.snapshot())
        self.supervisor = Supervisor(before.spec, has_room=self.has_room, chosen=random.Random(1))
        self.supervisor.restore(msgspec.json.decode(data, type=Snapshot), self.running, self.now)
        self.perform(self.supervisor.poll(self.now))
        known = before.names(WorkerPhase.READY) | before.names(WorkerPhase.LEAVING)
        for name in sorted(known.intersection(self.running)):
            self.perform(self.supervisor.on_ready(name, self.now))
        self.supervisor.check_invariants()

    def has_room(self, _pool: PoolSpec) -> bool:
        starting = [name for name in self.supervisor.workers if name not in self.running]
        return self.room is None or len(self.running) + len(starting) < self.room

    def perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker):
                    assert worker.name not in self.running
                    assert self.room is None or len(self.running) < self.room
                    self.running[worker.name] = worker.spec
                    self.log.append(f"+{worker.name}")
                    self.supervisor.on_started(worker.name)
                case Drain(name):
                    assert name in self.running
                    self.asked.add(name)
                    self.log.append(f"-{name}")
                case Kill(name):
                    self.exit(name, -9)

    def go_on(self) -> None:
        self.perform(self.supervisor.poll(self.now))
        self.supervisor.check_invariants()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.go_on()

    def ready(self, *names: str) -> None:
        for name in names or sorted(self.supervisor.names(WorkerPhase.STARTING)):
            self.perform(self.supervisor.on_ready(name, self.now))
            self.go_on()

    def exit(self, name: str, returncode: int = 0) -> None:
        self.running.pop(name)
        self.asked.discard(name)
        self.perform(self.supervisor.on_exit(name, returncode, f"status {returncode}", self.now))
        self.go_on()

    def leave(self) -> None:
        """End the workers that were asked to leave."""
        for name in sorted(self.asked):
            self.exit(name)

    @property
    def names(self) -> list[str]:
        return sorted(self.running)


def serving(**numbers: int) -> Machine:
    machine = Machine(spec_of(**numbers))
    machine.ready()
    return machine
