"""Actor that runs one process of a cluster on a Ray node: the router, a worker with all its ranks, or the keeper of the
node's LMCache server.

The process is a child, started as on a single machine: its environment is set before it imports anything, signals drain
it, and it ends with this actor, however that dies (its life line). Calls to the actor go through Ray; the process's own
connections don't.
"""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import ray

from splitserve.common.cores import usable_cpus
from splitserve.common.errors import SplitserveError
from splitserve.common.logs import set_up_logging
from splitserve.common.security import check_exposure
from splitserve.orchestration.cluster.host import ChildExited, ChildProgress, Event
from splitserve.orchestration.hosts.addresses import own_address, reachable_url
from splitserve.orchestration.hosts.core_plan import WorkerPlan, plan_workers, wanted_affinity
from splitserve.orchestration.hosts.gpus import VISIBLE, list_gpus, visible
from splitserve.orchestration.hosts.local import BEGIN_ON_GPU, ENTRIES, Entries
from splitserve.orchestration.hosts.log_files import read_log
from splitserve.orchestration.hosts.process import ChildProcess
from splitserve.orchestration.hosts.shared_memory import remove_abandoned
from splitserve.orchestration.hosts.topology import read_topology
from splitserve.orchestration.lmcache.keeper import is_lmcache
from splitserve.orchestration.lmcache.on_ray import endpoint_on, port_on
from splitserve.orchestration.ray.names import ADDRESS_VARIABLE, CLUSTER_VARIABLE, HEAD_SECRET, HEAD_VARIABLE
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec
from splitserve.orchestration.spec.conversion import convert_spec
from splitserve.orchestration.spec.expansion import (
    RouterPorts,
    Secrets,
    read_secret,
    resolve_secrets,
    router_config,
    worker_config,
    worker_environment,
)
from splitserve.orchestration.spec.hub import with_local_model
from splitserve.orchestration.spec.model_source import check_model_directory

POLL_SECONDS = 5.0
END_SECONDS = 3.0
MAX_EVENTS = 1000


class AgentOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order to an agent."""

    cluster: str
    name: str
    spec: dict[str, object]
    pool: str = ""  # "": the process is no worker
    membership: str = ""
    threads: int = 0
    device: str = "cpu"  # ``cpu`` or ``cuda``
    ports: tuple[int, int] = (0, 0)  # ports of a router, 0 for any
    log_level: str = "info"
    entries: tuple[str, str, str]


class AgentEvent(msgspec.Struct, frozen=True):
    """Event of the process: ``placed``, a worker's ``plan``, those of :class:`ChildProcess`; ``exit`` is the last."""

    stage: str
    detail: dict[str, str]


