"""Supervision of a cluster's workers: the wanted ones, the present ones, and the actions that follow from the
difference. Pure: time is an argument.

    WAITING --Start--> STARTING --ready--> READY --Drain--> LEAVING --exit--> gone, or WAITING again
       ^                   |                 |
       '------ exit -------'------ exit -----'

The launcher reports events and carries out the actions. Scaling, draining and upgrades only change which workers are
wanted, so that a worker that dies in the middle of one is no special case. Each worker keeps the spec that it was
started with: one that dies is started again as it was, whatever an upgrade is doing to the others.
"""

import random
from collections.abc import Callable, Collection

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cluster.restarts import AbandonedWorker, StartTimes
from splitserve.orchestration.cluster.rolling_upgrade import RollingUpgrade, Upgrade
from splitserve.orchestration.cluster.roster import MAX_WORKERS_PER_POOL, Action, Roster, Worker, WorkerPhase
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec
from splitserve.protocol.request import Role


class KnownWorker(msgspec.Struct, frozen=True):
    """Worker of a :class:`Snapshot`."""

    name: str
    revision: int
    wanted: bool
    is_leaving: bool  # it was asked to leave
    num_restarts: int


class Snapshot(msgspec.Struct, frozen=True):
    """State from which another supervisor continues."""

    revision: int
    spec: ClusterSpec
    specs: dict[int, ClusterSpec]  # specs of revisions that still have workers
    workers: list[KnownWorker]
    upgrade: Upgrade | None


