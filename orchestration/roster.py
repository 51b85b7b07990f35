"""Workers of a cluster by name: those that are there and those that are to be started. Pure: time is an argument."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from splitserve.orchestration.restarts import RestartPolicy, StartTimes
from splitserve.orchestration.spec import ClusterSpec, PoolSpec

KILL_GRACE_SECONDS = 10.0  # beyond the time that a draining worker gives itself, and that its host tier takes
MAX_WORKERS_PER_POOL = 4096


class Phase(StrEnum):
    """Phase of a worker's process; :mod:`.supervision` has the transitions."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Worker:
    """A worker that is there, or is to be started."""

    name: str
    spec: ClusterSpec  # the one that it is started with
    pool: PoolSpec
    revision: int  # the number of that spec among those of the cluster
    due_at: float  # when it is started while WAITING
    phase: Phase = Phase.WAITING
    wanted: bool = True  # it is started again when it ends
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    ready_since: float | None = None
    times: StartTimes = field(default_factory=StartTimes)
    kill_at: float = float("inf")
    num_restarts: int = 0
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """Order to start a process for the worker."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Drain:
    """Order to ask the worker to finish its requests and to leave."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Order to kill the worker, which was asked to leave, and had all the time that it may take."""

    name: str


Action = Start | Drain | Kill


class Roster:
    """Workers by name, and the spec that new ones are started with, whose number is ``revision``."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.revision = 1
        self.workers: dict[str, Worker] = {}

    def add(self, pool: PoolSpec, now: float) -> Worker:
        """Add a worker of a pool that is due at once, under the first name that is free."""
        index = next(i for i in range(2 * MAX_WORKERS_PER_POOL) if f"{pool.name}-{i}" not in self.workers)
        worker = Worker(f"{pool.name}-{index}", self.spec, pool, self.revision, now)
        self.workers[worker.name] = worker
        return worker

    def renew(self, worker: Worker, now: float) -> None:
        """Give a worker that is WAITING the present spec, and start it at once, whatever it died of before."""
        worker.spec, worker.pool = self.spec, self.spec.pool(worker.pool.name)
        worker.revision, worker.due_at, worker.policy = self.revision, now, RestartPolicy()

    def dismiss(self, workers: Iterable[Worker], now: float) -> list[Action]:
        """Want some workers no more: those that run are asked to leave, the others are forgotten."""
        actions: list[Action] = []
        for worker in workers:
            worker.wanted = False
            if worker.phase is Phase.WAITING:
                del self.workers[worker.name]
            else:
                actions.append(self.ask_to_leave(worker, now))
        return actions

    def ask_to_leave(self, worker: Worker, now: float) -> Action:
        """Have a worker drain, and killed when that takes too long."""
        worker.phase = Phase.LEAVING
        grace = worker.spec.protocol_config().drain_seconds + worker.spec.give_back_seconds()
        worker.kill_at = now + grace + KILL_GRACE_SECONDS
        return Drain(worker.name)

    def poll(self, now: float) -> list[Action]:
        """Return the starts and kills that are due."""
        actions: list[Action] = []
        for worker in self.workers.values():
            if worker.phase is Phase.WAITING and worker.due_at <= now:
                worker.due_at = float("inf")  # until the launcher says what came of it
                worker.times = StartTimes(worker.times.lost_at, asked_at=now)
                actions.append(Start(worker))
            elif worker.phase is Phase.LEAVING and worker.kill_at <= now:
                worker.kill_at = float("inf")
                actions.append(Kill(worker.name))
        return actions

    def next_due(self) -> float:
        """Return when :meth:`poll` may have something to do although nothing happens."""
        waiting = (worker.due_at for worker in self.workers.values() if worker.phase is Phase.WAITING)
        leaving = (worker.kill_at for worker in self.workers.values() if worker.phase is Phase.LEAVING)
        return min(*waiting, *leaving, float("inf"), float("inf"))

    def wanted(self, pool_name: str) -> list[Worker]:
        """Return the pool's workers that shall stay, the oldest first."""
        return [worker for worker in self.workers.values() if worker.wanted and worker.pool.name == pool_name]

    def names(self, phase: Phase) -> frozenset[str]:
        """Return the names of the workers in a phase."""
        return frozenset(worker.name for worker in self.workers.values() if worker.phase is phase)

    def check_invariants(self) -> None:
        """Raise AssertionError for a worker whose state contradicts itself."""
        for name, worker in self.workers.items():
            assert worker.name == name and worker.spec.pool(worker.pool.name) == worker.pool
            assert 1 <= worker.revision <= self.revision
            assert (worker.ready_since is None) <= (worker.phase is not Phase.READY)
            assert worker.wanted or worker.phase is Phase.LEAVING, f"{name} isn't wanted, but {worker.phase}"