class Agent:
    """Ray actor with threads. ``order`` is an :class:`AgentOrder` as JSON; it is kept for a controller that is
    restarted."""

    def __init__(self, order: bytes) -> None:
        self._order = msgspec.json.decode(order, type=AgentOrder)
        self._events: list[AgentEvent] = []
        self._changed = threading.Condition()
        self._child: ChildProcess | None = None
        set_up_logging(f"agent of {self._order.name}", self._order.log_level)
        try:
            self._start()
        except (SplitserveError, OSError) as error:
            self._add("exit", {"returncode": "2", "words": str(error)})

    def events(self, after: int) -> list[bytes]:
        """Return events from index ``after`` on, as JSON; waits for one, for a limited time."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > after, POLL_SECONDS)
            return [msgspec.json.encode(event) for event in self._events[after:]]

    def signal(self, number: int) -> None:
        if self._child is not None:
            self._child.send_signal(number)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def read_log(self, num_lines: int, offset: int) -> tuple[str, int]:
        """Read the process's log; see :func:`splitserve.orchestration.hosts.log_files.read_log`."""
        return read_log(self._log_file(), num_lines, offset)

    def finish(self) -> None:
        """End the process and remove everything that it may have left."""
        if self._child is not None:
            if is_lmcache(self._order.name):  # its orderly end removes its server's shared memory
                self._child.send_signal(signal.SIGINT)
                self._child.join(END_SECONDS)
            self._child.kill()
            self._child.join(10.0)
        remove_abandoned()

    # ---- inside ----

    def _start(self) -> None:
        order = self._order
        remove_abandoned()
        spec = with_local_model(convert_spec(order.spec))
        check_model_directory(spec.model.path)
        secrets = _secrets(spec)
        address = own_address(spec.network, _node_address())
        check_exposure(address, secrets.secret)
        gpus = os.environ.get(VISIBLE, "") if order.device == "cuda" else ""
        environment = {
            CLUSTER_VARIABLE: order.cluster,
            VISIBLE: gpus,
            "PYTHONPATH": os.pathsep.join(filter(None, [_package_root(), os.environ.get("PYTHONPATH", "")])),
        }
        node_id = ray.get_runtime_context().get_node_id()
        self._add("placed", {"node": node_id, "runs_on": f"{_node_address()}{', GPU ' + gpus if gpus else ''}"})
        entries = Entries(*order.entries)
        if order.pool:
            pool = spec.pool(order.pool)
            plan = self._plan(pool, gpus)
            config = worker_config(
                spec,
                msgspec.structs.replace(pool, device=order.device),
                order.name,
                secrets,
                membership=order.membership,
                host=address,
                threads=order.threads,
                affinity=plan.affinity,
                lmcache_endpoint=endpoint_on(order.cluster, node_id, spec, pool),
            )
            self._add("plan", {"text": plan.describe(keeps_awake=config.engine.keep_cores_awake)})
            early = BEGIN_ON_GPU if gpus and entries == ENTRIES else ""
            variables = {**environment, **worker_environment(spec, pool)}
            self._spawn(entries.worker, config, order.threads, variables, early)
        elif is_lmcache(order.name):
            server = spec.lmcache_config()
            assert server is not None, "no worker has asked for it"
            port = port_on(order.cluster, node_id, server.port)
            self._spawn(entries.lmcache, msgspec.structs.replace(server, port=port), 0, environment)
        else:
            ports = RouterPorts(*order.ports)
            self._spawn(entries.router, router_config(spec, secrets, address, ports), 0, environment)

    def _plan(self, pool: PoolSpec, gpus: str) -> WorkerPlan:
        """Plan the worker. A GPU worker is bound to its GPU's NUMA node. A CPU worker shares the node's cores with
        those of other agents, which this one doesn't know: it's pinned only to cores that the spec names."""
        wanted = wanted_affinity(self._order.name, pool, ())
        if gpus:
            visible_gpus = visible(list_gpus({}), gpus)
            wanted = replace(wanted, gpus=tuple(gpu.pci_bus_id for gpu in visible_gpus))
        elif not wanted.cores:
            wanted = replace(wanted, pin=False)
        plan = plan_workers(read_topology(usable_cpus()), [wanted])[self._order.name]
        why = "other workers of the node use the same cores"
        return replace(plan, why=why) if not gpus and not wanted.cores and pool.affinity.pin else plan

    def _spawn(self, entry: str, config: object, threads: int, environment: dict[str, str], early: str = "") -> None:
        self._child = ChildProcess(
            name=self._order.name,
            entry=entry,
            config=config,  # type: ignore[arg-type]
            threads=threads,
            log_level=self._order.log_level,
            emit=self._on_event,
            environment=environment,
            log_file=self._log_file(),
            early=early,
        )

    def _on_event(self, event: Event) -> None:
        match event:
            case ChildProgress(_, "listening", {"url": url}):
                self._add("listening", {"url": reachable_url(url, _node_address())})
            case ChildProgress(_, stage, detail):
                self._add(stage, detail)
            case ChildExited(_, returncode):
                while self._child is None:  # the child ended before the constructor above had returned
                    time.sleep(0.01)
                self._add("exit", {"returncode": str(returncode), "words": self._child.describe_exit(returncode)})

    def _add(self, stage: str, detail: dict[str, str]) -> None:
        with self._changed:
            if len(self._events) < MAX_EVENTS or stage == "exit":
                self._events.append(AgentEvent(stage, detail))
            self._changed.notify_all()

    def _log_file(self) -> Path:
        folder = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
        return folder / f"splitserve-{self._order.cluster}-{self._order.name}.log"


def _node_address() -> str:
    """Return this node's address as given to Ray at its start (``ray.util`` would return any of the machine's), unless
    the node's environment names another."""
    return os.environ.get(ADDRESS_VARIABLE) or str(ray._private.worker.global_worker.node_ip_address)


def _package_root() -> str:
    """Return the folder from which the child must import ``splitserve``: the one that Ray brought for this process."""
    import splitserve

    return str(Path(splitserve.__file__).parent.parent)


def _secrets(spec: ClusterSpec) -> Secrets:
    """Return the configured secrets. If a head was started for the cluster, all of it runs on one machine, and the
    head's folder holds a secret."""
    configured, folder = resolve_secrets(spec), os.environ.get(HEAD_VARIABLE, "")
    if configured.secret or not folder:
        return configured
    return msgspec.structs.replace(configured, secret=read_secret(str(Path(folder) / HEAD_SECRET), ""))
