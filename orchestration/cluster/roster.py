"""Workers of a cluster by name: those that run and those that are to be started. Pure: time is an argument."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from splitserve.orchestration.cluster.restarts import RestartPolicy, StartTimes
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec

KILL_GRACE_SECONDS = 10.0  # beyond the drain time of a worker, and the time in which its host tier is freed
MAX_WORKERS_PER_POOL = 4096


class WorkerPhase(StrEnum):
    """Phase of a worker's process; :mod:`.supervision` has the transitions."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Worker:
    """Worker that runs or is to be started."""

    name: str
    spec: ClusterSpec  # its spec when it was started
    pool: PoolSpec
    revision: int  # number of that spec among those of the cluster
    due_at: float  # time of its start while WAITING
    phase: WorkerPhase = WorkerPhase.WAITING
    wanted: bool = True  # whether it is started again when it ends
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
    """Order to kill a worker that was asked to leave and has exceeded its time to do so."""

    name: str


Action = Start | Drain | Kill


class Roster:
    """Workers by name, and the spec of new workers with its number, ``revision``."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.revision = 1
        self.workers: dict[str, Worker] = {}

    def add(self, pool: PoolSpec, now: float) -> Worker:
        """Add a worker of a pool under the first free name, due at once."""
        index = next(i for i in range(2 * MAX_WORKERS_PER_POOL) if f"{pool.name}-{i}" not in self.workers)
        worker = Worker(f"{pool.name}-{index}", self.spec, pool, self.revision, now)
        self.workers[worker.name] = worker
        return worker

    def renew(self, worker: Worker, now: float) -> None:
        """Give a WAITING worker the present spec, and start it at once, whatever the reason of its last death."""
        worker.spec, worker.pool = self.spec, self.spec.pool(worker.pool.name)
        worker.revision, worker.due_at, worker.policy = self.revision, now, RestartPolicy()

    def dismiss(self, workers: Iterable[Worker], now: float) -> list[Action]:
        """Stop wanting some workers: those that run are asked to leave, the others are forgotten."""
        actions: list[Action] = []
        for worker in workers:
            worker.wanted = False
            if worker.phase is WorkerPhase.WAITING:
                del self.workers[worker.name]
            else:
                actions.append(self.ask_to_leave(worker, now))
        return actions

    def ask_to_leave(self, worker: Worker, now: float) -> Action:
        """Have a worker drain, and killed if that takes too long."""
        worker.phase = WorkerPhase.LEAVING
        grace = worker.spec.protocol_config().drain_seconds + worker.spec.give_back_seconds()
        worker.kill_at = now + grace + KILL_GRACE_SECONDS
        return Drain(worker.name)

    def poll(self, now: float) -> list[Action]:
        """Return the starts and kills that are due."""
        actions: list[Action] = []
        for worker in self.workers.values():
            if worker.phase is WorkerPhase.WAITING and worker.due_at <= now:
                worker.due_at = float("inf")  # until the launcher reports the result of the start
                worker.times = StartTimes(worker.times.lost_at, asked_at=now)
                actions.append(Start(worker))
            elif worker.phase is WorkerPhase.LEAVING and worker.kill_at <= now:
                worker.kill_at = float("inf")
                actions.append(Kill(worker.name))
        return actions

    def next_due(self) -> float:
        """Return the time at which :meth:`poll` may have something to do although no event has happened."""
        waiting = (worker.due_at for worker in self.workers.values() if worker.phase is WorkerPhase.WAITING)
        leaving = (worker.kill_at for worker in self.workers.values() if worker.phase is WorkerPhase.LEAVING)
        return min(*waiting, *leaving, float("inf"), float("inf"))

    def wanted(self, pool_name: str) -> list[Worker]:
        """Return the pool's workers that should stay, the oldest first."""
        return [worker for worker in self.workers.values() if worker.wanted and worker.pool.name == pool_name]

    def names(self, phase: WorkerPhase) -> frozenset[str]:
        """Return the names of the workers in a phase."""
        return frozenset(worker.name for worker in self.workers.values() if worker.phase is phase)

    def check_invariants(self) -> None:
        """Raise AssertionError for a worker whose state contradicts itself."""
        for name, worker in self.workers.items():
            assert worker.name == name and worker.spec.pool(worker.pool.name) == worker.pool
            assert 1 <= worker.revision <= self.revision
            assert (worker.ready_since is None) <= (worker.phase is not WorkerPhase.READY)
            assert worker.wanted or worker.phase is WorkerPhase.LEAVING, f"{name} isn't wanted, but {worker.phase}"
