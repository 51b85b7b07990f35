"""Placement of workers on Ray's nodes, without Ray."""

from collections import Counter

import pytest

from splitserve.orchestration.ray.names import process_of, unique_agent_name
from splitserve.orchestration.ray.placement import Node, bundle, choose_node, device_on, matches, share_of_cores
from splitserve.orchestration.spec.cluster_spec import NodeSpec, PoolSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.request import Role

POOL = PoolSpec(name="gen", role=Role.DECODE)


def node(name: str, cpus: float = 8, gpus: float = 0, free: float | None = None, **labels: str) -> Node:
    total = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    available = {name: amount if free is None else min(amount, free) for name, amount in total.items()}
    return Node(name, f"10.0.0.{len(name)}", labels, total, available)


def place(pool: PoolSpec, nodes: list[Node], count: int, wanted: dict[str, float]) -> list[str]:
    """One worker after the other, while there is room."""
    placed: dict[str, Counter[str]] = {}
    chosen = []
    for _ in range(count):
        best = choose_node(pool, wanted, nodes, placed)
        if best is None:
            break
        chosen.append(best.node_id)
        placed.setdefault(best.node_id, Counter())[pool.name] += 1
        free = {name: amount - wanted.get(name, 0) for name, amount in best.available.items()}
        nodes = [each if each is not best else Node(best.node_id, "", best.labels, best.total, free) for each in nodes]
    return chosen


def test_a_pool_is_spread_over_the_nodes() -> None:
    nodes = [node("a"), node("b"), node("c")]
    assert Counter(place(POOL, nodes, 6, {"CPU": 1})) == {"a": 2, "b": 2, "c": 2}


def test_the_nodes_of_other_pools_are_avoided_the_own_ones_more() -> None:
    nodes = [node("a"), node("b")]
    other = {"a": Counter({"fill": 2})}
    assert choose_node(POOL, {"CPU": 1}, nodes, other) == nodes[1]
    assert choose_node(POOL, {"CPU": 1}, nodes, {**other, "b": Counter({"gen": 1})}) == nodes[0]


def test_a_worker_is_kept_on_one_node() -> None:
    nodes = [node("a", gpus=2), node("b", gpus=2), node("c", gpus=4)]
    pool = PoolSpec(name="gen", role=Role.DECODE, tensor_parallel_size=4)
    wanted = bundle(pool, "cuda", 2)
    assert wanted == {"CPU": 2.0, "GPU": 4.0}
    assert place(pool, nodes, 3, wanted) == ["c"], "two GPUs here and two there don't make a worker"


def test_what_is_taken_is_not_given() -> None:
    assert choose_node(POOL, {"CPU": 2}, [node("a", free=1), node("b", free=2)], {}) == node("b", free=2)
    assert choose_node(POOL, {"CPU": 2}, [node("a", free=1)], {}) is None


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({}, True),
        ({"zone": "x"}, True),
        ({"zone": "y"}, False),
        ({"zone": "!y"}, True),
        ({"zone": "!x"}, False),
        ({"zone": "in(x, y)"}, True),
        ({"zone": "!in(x,y)"}, False),
        ({"rack": "1"}, False),
        ({"rack": "!1"}, True),
    ],
)
def test_labels(wanted: dict[str, str], fits: bool) -> None:
    assert matches({"zone": "x"}, wanted) is fits
    pool = PoolSpec(name="gen", role=Role.DECODE, nodes=NodeSpec(labels=wanted))
    assert (choose_node(pool, {"CPU": 1}, [node("a", zone="x")], {}) is not None) is fits


def test_devices_and_shares_follow_the_nodes() -> None:
    assert device_on(POOL, [node("a"), node("b")]) == "cpu"
    assert device_on(POOL, [node("a"), node("b", gpus=8)]) == "cuda"
    assert device_on(PoolSpec(name="p", role=Role.MIXED, device="cpu"), [node("b", gpus=8)]) == "cpu"
    spec = simple_spec(EngineConfig(model="m"), num_prefill=2, num_decode=2)
    assert share_of_cores(spec, [node("a", 8)]) == 2
    assert share_of_cores(spec, [node("a", 8), node("b", 8)]) == 4
    assert share_of_cores(spec, [node("a", 8), node("b", 3)]) == 1, "the smallest node counts"
    assert share_of_cores(spec, []) == 1
    resources = PoolSpec(name="p", role=Role.MIXED, nodes=NodeSpec(resources={"rack-7": 0.01}))
    assert bundle(resources, "cpu", 3) == {"CPU": 3.0, "rack-7": 0.01}


def test_names_say_whose_they_are() -> None:
    name = unique_agent_name("my-cluster", "gen-0")
    assert name != unique_agent_name("my-cluster", "gen-0")
    assert process_of(name, "my-cluster") == "gen-0"
    assert process_of(name, "my") is None and process_of("my-cluster/controller", "my-cluster") is None
