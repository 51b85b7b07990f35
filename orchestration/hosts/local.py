"""Host of processes on this machine: children of this process, each with a share of its cores and GPUs."""

import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from splitserve.common.cores import available_cores, split_cores, usable_cpus
from splitserve.common.listening import listen
from splitserve.common.security import check_exposure
from splitserve.orchestration.cluster.host import LMCACHE, ChildProgress, Event, Memory
from splitserve.orchestration.hosts.addresses import LOOPBACK, free_port, hold_port, own_address, port_of, zmq_endpoint
from splitserve.orchestration.hosts.core_plan import WorkerPlan, plan_workers, wanted_affinity
from splitserve.orchestration.hosts.forking import can_fork, fork_server
from splitserve.orchestration.hosts.gpus import VISIBLE, Gpu, GpuAssignment, check_enough_gpus, device_of, list_gpus
from splitserve.orchestration.hosts.process import ChildProcess, child_environment
from splitserve.orchestration.hosts.shared_memory import remove_abandoned
from splitserve.orchestration.hosts.topology import Topology, read_topology
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec
from splitserve.orchestration.spec.expansion import (
    RouterPorts,
    Secrets,
    resolve_secrets,
    router_config,
    router_names,
    worker_config,
    worker_environment,
    worker_names,
)


@dataclass(frozen=True)
class Entries:
    """Entries of the processes, as ``module:function`` (see :class:`splitserve.orchestration.hosts.child.Order`)."""

    router: str = "splitserve.router.server:run_router"
    worker: str = "splitserve.worker.entry:run_worker"
    lmcache: str = "splitserve.orchestration.lmcache.server:run_lmcache"


ENTRIES = Entries()
_log = logging.getLogger(__name__)

FORK_RANKS = "splitserve.worker.ranks.forks:fork_ranks"
"""Entry that a worker calls that a fork server starts: see :attr:`splitserve.orchestration.hosts.child.Order.forks`."""
BEGIN_ON_GPU = "splitserve.worker.start.early:begin_on_gpu"
"""Entry that a worker on GPUs calls first: see :attr:`splitserve.orchestration.hosts.child.Order.early`."""


def _module_of(entry: str, known: str) -> str:
    """Return the module of ``entry`` for a fork server to import; "" if it isn't the ``known`` one."""
    return entry.partition(":")[0] if entry == known else ""


@dataclass(slots=True)
class _Slot:
    """Planned cores for a worker of ``pool``. A successor shares them while its predecessor still drains."""

    plan: WorkerPlan
    pool: PoolSpec
    holders: set[str] = field(default_factory=set)
    taken_at: int = 0

    def suits(self, pool: PoolSpec) -> bool:
        """Return whether a worker of ``pool`` may have the cores: another pool's only if neither names its own."""
        is_alike = self.pool.affinity == pool.affinity and not pool.affinity.cores
        return self.pool.name == pool.name or is_alike