class Supervisor:
    """Supervisor of a cluster's workers. ``has_room(pool)`` returns whether the machines can take one more worker of
    the pool now."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        restart: bool = True,
        has_room: Callable[[PoolSpec], bool] = lambda _pool: True,
        chosen: random.Random | None = None,
    ) -> None:
        self._roster = Roster(spec)
        self._upgrades = RollingUpgrade(self._roster, has_room)
        self._restart = restart
        self._chosen = chosen or random.Random()
        self._abandoned: dict[str, AbandonedWorker] = {}

    @property
    def spec(self) -> ClusterSpec:
        """Spec of new workers."""
        return self._roster.spec

    @property
    def revision(self) -> int:
        """Number of :attr:`spec` among the specs of the cluster."""
        return self._roster.revision

    @property
    def workers(self) -> dict[str, Worker]:
        """Workers by name."""
        return self._roster.workers

    @property
    def upgrade(self) -> Upgrade | None:
        """Last upgrade; None before the first."""
        return self._upgrades.upgrade

    @property
    def abandoned(self) -> list[AbandonedWorker]:
        """Workers that ended and aren't started again, although no operator has dismissed them."""
        return [each for name, each in self._abandoned.items() if name not in self.workers]

    # ---- what is wanted ----

    def want_all(self, now: float) -> None:
        """Want as many workers as the spec counts."""
        for pool in self.spec.pools:
            for _ in range(pool.count):
                self._roster.add(pool, now)

    def scale(self, pool_name: str, count: int, now: float) -> list[Action]:
        """Add workers, or have the youngest of the pool leave. Raises :class:`ConfigError`."""
        pool = self.spec.pool(pool_name)
        if not 0 <= count <= MAX_WORKERS_PER_POOL:
            raise ConfigError(f"the number of workers must be between 0 and {MAX_WORKERS_PER_POOL}, got {count}")
        self._upgrades.refuse_during_upgrade()
        present = self._roster.wanted(pool_name)
        others = {worker.pool.role for worker in self.workers.values() if worker.wanted and worker not in present}
        if count == 0 and present and not _can_serve(others):
            raise ConfigError(f"without {pool_name} the cluster couldn't serve; use `splitserve down` to end it")
        for _ in range(count - len(present)):
            self._roster.add(pool, now)
        self._abandoned = {name: each for name, each in self._abandoned.items() if each.pool != pool_name}
        return self._roster.dismiss(present[count:], now)

    def drain(self, name: str, now: float, *, force: bool = False) -> list[Action]:
        """Have a worker finish its requests and leave for good; the last one of its role only with ``force``. Raises
        :class:`ConfigError`."""
        worker = self.workers.get(name)
        if worker is None or not worker.wanted:
            known = ", ".join(sorted(worker.name for worker in self.workers.values() if worker.wanted))
            raise ConfigError(f"there is no worker {name!r} to drain; there are {known}")
        self._upgrades.refuse_during_upgrade()
        remaining = {other.pool.role for other in self.workers.values() if other.wanted and other is not worker}
        if worker.pool.role not in remaining and not force:
            consequence = "" if _can_serve(remaining) else ": without it the cluster couldn't serve"
            reason = f"{name} is the last {worker.pool.role} worker{consequence}"
            raise ConfigError(f"{reason}; scale {worker.pool.name} up first, or give --force")
        return self._roster.dismiss([worker], now)

    def begin_upgrade(self, spec: ClusterSpec, now: float, *, allow_gap: bool = False) -> list[Action]:
        """Replace all workers, one by one, by ones of ``spec`` (which may be the present one, to get new code).

        Raises :class:`ConfigError` for a change that no rolling upgrade can make, and without ``allow_gap`` if the only
        worker of a pool would have to leave before its successor is ready.
        """
        return self._upgrades.begin(spec, now, allow_gap=allow_gap)

    # ---- what happened ----

    def on_started(self, name: str) -> None:
        worker = self.workers[name]
        worker.phase, worker.ready_since = WorkerPhase.STARTING, None

    def on_placed(self, name: str, now: float) -> None:
        """Note that a process of the worker runs; called before :meth:`on_ready`."""
        worker = self.workers[name]
        if worker.phase is WorkerPhase.STARTING:
            worker.times = msgspec.structs.replace(worker.times, placed_at=now)

    def on_ready(self, name: str, now: float) -> list[Action]:
        worker = self.workers[name]
        if worker.phase is WorkerPhase.STARTING:
            worker.phase, worker.ready_since = WorkerPhase.READY, now
            worker.times = msgspec.structs.replace(worker.times, ready_at=now)
        return self._upgrades.advance(now)

    def on_leaving(self, name: str) -> None:
        """Note that a signal asked the worker to leave: it is no longer ready, but wanted as before."""
        worker = self.workers[name]
        if worker.phase is not WorkerPhase.WAITING:
            worker.phase = WorkerPhase.LEAVING

    def on_dismissed(self, name: str, now: float) -> None:
        """Note that an operator has asked the worker itself to leave: it isn't wanted any more."""
        worker = self.workers[name]
        if worker.wanted and worker.phase in (WorkerPhase.STARTING, WorkerPhase.READY):
            worker.wanted = False
            self._roster.ask_to_leave(worker, now)  # it was asked already

    def on_exit(self, name: str, returncode: int, words: str, now: float) -> list[Action]:
        """Note that a worker ended, or couldn't be started (``returncode`` not 0); :attr:`workers` shows what
        follows."""
        worker = self.workers[name]
        seconds_ready = None if worker.ready_since is None else now - worker.ready_since
        worker.last_words, worker.times = words, StartTimes(lost_at=now)
        worker.phase, worker.ready_since, worker.kill_at = WorkerPhase.WAITING, None, float("inf")
        delay_seconds: float | None = None
        if worker.wanted and (self._restart or self._upgrades.is_turn_of(name)):
            delay_seconds = worker.policy.on_death(seconds_ready, self._chosen) if returncode else 0.0
            if self._upgrades.makes_room(name):
                delay_seconds = 0.0  # its successor starts in its place, however often it died
        if delay_seconds is None:
            del self.workers[name]
            if worker.wanted:
                self._abandoned[name] = AbandonedWorker(name, worker.pool.name, words)
        else:
            worker.due_at = now + delay_seconds
            worker.num_restarts += 1
        return self._upgrades.advance(now, just_ended=name, failed=returncode != 0)

    def poll(self, now: float) -> list[Action]:
        """Return the starts and kills that are due."""
        return self._roster.poll(now)

    def next_due(self) -> float:
        """Return the time at which :meth:`poll` may have something to do although no event has happened."""
        return self._roster.next_due()

    # ---- what is known ----

    def snapshot(self) -> Snapshot:
        return Snapshot(
            revision=self.revision,
            spec=self.spec,
            specs={worker.revision: worker.spec for worker in self.workers.values()},
            workers=[
                KnownWorker(
                    worker.name,
                    worker.revision,
                    worker.wanted,
                    worker.phase is WorkerPhase.LEAVING,
                    worker.num_restarts,
                )
                for worker in self.workers.values()
            ],
            upgrade=self.upgrade,
        )

    def restore(self, snapshot: Snapshot, running: Collection[str], now: float) -> None:
        """Continue from ``snapshot``. Workers that are ``running`` count as starting until their next event; the others
        are started again if they are wanted."""
        self._roster.spec, self._roster.revision = snapshot.spec, snapshot.revision
        self._upgrades.upgrade = snapshot.upgrade
        for known in snapshot.workers:
            if known.name not in running and not known.wanted:
                continue
            spec = snapshot.specs[known.revision]
            pool = next(pool for pool in spec.pools if known.name.rpartition("-")[0] == pool.name)
            worker = Worker(known.name, spec, pool, known.revision, now, wanted=known.wanted)
            worker.num_restarts = known.num_restarts
            if known.name in running:
                worker.phase, worker.due_at = WorkerPhase.STARTING, float("inf")
                if known.is_leaving:
                    # The action is dropped: the worker was asked already, and a second signal would end it at once.
                    self._roster.ask_to_leave(worker, now)
            self.workers[known.name] = worker
        self._upgrades.resume(now)

    def names(self, phase: WorkerPhase) -> frozenset[str]:
        """Return the names of the workers in a phase."""
        return self._roster.names(phase)

    def check_invariants(self) -> None:
        """Raise AssertionError for a worker whose state contradicts itself."""
        self._roster.check_invariants()


def _can_serve(roles: Collection[str]) -> bool:
    return Role.MIXED in roles or {Role.PREFILL, Role.DECODE} <= set(roles)
