"""Which workers a cluster shall have, which it has, and what follows of the difference. Pure: time is an argument.

    WAITING --Start--> STARTING --ready--> READY --Drain--> LEAVING --exit--> gone, or WAITING again
       ^                   |                 |
       '------ exit -------'------ exit -----'

The launcher tells what happened and carries out the actions. Scaling, draining and upgrades only change what is wanted,
so that a worker that dies in the middle of one is no special case. Each worker keeps the spec that it was started with:
one that dies is started again as it was, whatever an upgrade is doing to the others.
"""

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from splitserve.errors import ConfigError
from splitserve.orchestration.restarts import RestartPolicy, StartTimes
from splitserve.orchestration.spec import ClusterSpec, PoolSpec
from splitserve.orchestration.spec_contradictions import shared_settings
from splitserve.request import Role

KILL_GRACE_SECONDS = 10.0  # beyond the time that a draining worker gives itself, and that its host tier takes
MAX_WORKERS_PER_POOL = 4096


class Phase(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Worker:
    """``revision`` counts the specs of a cluster; ``spec`` is the one that this worker is started with.

    ``wanted``: it shall be there; when it ends, it is started again. ``due_at``: when a WAITING one is started.
    """

    name: str
    spec: ClusterSpec
    pool: PoolSpec
    revision: int
    due_at: float
    phase: Phase = Phase.WAITING
    wanted: bool = True
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    ready_since: float | None = None
    times: StartTimes = field(default_factory=StartTimes)
    kill_at: float = float("inf")
    num_restarts: int = 0
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    worker: Worker


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask it to finish its requests and to leave."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """It was asked, and had all the time that it may take."""

    name: str


Action = Start | Drain | Kill


class UpgradeState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Upgrade(msgspec.Struct):
    """Workers of older revisions are replaced one by one: ``old`` is the one whose turn it is.

    With room for one more, its successor starts first, under a name of its own; without, the old one leaves first and
    comes back under its name.
    """

    spec: ClusterSpec
    before: ClusterSpec
    num_workers: int
    state: UpgradeState = UpgradeState.RUNNING
    num_replaced: int = 0
    old: str = ""
    successor: str = ""
    problem: str = ""


class KnownWorker(msgspec.Struct, frozen=True):
    """A worker of a :class:`Snapshot`. ``is_leaving``: it was asked to go."""

    name: str
    revision: int
    wanted: bool
    is_leaving: bool
    num_restarts: int


class Snapshot(msgspec.Struct, frozen=True):
    """What a supervisor must remember to go on where another one ended. ``specs``: those of living revisions."""

    revision: int
    spec: ClusterSpec
    specs: dict[int, ClusterSpec]
    workers: list[KnownWorker]
    upgrade: Upgrade | None


class Supervisor:
    """``has_room(pool)`` says whether the machines can take one more worker of the pool now."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        restart: bool = True,
        has_room: Callable[[PoolSpec], bool] = lambda _pool: True,
        chosen: random.Random | None = None,
    ) -> None:
        self.spec = spec
        self.revision = 1
        self.workers: dict[str, Worker] = {}
        self.upgrade: Upgrade | None = None
        self._restart = restart
        self._has_room = has_room
        self.chosen = chosen or random.Random()

    # ---- what is wanted ----

    def want_all(self, now: float) -> None:
        """The workers that the spec counts."""
        for pool in self.spec.pools:
            for _ in range(pool.count):
                self._add(pool, now)

    def scale(self, pool_name: str, count: int, now: float) -> list[Action]:
        """Workers are added, or the youngest of the pool leave. Raises :class:`ConfigError`."""
        pool = self.spec.pool(pool_name)
        if not 0 <= count <= MAX_WORKERS_PER_POOL:
            raise ConfigError(f"{count} workers can't be: say 0 to {MAX_WORKERS_PER_POOL}")
        self._refuse_during_upgrade()
        present = self._wanted(pool_name)
        others = {worker.pool.role for worker in self.workers.values() if worker.wanted and worker not in present}
        if count == 0 and present and not _can_serve(others):
            raise ConfigError(f"without {pool_name} nobody could serve; use `splitserve down` to end the cluster")
        for _ in range(count - len(present)):
            self._add(pool, now)
        return self._dismiss(present[count:], now)

    def drain(self, name: str, now: float) -> list[Action]:
        """The worker finishes its requests and leaves for good. Raises :class:`ConfigError`."""
        worker = self.workers.get(name)
        if worker is None or not worker.wanted:
            known = ", ".join(sorted(worker.name for worker in self.workers.values() if worker.wanted))
            raise ConfigError(f"there is no worker {name!r} to drain; there are {known}")
        self._refuse_during_upgrade()
        remaining = {other.pool.role for other in self.workers.values() if other.wanted and other is not worker}
        if not _can_serve(remaining):
            raise ConfigError(f"without {name} nobody could serve; scale {worker.pool.name} up first")
        return self._dismiss([worker], now)

    def begin_upgrade(self, spec: ClusterSpec, now: float, *, allow_gap: bool = False) -> list[Action]:
        """Replace all workers, one by one, by ones of ``spec`` (which may be the present one, to get new code).

        Raises :class:`ConfigError` for a change that no rolling upgrade can make, and without ``allow_gap`` where the
        only worker of a pool would have to leave before its successor is there.
        """
        self._refuse_during_upgrade()
        _check_upgradable(self.spec, spec)
        for pool in spec.pools:
            if not allow_gap and len(self._wanted(pool.name)) == 1 and not self._has_room(pool):
                raise ConfigError(
                    f"there is no room for a successor beside the only worker of pool {pool.name}: requests would find "
                    "none for a while; scale the pool up first, or accept that with --allow-gap"
                )
        wanted = [worker for worker in self.workers.values() if worker.wanted]
        self.upgrade = Upgrade(spec, self.spec, len(wanted))
        self.spec = spec
        self.revision += 1
        return self._advance_upgrade(now)

    # ---- what happened ----

    def on_started(self, name: str) -> None:
        worker = self.workers[name]
        worker.phase, worker.ready_since = Phase.STARTING, None

    def on_placed(self, name: str, now: float) -> None:
        """A process of it runs; before :meth:`on_ready`."""
        worker = self.workers[name]
        if worker.phase is Phase.STARTING:
            worker.times = msgspec.structs.replace(worker.times, placed_at=now)

    def on_ready(self, name: str, now: float) -> list[Action]:
        worker = self.workers[name]
        if worker.phase is Phase.STARTING:
            worker.phase, worker.ready_since = Phase.READY, now
            worker.times = msgspec.structs.replace(worker.times, ready_at=now)
        return self._advance_upgrade(now)

    def on_leaving(self, name: str) -> None:
        """Somebody else has asked it to go: it's no longer ready, but wanted as before."""
        worker = self.workers[name]
        if worker.phase is not Phase.WAITING:
            worker.phase = Phase.LEAVING

    def on_exit(self, name: str, returncode: int, words: str, now: float) -> list[Action]:
        """It has ended, or couldn't be started (``returncode`` not 0). What becomes of it shows in :attr:`workers`."""
        worker = self.workers[name]
        seconds_ready = None if worker.ready_since is None else now - worker.ready_since
        worker.last_words, worker.times = words, StartTimes(lost_at=now)
        worker.phase, worker.ready_since, worker.kill_at = Phase.WAITING, None, float("inf")
        delay_seconds: float | None = None
        if worker.wanted and (self._restart or self._is_turn_of(name)):
            delay_seconds = worker.policy.on_death(seconds_ready, self.chosen) if returncode else 0.0
        if delay_seconds is None:
            del self.workers[name]
        else:
            worker.due_at = now + delay_seconds
            worker.num_restarts += 1
        return self._advance_upgrade(now, just_ended=name, failed=returncode != 0)

    def poll(self, now: float) -> list[Action]:
        """What is due."""
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
        """When :meth:`poll` may have something to do although nothing happens."""
        waiting = (worker.due_at for worker in self.workers.values() if worker.phase is Phase.WAITING)
        leaving = (worker.kill_at for worker in self.workers.values() if worker.phase is Phase.LEAVING)
        return min(*waiting, *leaving, float("inf"), float("inf"))

    # ---- what is known ----

    def snapshot(self) -> Snapshot:
        return Snapshot(
            revision=self.revision,
            spec=self.spec,
            specs={worker.revision: worker.spec for worker in self.workers.values()},
            workers=[
                KnownWorker(
                    worker.name, worker.revision, worker.wanted, worker.phase is Phase.LEAVING, worker.num_restarts
                )
                for worker in self.workers.values()
            ],
            upgrade=self.upgrade,
        )

    def restore(self, snapshot: Snapshot, running: Collection[str], now: float) -> None:
        """Go on from ``snapshot``. Workers that are ``running`` count as starting until they are heard of again; the
        others are started anew, if they are wanted."""
        self.spec, self.revision, self.upgrade = snapshot.spec, snapshot.revision, snapshot.upgrade
        for known in snapshot.workers:
            if known.name not in running and not known.wanted:
                continue
            spec = snapshot.specs[known.revision]
            pool = next(pool for pool in spec.pools if known.name.rpartition("-")[0] == pool.name)
            worker = Worker(known.name, spec, pool, known.revision, now, wanted=known.wanted)
            worker.num_restarts = known.num_restarts
            if known.name in running:
                worker.phase, worker.due_at = Phase.STARTING, float("inf")
                if known.is_leaving:
                    self._ask_to_leave(worker, now)  # it knows already: a second signal would end it at once
            self.workers[known.name] = worker

    def names(self, phase: Phase) -> frozenset[str]:
        return frozenset(worker.name for worker in self.workers.values() if worker.phase is phase)

    def check_invariants(self) -> None:
        for name, worker in self.workers.items():
            assert worker.name == name and worker.spec.pool(worker.pool.name) == worker.pool
            assert 1 <= worker.revision <= self.revision
            assert (worker.ready_since is None) <= (worker.phase is not Phase.READY)
            assert worker.wanted or worker.phase is Phase.LEAVING, f"{name} isn't wanted, but {worker.phase}"

    # ---- inside ----

    def _wanted(self, pool_name: str) -> list[Worker]:
        """The pool's workers that shall stay, the oldest first."""
        return [worker for worker in self.workers.values() if worker.wanted and worker.pool.name == pool_name]

    def _add(self, pool: PoolSpec, now: float) -> Worker:
        index = next(i for i in range(2 * MAX_WORKERS_PER_POOL) if f"{pool.name}-{i}" not in self.workers)
        worker = Worker(f"{pool.name}-{index}", self.spec, pool, self.revision, now)
        self.workers[worker.name] = worker
        return worker

    def _dismiss(self, workers: Iterable[Worker], now: float) -> list[Action]:
        """They shall go: those that run are asked, the others are forgotten."""
        actions: list[Action] = []
        for worker in workers:
            worker.wanted = False
            if worker.phase is Phase.WAITING:
                del self.workers[worker.name]
            else:
                actions.append(self._ask_to_leave(worker, now))
        return actions

    def _ask_to_leave(self, worker: Worker, now: float) -> Action:
        worker.phase = Phase.LEAVING
        grace = worker.spec.protocol_config().drain_seconds + worker.spec.give_back_seconds()
        worker.kill_at = now + grace + KILL_GRACE_SECONDS
        return Drain(worker.name)

    def _refuse_during_upgrade(self) -> None:
        if self.upgrade is not None and self.upgrade.state is UpgradeState.RUNNING:
            done, total = self.upgrade.num_replaced, self.upgrade.num_workers
            raise ConfigError(f"an upgrade is under way ({done} of {total} workers replaced): wait for its end")

    def _is_turn_of(self, name: str) -> bool:
        upgrade = self.upgrade
        return upgrade is not None and upgrade.state is UpgradeState.RUNNING and name == upgrade.old

    def _advance_upgrade(self, now: float, *, just_ended: str = "", failed: bool = False) -> list[Action]:
        upgrade = self.upgrade
        if upgrade is None or upgrade.state is not UpgradeState.RUNNING:
            return []
        if just_ended and just_ended == upgrade.successor and failed:
            return self._fail_upgrade(upgrade, just_ended, now)
        if upgrade.old and not upgrade.successor:  # it leaves to make room
            if just_ended == upgrade.old:
                self._come_back_new(upgrade, now)
            return []
        if upgrade.successor:
            successor = self.workers.get(upgrade.successor)
            if successor is None or successor.phase is not Phase.READY:
                return []
            old = self.workers.get(upgrade.old) if upgrade.old != upgrade.successor else None
            if old is not None and old.wanted:
                actions = self._dismiss([old], now)
                return actions or self._finish_turn(upgrade, now)  # no actions: it wasn't even running
            if old is not None:
                return []  # it is leaving
        return self._finish_turn(upgrade, now) if upgrade.successor else self._next_turn(upgrade, now)

    def _finish_turn(self, upgrade: Upgrade, now: float) -> list[Action]:
        upgrade.num_replaced += 1
        upgrade.old = upgrade.successor = ""
        return self._next_turn(upgrade, now)

    def _next_turn(self, upgrade: Upgrade, now: float) -> list[Action]:
        old = next((w for w in self.workers.values() if w.wanted and w.revision < self.revision), None)
        if old is None:
            upgrade.state = UpgradeState.DONE
            return []
        upgrade.old = old.name
        pool = self.spec.pool(old.pool.name)
        if self._has_room(pool):
            upgrade.successor = self._add(pool, now).name
            return []
        if old.phase is Phase.WAITING:
            self._come_back_new(upgrade, now)
            return []
        return [] if old.phase is Phase.LEAVING else [self._ask_to_leave(old, now)]

    def _come_back_new(self, upgrade: Upgrade, now: float) -> None:
        """The old one has left to make room: its name stands for its successor from now on."""
        worker = self.workers[upgrade.old]
        worker.spec, worker.pool = self.spec, self.spec.pool(worker.pool.name)
        worker.revision, worker.due_at, worker.policy = self.revision, now, RestartPolicy()
        upgrade.successor = worker.name

    def _fail_upgrade(self, upgrade: Upgrade, name: str, now: float) -> list[Action]:
        """The others stay as they are, and the spec is what it was before."""
        worker = self.workers.get(name)
        upgrade.state = UpgradeState.FAILED
        upgrade.problem = f"{name}: {worker.last_words if worker else 'it ended'}"
        self.spec = upgrade.before
        self.revision += 1  # the same as before the upgrade, but not the same as that of those it has replaced
        if worker is None:
            return []
        if upgrade.old == name:  # its predecessor had to make room: back to what worked
            worker.spec, worker.pool = self.spec, self.spec.pool(worker.pool.name)
            worker.revision = self.revision
            worker.due_at, worker.policy = now, RestartPolicy()
            return []
        return self._dismiss([worker], now)