class LocalHost:
    """Host of processes on this machine; see :class:`splitserve.orchestration.cluster.host.Host`. Call it from one
    thread.

    ``environment`` is added to the children's own. With a ``log_folder`` each process logs to a file in it.
    ``topology``: None reads the machine's.
    """

    def __init__(
        self,
        *,
        log_level: str = "info",
        entries: Entries = ENTRIES,
        num_cores: int | None = None,
        environment: Mapping[str, str] | None = None,
        log_folder: Path | None = None,
        topology: Topology | None = None,
    ) -> None:
        self._log_level = log_level
        self._entries = entries
        self._num_cores = available_cores() if num_cores is None else num_cores
        self._environment = dict(environment or {})
        self._log_folder = log_folder
        self._topology = topology
        self._secrets = Secrets()
        self._address = LOOPBACK
        self._gpus = GpuAssignment([])
        self._names: dict[str, None] = {}  # running workers in the order of their starts
        self._threads: dict[str, int] = {}  # a worker that is started again gets the same number as before
        self._slots: list[_Slot] = []
        self._num_starts = 0
        self._lmcache_port = 0
        self._listener: socket.socket | None = None  # shared by several router processes
        self._membership_ports: dict[str, socket.socket] = {}  # of the router processes, which bind them, too

    def prepare(self, spec: ClusterSpec) -> None:
        remove_abandoned()
        configured = resolve_secrets(spec)
        self._address = own_address(spec.network, LOOPBACK)
        # Before a secret is generated, which processes elsewhere couldn't know.
        check_exposure(self._address, configured.secret)
        self._secrets = configured.with_some_secret()
        gpus = list_gpus({**os.environ, **self._environment})
        check_enough_gpus(spec, gpus)
        self._gpus = GpuAssignment(gpus, spec.devices.share)
        for name in router_names(spec):
            self._membership_ports[name] = hold_port(self._address)
        if spec.router.workers > 1:
            self._listener = listen(spec.router.host, spec.router.port)
        pools = worker_names(spec)
        on_cpu = {name: pool for name, pool in pools.items() if not self._needs_gpus(pool)}
        wanted = [wanted_affinity(name, pool, ()) for name, pool in on_cpu.items()]
        plans = plan_workers(self._machine(), wanted, self._num_cores)
        self._slots = [_Slot(plans[name], pool) for name, pool in on_cpu.items()]
        if can_fork():
            for pool in filter(self._preloaded, spec.pools):  # now, so that they import while the router starts
                added = {**worker_environment(spec, pool), **self._environment}
                fork_server(child_environment(0, {**os.environ, **added}), self._preloaded(pool))

    def start_router(
        self, name: str, spec: ClusterSpec, ports: RouterPorts, emit: Callable[[Event], None]
    ) -> ChildProcess:
        ports = replace(ports, membership=ports.membership or port_of(self._membership_ports[name]))
        child = ChildProcess(
            name=name,
            entry=self._entries.router,
            config=router_config(spec, self._secrets, self._address, ports, name=name, peers=self._peers_of(name)),
            listener=self._listener,
            threads=0,
            log_level=self._log_level,
            emit=emit,
            environment=self._environment,
            log_file=self._log_file(name),
            preloaded=_module_of(self._entries.router, ENTRIES.router),
        )
        # Now, so that workers start beside the router: they register as soon as it listens.
        emit(ChildProgress(name, "membership", {"endpoint": zmq_endpoint(self._address, ports.membership)}))
        return child

    def _peers_of(self, name: str) -> dict[str, str]:
        """Return the membership endpoints of the other router processes."""
        return {
            peer: zmq_endpoint(self._address, port_of(held))
            for peer, held in self._membership_ports.items()
            if peer != name
        }

    def start_worker(
        self, name: str, spec: ClusterSpec, pool: PoolSpec, membership: str, emit: Callable[[Event], None]
    ) -> ChildProcess:
        environment = worker_environment(spec, pool)
        runs_on = ""
        gpus: list[Gpu] = []
        if self._needs_gpus(pool):
            gpus = self._gpus.take(name, pool.tensor_parallel_size)
            environment[VISIBLE] = ",".join(gpu.uuid for gpu in gpus)
            runs_on = "GPU " + ",".join(str(gpu.index) for gpu in gpus)
        plan = self._plan_of(name, pool, gpus)
        self._names[name] = None
        config = worker_config(
            spec,
            pool,
            name,
            self._secrets,
            membership=membership,
            host=self._address,
            threads=pool.threads or self._num_threads(name, spec, plan),
            affinity=plan.affinity,
            lmcache_endpoint=self._lmcache_endpoint(spec, pool),
        )
        if spec.keeps_lmcache_for(pool):
            emit(ChildProgress(name, LMCACHE, {"server": LMCACHE}))
        text = plan.describe(keeps_awake=config.engine.keep_cores_awake)
        if others := self._others_there(name, plan):
            text += f", shared with {others}"
            _log.info("%s shares cores with %s", name, others)
        emit(ChildProgress(name, "plan", {"text": text}))
        try:
            return ChildProcess(
                name=name,
                entry=self._entries.worker,
                config=config,
                threads=config.engine.threads,
                log_level=self._log_level,
                emit=emit,
                environment={**environment, **self._environment},
                runs_on=runs_on,
                log_file=self._log_file(name),
                preloaded=self._preloaded(pool),
                forks=FORK_RANKS if self._preloaded(pool) else "",
                early=BEGIN_ON_GPU if gpus and self._entries == ENTRIES else "",
            )
        except OSError:
            self.release(name)
            raise

    def start_lmcache(self, name: str, spec: ClusterSpec, emit: Callable[[Event], None]) -> ChildProcess:
        """Start the server, each time at the same address, so that workers find it."""
        config = spec.lmcache_config()
        assert config is not None, "no worker has asked for it"
        return ChildProcess(
            name=name,
            entry=self._entries.lmcache,
            config=msgspec.structs.replace(config, port=self._lmcache_port),
            threads=0,
            log_level=self._log_level,
            emit=emit,
            environment=self._environment,
            log_file=self._log_file(name),
        )

    def has_room(self, pool: PoolSpec) -> bool:
        return not self._needs_gpus(pool) or self._gpus.num_free() >= pool.tensor_parallel_size

    def release(self, name: str) -> None:
        self._gpus.give_back(name)
        self._names.pop(name, None)
        for slot in self._slots:
            slot.holders.discard(name)

    def remember(self, memory: Memory) -> None:
        """Do nothing: no launcher takes over from one on this machine, whose children end with it."""

    def close(self) -> None:
        """Close what the children shared, and their ports: the launcher ends them itself."""
        for held in self._membership_ports.values():
            held.close()
        self._membership_ports.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _lmcache_endpoint(self, spec: ClusterSpec, pool: PoolSpec) -> str:
        """Return the endpoint of the LMCache server that is to be started, "" for none."""
        config = spec.lmcache_config()
        if config is None or not pool.lmcache:
            return ""
        self._lmcache_port = config.port or self._lmcache_port or free_port()
        return f"tcp://{LOOPBACK}:{self._lmcache_port}"

    def _machine(self) -> Topology:
        if self._topology is None:
            self._topology = read_topology(usable_cpus())
        return self._topology

    def _needs_gpus(self, pool: PoolSpec) -> bool:
        return device_of(pool.device, self._gpus.gpus) == "cuda"

    def _preloaded(self, pool: PoolSpec) -> str:
        """Return the module that the fork server of the pool's workers has imported; "" for workers on GPUs, whose
        libraries must not be loaded before a fork."""
        return "" if self._needs_gpus(pool) else _module_of(self._entries.worker, ENTRIES.worker)

    def _plan_of(self, name: str, pool: PoolSpec, gpus: list[Gpu]) -> WorkerPlan:
        """Plan a worker. A GPU determines the cores of its worker; a CPU worker takes the emptiest slot, preferably of
        its pool, which another worker may be about to leave."""
        wanted = wanted_affinity(name, pool, tuple(gpu.pci_bus_id for gpu in gpus))
        if gpus:
            return plan_workers(self._machine(), [wanted], self._num_cores)[name]
        slots = [slot for slot in self._slots if slot.suits(pool)]
        if not slots:
            return plan_workers(self._machine(), [replace(wanted, pin=False)])[name]
        slot = min(slots, key=lambda slot: (len(slot.holders), slot.pool.name != pool.name, slot.taken_at))
        self._num_starts += 1
        slot.taken_at = self._num_starts
        slot.holders.add(name)
        return slot.plan

    def _others_there(self, name: str, plan: WorkerPlan) -> str:
        """Return the names of the other workers that have the cores of a CPU worker's plan; "" if none has, or if it
        binds nothing."""
        holders: set[str] = next((slot.holders for slot in self._slots if name in slot.holders), set())
        return ", ".join(sorted(holders - {name})) if plan.affinity.cpus else ""

    def _num_threads(self, name: str, spec: ClusterSpec, plan: WorkerPlan) -> int:
        """Return the number of the worker's threads: as many as it has cores of its own, else an even share of the
        cores for all running workers."""
        if plan.device == "cpu" and plan.num_cores and not plan.why:
            return plan.num_cores
        shares = split_cores(self._num_cores, max(spec.num_workers, len(self._names)))
        return self._threads.setdefault(name, shares[list(self._names).index(name)])

    def _log_file(self, name: str) -> Path | None:
        return None if self._log_folder is None else self._log_folder / f"{name}.log"
