"""Processes on the nodes of a Ray cluster: an agent, a placement group and a listening thread for each."""

import contextlib
import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cluster.host import LMCACHE, ChildExited, ChildProgress, Event, Memory
from splitserve.orchestration.hosts.local import ENTRIES, Entries
from splitserve.orchestration.lmcache.keeper import is_lmcache
from splitserve.orchestration.lmcache.on_ray import server_on
from splitserve.orchestration.ray.agent import Agent, AgentEvent, AgentOrder
from splitserve.orchestration.ray.names import NAMESPACE, SOME_MEMORY_BYTES, process_of, unique_agent_name
from splitserve.orchestration.ray.placement import (
    GPU,
    Node,
    bundle,
    choose_node,
    device_on,
    fits,
    matches,
    share_of_cores,
)
from splitserve.orchestration.ray.stored_state import forget, recall, remember
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec
from splitserve.orchestration.spec.expansion import RouterPorts

CALL_SECONDS = 5.0
FINISH_SECONDS = 15.0
AGENT_THREADS = 8
UNAVAILABLE_SECONDS = 0.1  # pause between calls to an unreachable agent, each of which fails at once

_log = logging.getLogger(__name__)


class RayChild:
    """Process on Ray; see :class:`splitserve.orchestration.cluster.host.Child`. A process whose agent is gone counts as
    killed."""

    def __init__(
        self,
        name: str,
        agent: Any,
        *,
        group: PlacementGroup | None,
        emit: Callable[[Event], None],
        target_id: str = "",
        node_id: str = "",
        uses_lmcache: bool = False,
    ) -> None:
        """Start to follow the agent. ``target_id``: node requested from Ray. ``node_id``: node on which the agent runs
        already. ``uses_lmcache``: worker with a server."""
        self._uses_lmcache = uses_lmcache
        self.target_id = target_id
        self.name = name
        self.pid = 0
        self.runs_on = "waiting for a node"
        self.node_id = node_id
        self.agent = agent
        self._group = group
        self._emit = emit
        self._words = ""
        self._ended = threading.Event()
        self._discarded = False
        self._thread = threading.Thread(target=self._listen, name=f"listen-{name}", daemon=True)
        self._thread.start()

    def send_signal(self, signal_number: int) -> None:
        if self.node_id:
            self.agent.signal.remote(signal_number)
        elif signal_number in (signal.SIGINT, signal.SIGTERM):
            self.kill()  # there is no process yet that could end in order

    def kill(self) -> None:
        if self.node_id:
            self.agent.kill.remote()
        else:
            self._discard()

    def join(self, timeout_seconds: float) -> bool:
        if not self._ended.wait(timeout_seconds):
            return False
        self._discard()
        return True

    def describe_exit(self, returncode: int) -> str:
        return self._words or f"ended with exit status {returncode}"

    def _discard(self) -> None:
        """Free the process's node. The agent first removes everything that its process may have left."""
        if self._discarded:
            return
        self._discarded = True
        end_agents([self.agent], FINISH_SECONDS if self.node_id else 0.0)
        if self._group is not None:
            remove_placement_group(self._group)

    def _listen(self) -> None:
        """Read events until the exit event, which comes in any case."""
        num_seen = 0
        while not self._ended.is_set():
            try:
                data = ray.get(self.agent.events.remote(num_seen))
            except ray.exceptions.ActorUnavailableError:
                self._ended.wait(UNAVAILABLE_SECONDS)  # its node doesn't answer; Ray decides whether it is dead
                continue
            except (ray.exceptions.RayError, ValueError) as error:
                where = f" on {self.runs_on}" if self.node_id else ""
                self._end(-signal.SIGKILL, f"{self.name}{where} was lost: {_first_line(error)}")
                return
            num_seen += len(data)
            for each in data:
                self._on_event(msgspec.json.decode(each, type=AgentEvent))

    def _on_event(self, event: AgentEvent) -> None:
        match event.stage:
            case "placed":
                self.node_id, self.runs_on = event.detail["node"], event.detail["runs_on"]
                self._emit(ChildProgress(self.name, event.stage, event.detail))
                if self._uses_lmcache:
                    self._emit(ChildProgress(self.name, LMCACHE, {"server": server_on(self.node_id)}))
            case "started":
                self.pid = int(event.detail["pid"])
            case "exit":
                self._end(int(event.detail["returncode"]), event.detail["words"])
            case _:
                self._emit(ChildProgress(self.name, event.stage, event.detail))

    def _end(self, returncode: int, words: str) -> None:
        self._words = words
        self._ended.set()
        self._emit(ChildExited(self.name, returncode))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class RayHost:
    """Host of processes on Ray; see :class:`splitserve.orchestration.cluster.host.Host`. ``home``: the node of the
    controller, on which the router runs as well."""

    def __init__(self, cluster: str, home: str, *, log_level: str = "info", entries: Entries = ENTRIES) -> None:
        self._cluster = cluster
        self._home = home
        self._log_level = log_level
        self._entries = entries
        self._children: dict[str, RayChild] = {}
        self._pools: dict[str, str] = {}
        self._threads: dict[str, int] = {}
        self._spec: ClusterSpec | None = None

    def prepare(self, spec: ClusterSpec) -> None:
        """Check that some node of the cluster, as it is now, could run a worker of each pool."""
        if spec.router.workers > 1:
            raise ConfigError(f"router.workers is {spec.router.workers}: on Ray a cluster has one router process")
        self._spec = spec
        nodes = ray_nodes()
        for pool in spec.pools:
            wanted = bundle(pool, device_on(pool, nodes), pool.threads or 1)
            candidates = [node for node in nodes if matches(node.labels, pool.nodes.labels)]
            if not any(
                all(node.total.get(name, 0.0) >= amount for name, amount in wanted.items()) for node in candidates
            ):
                resources = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())
                raise ConfigError(
                    f"no node of the Ray cluster could ever run a worker of pool {pool.name}: it takes {resources}"
                    f"{' on a node with labels ' + str(pool.nodes.labels) if pool.nodes.labels else ''}; "
                    f"the cluster has {len(nodes)} nodes"
                )

    def start_router(self, name: str, spec: ClusterSpec, ports: RouterPorts, emit: Callable[[Event], None]) -> RayChild:
        agent_name = unique_agent_name(self._cluster, name)
        agent = _agent_class(
            agent_name, NodeAffinitySchedulingStrategy(self._home, soft=False), memory=SOME_MEMORY_BYTES
        )
        order = self._order(name, spec, ports=(ports.http, ports.membership))
        child = RayChild(name, agent.remote(msgspec.json.encode(order)), group=None, emit=emit)
        self._children[name] = child
        return child

    def start_lmcache(self, name: str, spec: ClusterSpec, emit: Callable[[Event], None]) -> RayChild:
        node_id = next((node.node_id for node in ray_nodes() if server_on(node.node_id) == name), None)
        if node_id is None:
            raise ConfigError("its node is gone")
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        agent = _agent_class(unique_agent_name(self._cluster, name), strategy, memory=SOME_MEMORY_BYTES)
        order = msgspec.json.encode(self._order(name, spec))
        child = RayChild(name, agent.remote(order), group=None, emit=emit, target_id=node_id)
        self._children[name] = child
        return child

    def start_worker(
        self, name: str, spec: ClusterSpec, pool: PoolSpec, membership: str, emit: Callable[[Event], None]
    ) -> RayChild:
        nodes = ray_nodes()
        device = device_on(pool, nodes)
        threads = pool.threads or self._threads.setdefault(name, share_of_cores(spec, nodes))
        wanted = bundle(pool, device, threads)
        node = choose_node(pool, wanted, nodes, self._placed())
        agent_name = unique_agent_name(self._cluster, name)
        group = placement_group(
            [wanted],
            strategy="STRICT_PACK",
            name=agent_name,
            lifetime="detached",
            bundle_label_selector=[dict(pool.nodes.labels)] if pool.nodes.labels else None,
            _soft_target_node_id=node.node_id if node else None,
        )
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        agent = _agent_class(agent_name, strategy, num_cpus=wanted["CPU"], num_gpus=wanted.get(GPU, 0.0))
        order = self._order(name, spec, pool=pool.name, membership=membership, threads=threads, device=device)
        target_id = node.node_id if node else ""
        child = RayChild(
            name,
            agent.remote(msgspec.json.encode(order)),
            group=group,
            emit=emit,
            target_id=target_id,
            uses_lmcache=spec.keeps_lmcache_for(pool),
        )
        self._children[name] = child
        self._pools[name] = pool.name
        return child

    def has_room(self, pool: PoolSpec) -> bool:
        nodes = ray_nodes()
        threads = pool.threads or (share_of_cores(self._spec, nodes) if self._spec else 1)
        wanted = bundle(pool, device_on(pool, nodes), threads)
        return any(matches(node.labels, pool.nodes.labels) and fits(node, wanted) for node in nodes)

    def release(self, name: str) -> None:
        self._children.pop(name, None)
        self._pools.pop(name, None)

    def remember(self, memory: Memory) -> None:
        remember(self._cluster, memory)

    def recall(self) -> Memory | None:
        """Return the state that the previous controller stored. Raises :class:`ConfigError`."""
        return recall(self._cluster)

    def adopt(self, spec: ClusterSpec, known: Collection[str], emit: Callable[[Event], None]) -> dict[str, RayChild]:
        """Return the cluster's processes by name and remove the rest: processes that aren't ``known``, LMCache servers
        aside, and placement groups whose node is gone, which Ray would move to another node."""
        self._spec = spec
        groups = groups_of(self._cluster)
        strangers = []
        for name, agent_name, group in agents_of(self._cluster):
            try:
                agent = ray.get_actor(agent_name, namespace=NAMESPACE)
            except ValueError:
                continue
            if not (name in known or is_lmcache(name)) or name in self._children:
                _log.warning("%s belongs to no worker: removed", agent_name)
                strangers.append(agent)
                continue
            groups.pop(agent_name, None)
            pool = next((pool for pool in spec.pools if pool.name == name.rpartition("-")[0]), None)
            uses_lmcache = pool is not None and spec.keeps_lmcache_for(pool)
            node_id = _node_of(agent)  # now, not with its first event: it may get a signal before
            self._children[name] = RayChild(
                name, agent, group=group, emit=emit, node_id=node_id, uses_lmcache=uses_lmcache
            )
            if pool is not None:
                self._pools[name] = pool.name
        end_agents(strangers, CALL_SECONDS)
        for group in groups.values():
            remove_placement_group(group)
        return dict(self._children)

    def child(self, name: str) -> RayChild | None:
        return self._children.get(name)

    def names(self) -> list[str]:
        return list(self._children)

    def close(self) -> None:
        forget(self._cluster)

    def _order(self, name: str, spec: ClusterSpec, **more: Any) -> AgentOrder:
        return AgentOrder(
            cluster=self._cluster,
            name=name,
            spec=msgspec.to_builtins(spec),
            log_level=self._log_level,
            entries=astuple(self._entries),
            **more,
        )

    def _placed(self) -> dict[str, Counter[str]]:
        """Count workers by node and pool; workers that Ray hasn't started yet count on their target node."""
        placed: dict[str, Counter[str]] = {}
        for name, pool in self._pools.items():
            node_id = self._children[name].node_id or self._children[name].target_id
            if node_id:
                placed.setdefault(node_id, Counter())[pool] += 1
        return placed