def _can_serve(roles: Collection[str]) -> bool:
    return Role.MIXED in roles or {Role.PREFILL, Role.DECODE} <= set(roles)


def _check_upgradable(before: ClusterSpec, after: ClusterSpec) -> None:
    """Raise :class:`ConfigError` for what workers of two revisions side by side must agree on, or what isn't theirs."""
    old_roles = {pool.name: pool.role for pool in before.pools}
    new_roles = {pool.name: pool.role for pool in after.pools}
    if old_roles != new_roles:
        raise ConfigError(
            f"an upgrade keeps pools and roles ({_listed(old_roles)}), the new spec has {_listed(new_roles)}: "
            "take the cluster down and up again"
        )
    for part in ("model", "router", "network", "lmcache", "objectives", "secrets", "devices", "protocol"):
        if getattr(before, part) != getattr(after, part):
            raise ConfigError(
                f"{part} differs from the running cluster's: an upgrade changes pools, engine and connector; "
                "take the cluster down and up again"
            )
    now = shared_settings(before, before.pools[0])
    for place, wanted in shared_settings(after, after.pools[0]).items():
        if wanted != now[place]:
            raise ConfigError(
                f"{place} is {wanted or 'not set'}, the running cluster's {now[place] or 'not set'}: workers of both "
                "would exchange KV; take the cluster down and up again"
            )


def _listed(roles: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {role}" for name, role in roles.items())
