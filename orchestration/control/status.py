"""Status of a cluster, from the state of its supervisor and its running processes."""

import time
from collections.abc import Mapping

from splitserve import __version__
from splitserve.orchestration.cluster.host import Child
from splitserve.orchestration.cluster.rolling_upgrade import Upgrade
from splitserve.orchestration.cluster.roster import Worker, WorkerPhase
from splitserve.orchestration.cluster.router_keeper import Routers
from splitserve.orchestration.cluster.supervision import Supervisor
from splitserve.orchestration.control.requests import ClusterStatus, ProcessStatus, UpgradeStatus
from splitserve.orchestration.lmcache.keeper import LMCacheKeeper, ServerState
from splitserve.orchestration.spec.expansion import ROUTER, router_names


def cluster_status(
    state: str,
    routers: Routers,
    supervisor: Supervisor,
    lmcache: LMCacheKeeper,
    children: Mapping[str, Child],
    *,
    now: float,
) -> ClusterStatus:
    """Return a cluster's status. ``children`` by name, including the router; ``now`` on the monotonic clock, like all
    times of ``routers``, ``supervisor`` and ``lmcache``."""
    counts = {pool.name: 0 for pool in supervisor.spec.pools}
    for worker in supervisor.workers.values():
        counts[worker.pool.name] += worker.wanted
    return ClusterStatus(
        name=supervisor.spec.name,
        version=__version__,
        state=state,
        model=supervisor.spec.served_model_name,
        url=routers.url,
        revision=supervisor.revision,
        counts=counts,
        router=_router_status(ROUTER, children, routers, now),
        more_routers=[_router_status(name, children, routers, now) for name in router_names(supervisor.spec)[1:]],
        workers=[_worker_status(worker, children.get(worker.name), now) for worker in supervisor.workers.values()],
        lmcache=[_server_status(server, children.get(server.name)) for server in lmcache.states(now)],
        upgrade=None if supervisor.upgrade is None else _upgrade_status(supervisor.upgrade),
        abandoned=supervisor.abandoned,
    )


def _router_status(name: str, children: Mapping[str, Child], routers: Routers, now: float) -> ProcessStatus:
    router, keeper = children.get(name), routers.keepers[name]
    since = keeper.listening_since
    phase = WorkerPhase.STARTING if since is None else WorkerPhase.READY
    return ProcessStatus(
        name=name,
        phase=WorkerPhase.WAITING if keeper.is_due_some_time else phase,
        pid=router.pid if router else 0,
        runs_on=router.runs_on if router else "",
        num_restarts=keeper.num_restarts,
        seconds_ready=None if since is None else now - since,
        last_words=keeper.last_words,
        due_in_seconds=max(0.0, keeper.due_at - now) if keeper.is_due_some_time else None,
    )


def _worker_status(worker: Worker, child: Child | None, now: float) -> ProcessStatus:
    return ProcessStatus(
        name=worker.name,
        pool=worker.pool.name,
        role=worker.pool.role,
        phase=worker.phase,
        pid=child.pid if child else 0,
        runs_on=child.runs_on if child else "",
        revision=worker.revision,
        num_restarts=worker.num_restarts,
        seconds_ready=None if worker.ready_since is None else now - worker.ready_since,
        wanted=worker.wanted,
        last_words=worker.last_words,
        due_in_seconds=max(0.0, worker.due_at - now) if now < worker.due_at < float("inf") else None,
        times=worker.times.moved(time.time() - now),
    )


def _server_status(server: ServerState, child: Child | None) -> ProcessStatus:
    phase = WorkerPhase.WAITING if child is None else WorkerPhase.STARTING
    return ProcessStatus(
        name=server.name,
        phase=phase if server.seconds_ready is None else WorkerPhase.READY,
        pid=child.pid if child else 0,
        runs_on=child.runs_on if child else "",
        seconds_ready=server.seconds_ready,
        due_in_seconds=server.due_in_seconds,
    )


def _upgrade_status(upgrade: Upgrade) -> UpgradeStatus:
    return UpgradeStatus(
        state=upgrade.state,
        num_replaced=upgrade.num_replaced,
        num_workers=upgrade.num_workers,
        problem=upgrade.problem,
    )
