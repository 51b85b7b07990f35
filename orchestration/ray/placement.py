"""Node assignment on a Ray cluster: the node of each worker, and its number of cores. Pure.

Ray reserves and starts; this module chooses the node, so that the workers of a pool are spread over the nodes: Ray's
own strategies spread the bundles of one placement group, and each worker is a group of its own.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec

CPU, GPU = "CPU", "GPU"


@dataclass(frozen=True, slots=True)
class Node:
    """Node of the Ray cluster."""

    node_id: str
    address: str
    labels: Mapping[str, str]
    total: Mapping[str, float]  # resources by Ray's names
    available: Mapping[str, float]  # likewise


def device_on(pool: PoolSpec, nodes: Iterable[Node]) -> str:
    """Return ``cpu`` or ``cuda``: the meaning of the pool's ``device`` in a cluster of these nodes."""
    if pool.device != "auto":
        return pool.device
    return "cuda" if any(node.total.get(GPU, 0) >= 1 for node in nodes) else "cpu"


def share_of_cores(spec: ClusterSpec, nodes: Collection[Node]) -> int:
    """Return the threads of a worker whose pool configures none: the smallest even share of any node; at least one."""
    workers_per_node = -(-max(spec.num_workers, 1) // max(len(nodes), 1))
    return max(1, int(min((node.total.get(CPU, 0) // workers_per_node for node in nodes), default=1)))


def bundle(pool: PoolSpec, device: str, threads: int) -> dict[str, float]:
    """Return the resources of one worker: its threads' cores, a GPU for each rank, and the pool's own resources."""
    gpus = {GPU: float(pool.tensor_parallel_size)} if device == "cuda" else {}
    return {CPU: float(threads), **gpus, **pool.nodes.resources}


def matches(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether a node with ``labels`` meets a pool's, in Ray's syntax: ``x``, ``!x``, ``in(x,y)``,
    ``!in(x,y)``."""
    return all(_matches_one(labels.get(key), value) for key, value in wanted.items())


def _matches_one(label: str | None, wanted: str) -> bool:
    if wanted.startswith("!"):
        return label is None or not _matches_one(label, wanted[1:])
    if wanted.startswith("in(") and wanted.endswith(")"):
        return label in [each.strip() for each in wanted[3:-1].split(",")]
    return label == wanted


def fits(node: Node, wanted: Mapping[str, float]) -> bool:
    """Return whether the node could take a bundle now."""
    return all(node.available.get(name, 0.0) >= amount for name, amount in wanted.items())


def choose_node(
    pool: PoolSpec, wanted: Mapping[str, float], nodes: Iterable[Node], placed: Mapping[str, Counter[str]]
) -> Node | None:
    """Return the node with the fewest workers of the pool, then of all; then the emptiest. None: nothing fits now.

    ``placed``: by node id, the number of workers of each pool there.
    """
    candidates = [node for node in nodes if matches(node.labels, pool.nodes.labels) and fits(node, wanted)]

    def crowd(node: Node) -> tuple[int, int, float, float, str]:
        here = placed.get(node.node_id, Counter())
        free = node.available
        return (here[pool.name], here.total(), -free.get(GPU, 0.0), -free.get(CPU, 0.0), node.node_id)

    return min(candidates, key=crowd, default=None)