def _agent_class(
    agent_name: str, strategy: Any, *, num_cpus: float = 0.0, num_gpus: float = 0.0, memory: int | None = None
) -> Any:
    """Return the actor class of an agent: detached, and never restarted by Ray, since the supervisor does that."""
    return ray.remote(Agent).options(
        name=agent_name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=0,
        max_concurrency=AGENT_THREADS,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        memory=memory,
        scheduling_strategy=strategy,
    )


def _node_of(agent: Any) -> str:
    """Return the node on which an agent runs; "" if Ray hasn't started it yet, or it is gone."""
    actor = ray._private.state.actors(agent._actor_id.hex())
    return str(actor["Address"]["NodeID"]) if actor.get("State") == "ALIVE" else ""


def ray_nodes() -> list[Node]:
    """Return the living nodes."""
    available = ray._private.state.available_resources_per_node()
    return [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            labels=node.get("Labels") or {},
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def end_agents(agents: Sequence[Any], finish_seconds: float) -> None:
    """Free the agents' nodes. Each first removes everything that its process may have left, within
    ``finish_seconds``."""
    finished = []
    for agent in agents:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            finished.append(agent.finish.remote())
    if finished and finish_seconds:
        ray.wait(finished, num_returns=len(finished), timeout=finish_seconds)
    for agent in agents:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(agent)


def agents_of(cluster: str) -> Iterator[tuple[str, str, PlacementGroup | None]]:
    """Yield the cluster's agents: their process's name, their own, and their placement group."""
    groups = groups_of(cluster)
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = process_of(entry["name"], cluster) if entry["namespace"] == NAMESPACE else None
        if name is not None:
            yield name, entry["name"], groups.get(entry["name"])


def groups_of(cluster: str) -> dict[str, PlacementGroup]:
    """Return the cluster's placement groups by name, except those that are being removed."""
    found = {}
    for group_id, row in ray.util.placement_group_table().items():
        if row["state"] != "REMOVED" and process_of(row["name"], cluster) is not None:
            found[row["name"]] = PlacementGroup(ray.PlacementGroupID.from_hex(group_id))
    return found
