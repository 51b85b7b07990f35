"""Rolling upgrades: workers of older revisions are replaced one by one. Pure: time is an argument."""

from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cluster.roster import Action, Roster, WorkerPhase
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec
from splitserve.orchestration.spec.contradictions import shared_settings


class UpgradeState(StrEnum):
    """State of the last upgrade."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Upgrade(msgspec.Struct):
    """Upgrade of a cluster, which replaces its workers one by one.

    With room for one more worker, a successor starts first, under a name of its own; otherwise the old worker leaves
    first and is started again under its name.
    """

    spec: ClusterSpec
    before: ClusterSpec
    num_workers: int
    state: UpgradeState = UpgradeState.RUNNING
    num_replaced: int = 0
    old: str = ""  # worker that is being replaced; "" between two workers
    successor: str = ""
    problem: str = ""


class RollingUpgrade:
    """Upgrade of a roster's workers. ``has_room(pool)`` returns whether the machines can take one more worker of the
    pool now."""

    def __init__(self, roster: Roster, has_room: Callable[[PoolSpec], bool]) -> None:
        self.upgrade: Upgrade | None = None  # the last one; None before the first
        self._roster = roster
        self._has_room = has_room

    @property
    def running(self) -> Upgrade | None:
        """The upgrade in progress."""
        is_running = self.upgrade is not None and self.upgrade.state is UpgradeState.RUNNING
        return self.upgrade if is_running else None

    def refuse_during_upgrade(self) -> None:
        """Raise :class:`ConfigError` while an upgrade is in progress."""
        if (upgrade := self.running) is not None:
            done, total = upgrade.num_replaced, upgrade.num_workers
            raise ConfigError(f"an upgrade is in progress ({done} of {total} workers replaced): wait for its end")

    def is_turn_of(self, name: str) -> bool:
        """Return whether a worker is the one that is being replaced, or its successor."""
        return self.running is not None and name in (self.running.old, self.running.successor)

    def makes_room(self, name: str) -> bool:
        """Return whether a worker has been asked to leave so that its successor can start under its name."""
        return self.running is not None and name == self.running.old and not self.running.successor

    def begin(self, spec: ClusterSpec, now: float, *, allow_gap: bool) -> list[Action]:
        """Begin to replace all workers; see :meth:`.Supervisor.begin_upgrade`."""
        self.refuse_during_upgrade()
        roster = self._roster
        _check_upgradable(roster.spec, spec)
        for pool in spec.pools:
            if not allow_gap and len(roster.wanted(pool.name)) == 1 and not self._has_room(pool):
                raise ConfigError(
                    f"there is no room for a successor beside the only worker of pool {pool.name}: requests would find "
                    "none for a while; scale the pool up first, or accept that with --allow-gap"
                )
        num_wanted = sum(worker.wanted for worker in roster.workers.values())
        self.upgrade = Upgrade(spec, roster.spec, num_wanted)
        roster.spec = spec
        roster.revision += 1
        return self.advance(now)

    def advance(self, now: float, *, just_ended: str = "", failed: bool = False) -> list[Action]:
        """Continue after an event: a worker became ready, or ``just_ended``, which counts as ``failed`` unless its exit
        status was 0."""
        upgrade = self.running
        if upgrade is None:
            return []
        is_gone = bool(upgrade.successor) and upgrade.successor not in self._roster.workers  # an operator drained it
        if is_gone or (failed and just_ended == upgrade.successor):
            return self._fail(upgrade, upgrade.successor, now)
        if upgrade.old and not upgrade.successor:  # it leaves to make room
            if just_ended == upgrade.old:
                self._come_back_new(upgrade, now)
            return []
        if upgrade.successor:
            workers = self._roster.workers
            successor = workers.get(upgrade.successor)
            if successor is None or successor.phase is not WorkerPhase.READY:
                return []
            old = workers.get(upgrade.old) if upgrade.old != upgrade.successor else None
            if old is not None and old.wanted:
                actions = self._roster.dismiss([old], now)
                return actions or self._finish_turn(upgrade, now)  # no actions: the worker wasn't even running
            if old is not None:
                return []  # it is leaving
        return self._finish_turn(upgrade, now) if upgrade.successor else self._next_turn(upgrade, now)

    def resume(self, now: float) -> None:
        """Continue under another supervisor: an old worker that was asked to make room may have left meanwhile."""
        upgrade = self.running
        if upgrade is None or not upgrade.old or upgrade.successor:
            return
        old = self._roster.workers.get(upgrade.old)
        if old is None:  # an operator drained it: the next event begins the next turn
            upgrade.old = ""
        elif old.phase is WorkerPhase.WAITING:
            self._come_back_new(upgrade, now)

    def _finish_turn(self, upgrade: Upgrade, now: float) -> list[Action]:
        upgrade.num_replaced += 1
        upgrade.old = upgrade.successor = ""
        return self._next_turn(upgrade, now)

    def _next_turn(self, upgrade: Upgrade, now: float) -> list[Action]:
        roster = self._roster
        old = next((w for w in roster.workers.values() if w.wanted and w.revision < roster.revision), None)
        if old is None:
            upgrade.state = UpgradeState.DONE
            return []
        upgrade.old = old.name
        pool = roster.spec.pool(old.pool.name)
        if self._has_room(pool):
            upgrade.successor = roster.add(pool, now).name
            return []
        if old.phase is WorkerPhase.WAITING:
            self._come_back_new(upgrade, now)
            return []
        return [] if old.phase is WorkerPhase.LEAVING else [roster.ask_to_leave(old, now)]

    def _come_back_new(self, upgrade: Upgrade, now: float) -> None:
        """Let the name of the old worker, which has left to make room, denote its successor."""
        worker = self._roster.workers[upgrade.old]
        self._roster.renew(worker, now)
        upgrade.successor = worker.name

    def _fail(self, upgrade: Upgrade, name: str, now: float) -> list[Action]:
        """Return to the spec from before the upgrade; workers other than the one that failed stay as they are."""
        roster = self._roster
        worker = roster.workers.get(name)
        upgrade.state = UpgradeState.FAILED
        upgrade.problem = f"{name}: {worker.last_words if worker else 'it left for good before its turn was over'}"
        roster.spec = upgrade.before
        # The spec is the one from before the upgrade, but its number must differ from that of the replaced workers.
        roster.revision += 1
        if worker is None:
            return []
        old = roster.workers.get(upgrade.old)
        if old is not None and old is not worker and old.wanted:
            return roster.dismiss([worker], now)
        roster.renew(worker, now)  # the old worker leaves or has left: start another in its place, with the old spec
        return []


def _check_upgradable(before: ClusterSpec, after: ClusterSpec) -> None:
    """Raise :class:`ConfigError` for a change that an upgrade can't make: in a setting on which workers of both
    revisions must agree, or in one that isn't the workers'."""
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
    for location, wanted in shared_settings(after, after.pools[0]).items():
        if wanted != now[location]:
            raise ConfigError(
                f"{location} is {wanted or 'not set'}, the running cluster's {now[location] or 'not set'}: workers of "
                "both would exchange KV; take the cluster down and up again"
            )


def _listed(roles: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {role}" for name, role in roles.items())
