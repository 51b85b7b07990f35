"""Placement: machines of many kinds from fake sysfs trees, and plans for their workers."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_sysfs import write_machine
from splitserve.common.cores import usable_cpus
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.hosts.core_plan import Wanted, WorkerPlan, plan_workers, wanted_affinity
from splitserve.orchestration.hosts.gpus import Gpu
from splitserve.orchestration.hosts.local import Entries, LocalHost
from splitserve.orchestration.hosts.topology import Topology, format_list, normal_pci_address, parse_list, read_topology
from splitserve.orchestration.spec.cluster_spec import AffinitySpec, PoolSpec
from splitserve.orchestration.spec.document import parse_spec
from splitserve.protocol.config import CoreAffinity
from splitserve.protocol.request import Role


def read(root: Path, cpus: set[int] | None = None, allowed_nodes: str = "") -> Topology:
    if allowed_nodes:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed_list:\t{allowed_nodes}\n")
    return read_topology(set(range(4096)) if cpus is None else cpus, root, root / "proc")


def workers(count: int) -> list[Wanted]:
    return [Wanted(f"w-{index}") for index in range(count)]


# ---- what there is ----


@pytest.mark.parametrize(("nodes", "threads"), [(1, 1), (2, 1), (2, 2), (4, 2), (6, 1)])
def test_cores_and_nodes(tmp_path: Path, nodes: int, threads: int) -> None:
    topology = read(write_machine(tmp_path, nodes=nodes, cores_per_node=4, threads_per_core=threads))
    assert len(topology.cores) == 4 * nodes
    assert all(len(core.cpus) == threads for core in topology.cores)
    assert [node.index for node in topology.nodes] == list(range(nodes))
    assert all(len(topology.cores_of(node.index)) == 4 for node in topology.nodes)
    assert topology.nodes[0].memory_bytes == 64 << 30


def test_offline_threads_and_those_of_others_do_not_count(tmp_path: Path) -> None:
    root = write_machine(tmp_path, nodes=2, cores_per_node=4, threads_per_core=2, offline=(1, 9, 10))
    cores = {core.cpus for core in read(root).cores}
    assert cores == {(0, 8), (2,), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15)}
    mask = {0, 1, 4, 5, 12}
    assert {core.cpus for core in read(root, mask).cores} == {(0,), (4, 12), (5,)}


def test_memory_nodes_that_the_cpuset_forbids(tmp_path: Path) -> None:
    topology = read(write_machine(tmp_path, nodes=4), allowed_nodes="0,2-3")
    assert [node.may_allocate for node in topology.nodes] == [True, False, True, True]


def test_a_node_with_memory_and_no_cores(tmp_path: Path) -> None:
    root = write_machine(tmp_path, nodes=2)
    (root / "devices/system/node/node1/cpulist").write_text("\n")
    topology = read(root, {0, 1, 2, 3})
    assert [len(topology.cores_of(node.index)) for node in topology.nodes] == [4, 0]
    assert plan_workers(topology, workers(1))["w-0"].node == 0


def test_a_platform_without_sysfs(tmp_path: Path) -> None:
    topology = read_topology({0, 1, 2}, tmp_path / "nowhere", tmp_path / "nowhere")
    assert [core.cpus for core in topology.cores] == [(0,), (1,), (2,)]
    assert len(topology.nodes) == 1 and not topology.gpus and not topology.nics


def test_gpus_and_network_devices(tmp_path: Path) -> None:
    root = write_machine(tmp_path, nodes=2, gpu_nodes=(0, 1), nic_nodes=(1,))
    topology = read(root)
    assert [(gpu.name, gpu.node) for gpu in topology.gpus] == [("0000:18:00.0", 0), ("0000:19:00.0", 1)]
    gpu = topology.gpu("00000000:19:00.0")
    assert gpu is not None and gpu.node == 1 and topology.gpu("0000:77:00.0") is None
    assert [(nic.name, nic.node) for nic in topology.nics] == [("eth0", 1)], "lo is no device"
    rdma = read(write_machine(tmp_path / "rdma", nodes=2, gpu_nodes=(0, 0, 1), nic_nodes=(0,), rdma_nodes=(0, 0, 1)))
    assert [nic.name for nic in rdma.nics] == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"], "RDMA devices are preferred"
    nearest = [rdma.nearest_nic(gpu, gpu.node) for gpu in rdma.gpus]
    assert [nic and nic.name for nic in nearest] == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"], "under the same bridge"


def test_a_gpu_whose_node_is_not_told(tmp_path: Path) -> None:
    topology = read(write_machine(tmp_path, nodes=2, gpu_nodes=(-1,), nic_nodes=(0,)))
    plan = plan_workers(topology, [Wanted("w-0", gpus=("0000:18:00.0",))])["w-0"]
    assert plan.node is None and plan.affinity == CoreAffinity() and plan.nic == "eth0"


@given(st.sets(st.integers(0, 300)))
def test_lists_as_the_kernel_writes_them(cpus: set[int]) -> None:
    assert parse_list(format_list(cpus)) == cpus


def test_lists_and_addresses() -> None:
    assert format_list({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"
    assert parse_list("0-2,5\n") == {0, 1, 2, 5}
    with pytest.raises(ValueError, match="x"):
        parse_list("0-x")
    assert normal_pci_address("00000000:1A:00.0") == "0000:1a:00.0"


# ---- plans ----


def test_workers_are_spread_over_the_nodes(tmp_path: Path) -> None:
    topology = read(write_machine(tmp_path, nodes=4, cores_per_node=8))
    plans = plan_workers(topology, workers(4))
    assert sorted(plan.node for plan in plans.values()) == [0, 1, 2, 3]
    plan = plans["w-1"]
    assert plan.model_cpus == tuple(range(8, 14)) and plan.transfer_cpus == (14,) and plan.io_cpus == (15,)
    assert plan.num_cores == 6
    assert plan.describe() == "cpu, NUMA node 1; cores: model 8-13, transfer 14, I/O 15"
    assert plan.affinity == CoreAffinity(
        cpus=tuple(range(8, 16)), model_cpus=tuple(range(8, 14)), transfer_cpus=(14,), numa_node=1
    )


def test_hardware_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    topology = read(write_machine(tmp_path, nodes=2, cores_per_node=4, threads_per_core=2))
    plan = plan_workers(topology, workers(2))["w-0"]
    assert plan.model_cpus == (0, 1, 2, 8, 9, 10) and plan.transfer_cpus == (3, 11) == plan.io_cpus
    assert plan.num_cores == 3, "a core counts once"


def test_small_shares_stay_whole(tmp_path: Path) -> None:
    topology = read(write_machine(tmp_path, cores_per_node=6))
    plans = plan_workers(topology, workers(3))
    assert [plan.model_cpus for plan in plans.values()] == [(0, 1), (2, 3), (4, 5)]
    assert not any(plan.transfer_cpus for plan in plans.values())


def test_nothing_is_pinned_where_cores_would_be_shared(tmp_path: Path) -> None:
    topology = read(write_machine(tmp_path, cores_per_node=2))
    plans = plan_workers(topology, workers(3))
    assert all(plan.why == "more workers than cores" and not plan.affinity.cpus for plan in plans.values())
    alone = plan_workers(topology, workers(1))["w-0"]
    assert alone.why == "too few cores to reserve any for transfers" and alone.affinity == CoreAffinity(numa_node=0)
    limited = plan_workers(read(write_machine(tmp_path / "large", cores_per_node=32)), workers(1), quota_cores=4)["w-0"]
    assert limited.describe() == "cpu, NUMA node 0; not pinned: a CPU quota of 4 of 32 cores"


def test_gpu_workers_stay_on_their_gpus_node(tmp_path: Path) -> None:
    topology = read(write_machine(tmp_path, nodes=2, cores_per_node=8, gpu_nodes=(0, 0, 1), rdma_nodes=(0, 0, 1)))
    wanted = [Wanted(f"w-{index}", gpus=(gpu.name,)) for index, gpu in enumerate(topology.gpus)]
    plans = plan_workers(topology, wanted)
    assert [plan.node for plan in plans.values()] == [0, 0, 1]
    assert plans["w-0"].affinity.cpus == plans["w-1"].affinity.cpus == tuple(range(8))
    assert not plans["w-0"].transfer_cpus, "too few cores for each of two GPUs"
    assert plans["w-2"].affinity == CoreAffinity(cpus=tuple(range(8, 16)), transfer_cpus=(14, 15), numa_node=1)
    assert plans["w-1"].nic == "mlx5_1:1"
    assert plans["w-2"].describe() == "1 GPU, NUMA node 1, NIC mlx5_2:1; kept on cores 8-15, transfer 14-15"
    single = plan_workers(
        read(write_machine(tmp_path / "one", gpu_nodes=(0,))), [Wanted("w-0", gpus=("0000:18:00.0",))]
    )["w-0"]
    assert single.affinity == CoreAffinity(numa_node=0), "there is nothing to choose"
    assert single.describe().endswith("not pinned: one NUMA node")
    chosen = plan_workers(read(tmp_path / "one"), [Wanted("w-0", gpus=("0000:18:00.0",), cores="0-1")])["w-0"]
    assert chosen.affinity.cpus == (0, 1), "but for what the spec says"


def test_transfers_of_gpus_have_cores_of_their_own(tmp_path: Path) -> None:
    """Whoever else is there: pools ask for their workers one by one."""
    topology = read(write_machine(tmp_path, nodes=3, cores_per_node=16, gpu_nodes=(0, 0, 1)))
    first, second, third = (gpu.name for gpu in topology.gpus)

    def plan(*gpus: str, **given: Any) -> WorkerPlan:
        return plan_workers(topology, [Wanted("w-0", gpus=gpus, **given)])["w-0"]

    assert plan(first).transfer_cpus == (6, 7) and plan(second).transfer_cpus == (14, 15)
    assert plan(first).node_cpus == tuple(range(14)), "not on the second GPU's"
    both = plan(first, second)
    assert both.transfer_cpus == (6, 7, 14, 15) and both.node_cpus == tuple(range(16)) and both.node == 0
    apart = plan(second, third)
    assert apart.node is None and apart.transfer_cpus == (14, 15, 30, 31)
    assert apart.node_cpus == (*range(6), *range(8, 32)), "both nodes'"
    assert plan(first, num_transfer_cores=1).transfer_cpus == (7,)
    assert plan(first, num_transfer_cores=0).affinity == CoreAffinity(cpus=tuple(range(16)), numa_node=0)
    assert plan(first, transfer_cores="3").affinity == CoreAffinity(
        cpus=tuple(range(16)), transfer_cpus=(3,), numa_node=0
    )
    assert plan(first, cores="0-3", num_transfer_cores=1).affinity == CoreAffinity(
        cpus=(0, 1, 2, 3), transfer_cpus=(3,), numa_node=0
    )
    assert plan(first, node=2).affinity == CoreAffinity(cpus=tuple(range(32, 48)), numa_node=2)
    with pytest.raises(ConfigError, match="num_transfer_cores is 8, of 8 cores; leave one or more to the model"):
        plan(first, num_transfer_cores=8)
    alone = read(write_machine(tmp_path / "one", cores_per_node=16, gpu_nodes=(0,)))
    wanted = Wanted("w-0", gpus=(alone.gpus[0].name,), transfer_cores="3")
    assert plan_workers(alone, [wanted])["w-0"].affinity == CoreAffinity(transfer_cpus=(3,), numa_node=0)


@pytest.mark.parametrize(("number", "model", "transfer"), [(0, 7, 0), (1, 6, 1), (5, 2, 5), (7, 1, 7)])
def test_the_number_of_transfer_cores_can_be_chosen(tmp_path: Path, number: int, model: int, transfer: int) -> None:
    topology = read(write_machine(tmp_path, cores_per_node=8))
    plan = plan_workers(topology, [Wanted("w-0", num_transfer_cores=number)])["w-0"]
    assert (len(plan.model_cpus), len(plan.transfer_cpus)) == (model, transfer)
    assert len({*plan.model_cpus, *plan.transfer_cpus, *plan.io_cpus}) == 8


def test_the_users_word_counts(tmp_path: Path) -> None:
    topology = read(write_machine(tmp_path, nodes=2, cores_per_node=8, nic_nodes=(0, 1)))
    wanted = [
        Wanted("w-0", cores="0-3,8", transfer_cores="3"),
        Wanted("w-1", node=1, nic="eth7"),
        Wanted("w-2", pin=False),
        Wanted("w-3", node=0),
    ]
    plans = plan_workers(topology, wanted)
    assert plans["w-0"].model_cpus == (0, 1, 2, 8) and plans["w-0"].transfer_cpus == (3,) and plans["w-0"].node is None
    assert plans["w-1"].node == 1 and plans["w-1"].nic == "eth7" and 8 not in plans["w-1"].affinity.cpus
    assert plans["w-2"].affinity.cpus == () and "as the spec says" in plans["w-2"].describe()
    assert plans["w-3"].affinity.cpus and not {0, 1, 2, 3, 8} & set(plans["w-3"].affinity.cpus)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted("w-0", cores="0-99"), "cores 4-99 are not among those that this process may use: 0-3"),
        (Wanted("w-0", cores="a"), "write them like 0-7,16"),
        (Wanted("w-0", node=3), "there is no NUMA node 3; there are 0"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, wanted: Wanted, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_workers(read(write_machine(tmp_path)), [wanted])


@settings(max_examples=60)
@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from([1, 2]),
    st.integers(1, 12),
    st.sets(st.integers(0, 53), max_size=20),
)
def test_any_machine(
    tmp_path_factory: pytest.TempPathFactory, nodes: int, cores: int, threads: int, count: int, forbidden: set[int]
) -> None:
    root = write_machine(
        tmp_path_factory.mktemp("machine"), nodes=nodes, cores_per_node=cores, threads_per_core=threads
    )
    allowed = set(range(nodes * cores * threads)) - forbidden or {0}
    plans = plan_workers(read(root, allowed), workers(count))
    used: set[int] = set()
    for plan in plans.values():
        own = set(plan.affinity.cpus)
        assert own <= allowed and not own & used, "within the mask, and nobody's cores twice"
        assert not set(plan.model_cpus) & set(plan.transfer_cpus)
        assert bool(own) != bool(plan.why)
        assert own == set() or plan.num_cores >= 1
        used |= own


def test_a_successor_gets_its_predecessors_place(tmp_path: Path) -> None:
    topology = read(write_machine(tmp_path, nodes=2, cores_per_node=4))
    host = LocalHost(topology=topology, num_cores=8)
    spec = parse_spec("model: {path: /m}\npools: [{name: w, role: mixed, count: 2}]")
    host.prepare(spec)
    pool = spec.pools[0]
    first, second = host._plan_of("w-0", pool, []), host._plan_of("w-1", pool, [])
    assert {first.node, second.node} == {0, 1}
    assert host._plan_of("w-2", pool, []) == first
    host.release("w-0")
    assert host._plan_of("w-0", pool, []) == second
    host.release("w-1")
    assert host._plan_of("w-1", pool, []) in (first, second)
    host.close()


def test_workers_that_are_added_get_the_least_used_cores(tmp_path: Path) -> None:
    host = LocalHost(topology=read(write_machine(tmp_path, nodes=1, cores_per_node=4)), num_cores=4)
    spec = parse_spec(
        """
        model: {path: /m}
        pools:
        - {name: p, role: prefill}
        - {name: d, role: decode, count: 2}
        - {name: own, role: decode, affinity: {cores: ['3']}}
        """
    )
    host.prepare(spec)
    prefill, decode, own = spec.pools
    plans = {name: host._plan_of(name, spec.pool(name[:-2]), []) for name in ("p-0", "d-0", "d-1", "own-0")}
    assert len({plan.affinity.cpus for plan in plans.values()}) == 4
    assert host._plan_of("p-1", prefill, []) == plans["p-0"], "its pool's first: a predecessor may be about to leave"
    assert host._plan_of("p-2", prefill, []) in (plans["d-0"], plans["d-1"]), "three workers on one core, one on others"
    host.release("d-0")
    host.release("p-2")
    assert host._plan_of("p-2", prefill, []) == plans["d-0"], "nobody is there any more"
    assert host._plan_of("own-1", own, []) == plans["own-0"]
    assert host._others_there("own-1", plans["own-0"]) == "own-0"
    assert host._others_there("p-2", plans["d-0"]) == ""
    assert host._plan_of("d-2", decode, []) == plans["d-1"]
    host.close()


def test_each_worker_starts_on_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = read(write_machine(tmp_path, nodes=2, cores_per_node=4, gpu_nodes=(0, 1)))
    gpus = [Gpu(index, f"GPU-{index}", f"00000000:{18 + index}:00.0", "H200", 1 << 37) for index in range(2)]
    monkeypatch.setattr("splitserve.orchestration.hosts.local.list_gpus", lambda environment: gpus)
    host = LocalHost(entries=Entries(worker="time:sleep"), topology=topology, num_cores=8)
    spec = parse_spec("model: {path: /m}\npools: [{name: w, role: mixed, count: 2, device: cuda}]")
    host.prepare(spec)
    pool, plans, children = spec.pools[0], [], []

    def show(event: object) -> None:
        if isinstance(event, ChildProgress) and event.stage == "plan":
            plans.append(event.detail["text"])

    try:
        children += [host.start_worker(f"w-{n}", spec, pool, "tcp://127.0.0.1:1", show) for n in range(2)]
        assert "1 GPU, NUMA node 0" in plans[0] and "1 GPU, NUMA node 1" in plans[1]
        assert not host.has_room(pool)
        with pytest.raises(ConfigError, match="w-2 needs 1 GPUs; 0 of 2 are free"):
            host.start_worker("w-2", spec, pool, "tcp://127.0.0.1:1", show)
        host.release("w-1")
        children.append(host.start_worker("w-2", spec, pool, "tcp://127.0.0.1:1", show))
        assert "NUMA node 1" in plans[2]
    finally:
        for child in children:
            child.kill()
            child.join(10.0)
        host.close()


def test_lists_of_cores_go_round() -> None:
    pool = PoolSpec(name="p", role=Role.MIXED, affinity=AffinitySpec(cores=["0-3", "4-7"], transfer_cores=["3", "7"]))
    assert [wanted_affinity(f"p-{n}", pool, ()).cores for n in range(3)] == ["0-3", "4-7", "0-3"]
    assert wanted_affinity("p-1", pool, ()).transfer_cores == "7"


# ---- on this machine ----


def test_this_machine_can_be_planned() -> None:
    cpus = usable_cpus()
    topology = read_topology(cpus)
    assert {cpu for core in topology.cores for cpu in core.cpus} == cpus
    plan = plan_workers(topology, workers(1))["w-0"]
    assert set(plan.affinity.cpus) <= cpus
