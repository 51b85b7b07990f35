"""Plan of cores, NUMA node and network device of each worker on a machine. Pure.

A worker stays on one node: its GPU's, or for CPU workers the one with the most cores per worker. The node's cores are
split between its CPU workers. In each share some cores are kept free of the model, for transfer threads and the engine
loop, so that a copy doesn't take a core from a running step; a share that is too small for that isn't divided. Nothing
is pinned if workers would have to share cores: the kernel schedules those better. A GPU worker is bound to its node,
except the cores of other GPUs' transfer threads; its own transfer threads have some cores for themselves. The network
device is the nearest one, for people: UCX finds it by itself, and its choice is set only if the spec names one.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from splitserve.common.errors import ConfigError
from splitserve.orchestration.hosts.topology import Core, PciDevice, Topology, format_list, parse_list
from splitserve.orchestration.spec.cluster_spec import PoolSpec
from splitserve.protocol.config import CoreAffinity

MIN_CORES_TO_SPLIT = 4
CORES_PER_TRANSFER_CORE = 8
MAX_TRANSFER_CORES = 2
TRANSFER_CORES_PER_GPU = 2
MIN_CORES_TO_SPLIT_PER_GPU = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """Worker to plan for."""

    name: str
    gpus: tuple[str, ...] = ()  # PCI addresses; none for a CPU worker
    # The rest is the user's choice, if given.
    pin: bool = True  # False: bind nothing
    cores: str = ""  # of the process
    transfer_cores: str = ""  # those of ``cores`` that are for transfers
    num_transfer_cores: int | None = None  # or their number
    node: int | None = None
    nic: str = ""


def wanted_affinity(name: str, pool: PoolSpec, gpus: tuple[str, ...]) -> Wanted:
    """Return the requirements of ``pool`` for its worker called ``name``; its number chooses among lists of cores."""
    index = int(name.rpartition("-")[2])
    chosen = pool.affinity
    return Wanted(
        name=name,
        gpus=gpus,
        pin=chosen.pin,
        cores=chosen.cores[index % len(chosen.cores)] if chosen.cores else "",
        transfer_cores=chosen.transfer_cores[index % len(chosen.transfer_cores)] if chosen.transfer_cores else "",
        num_transfer_cores=chosen.num_transfer_cores,
        node=chosen.numa_node,
        nic=chosen.nic,
    )


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Plan for one worker. Hardware threads are sorted."""

    name: str
    device: str
    node: int | None
    nic: str
    model_cpus: tuple[int, ...] = ()
    transfer_cpus: tuple[int, ...] = ()
    io_cpus: tuple[int, ...] = ()
    # Threads that a GPU worker is bound to: its node's, if the machine has other nodes, or those that the spec names.
    node_cpus: tuple[int, ...] = ()
    num_cores: int = 0
    why: str = ""  # the reason why the plan binds nothing; "" if it does

    @property
    def affinity(self) -> CoreAffinity:
        """Affinity of the worker's threads. In a GPU worker only transfer threads have cores of their own."""
        if self.device != "cpu":
            return CoreAffinity(cpus=self.node_cpus, transfer_cpus=self.transfer_cpus, numa_node=self.node)
        if self.why:
            return CoreAffinity(numa_node=self.node)
        together = tuple(sorted({*self.model_cpus, *self.transfer_cpus, *self.io_cpus}))
        return CoreAffinity(
            cpus=together, model_cpus=self.model_cpus, transfer_cpus=self.transfer_cpus, numa_node=self.node
        )

    def describe(self, *, keeps_awake: bool = False) -> str:
        """Describe the plan in one line for people. ``keeps_awake``: see ``EngineConfig.keep_cores_awake``."""
        text = self._describe()
        return f"{text}; on half of the cores, kept awake" if keeps_awake else text

    def _describe(self) -> str:
        where = "" if self.node is None else f", NUMA node {self.node}"
        nic = f", NIC {self.nic}" if self.nic else ""
        apart = f", transfer {format_list(self.transfer_cpus)}" if self.transfer_cpus else ""
        if self.device != "cpu" and not self.why:
            kept = f"kept on cores {format_list(self.node_cpus)}" if self.node_cpus else "not pinned: one NUMA node"
            return f"{self.device}{where}{nic}; {kept}{apart}"
        if self.why:
            return f"{self.device}{where}{nic}; not pinned: {self.why}"
        loop = f", I/O {format_list(self.io_cpus)}" if self.io_cpus else ""
        return f"{self.device}{where}{nic}; cores: model {format_list(self.model_cpus)}{apart}{loop}"


def plan_workers(topology: Topology, wanted: Sequence[Wanted], quota_cores: int | None = None) -> dict[str, WorkerPlan]:
    """Plan all workers. ``quota_cores``: number of cores whose time the cgroup may use, if that is limited.

    Raises :class:`ConfigError` for cores or nodes that this process doesn't have.
    """
    nodes = {each.name: _node_of(topology, each) for each in wanted}
    spread = _Spread(topology, Counter(node for node in nodes.values() if node is not None))
    for each in wanted:
        if nodes[each.name] is None and not each.gpus and not each.cores:
            nodes[each.name] = spread.next_node()
    limited = quota_cores is not None and quota_cores < len(topology.cores)
    chosen = {core.cpus for each in wanted if each.cores for core in _chosen(topology, each.name, each.cores)}
    shares: dict[str, list[Core]] = {}
    for node in set(nodes.values()):
        neighbours = [each.name for each in wanted if nodes[each.name] == node and not each.cores]
        cores = topology.cores if node is None else topology.cores_of(node)
        shares |= {} if limited else _split([core for core in cores if core.cpus not in chosen], neighbours)
    why = f"a CPU quota of {quota_cores} of {len(topology.cores)} cores" if limited else "more workers than cores"
    return {each.name: _plan(topology, each, nodes[each.name], shares.get(each.name, []), why) for each in wanted}


@dataclass
class _Spread:
    """Distribution of CPU workers over the nodes: each goes to the node with the most cores per worker."""

    topology: Topology
    num_workers: Counter[int]
    num_cores: Counter[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_cores = Counter(core.node for core in self.topology.cores)

    def next_node(self) -> int | None:
        """Return the next worker's node; None if there is only one, so that there is no choice."""
        may_allocate = {node.index for node in self.topology.nodes if node.may_allocate}
        candidates = [node for node in self.num_cores if node in may_allocate] or list(self.num_cores)
        best = max(
            candidates, key=lambda node: (self.num_cores[node] / (self.num_workers[node] + 1), -node), default=None
        )
        if best is not None:
            self.num_workers[best] += 1
        return best


def _node_of(topology: Topology, wanted: Wanted) -> int | None:
    """Return the node that follows from the user's choice or from the device; None if neither names one."""
    known = {node.index for node in topology.nodes}
    if wanted.node is not None:
        if wanted.node not in known:
            raise ConfigError(f"{wanted.name}: there is no NUMA node {wanted.node}; there are {format_list(known)}")
        return wanted.node
    if wanted.cores:
        nodes = {core.node for core in _chosen(topology, wanted.name, wanted.cores)}
        return nodes.pop() if len(nodes) == 1 else None
    nodes_of_gpus = {None if gpu is None else gpu.node for gpu in map(topology.gpu, wanted.gpus)}
    node = nodes_of_gpus.pop() if len(nodes_of_gpus) == 1 else None
    return node if node is not None and topology.cores_of(node) else None


def _chosen(topology: Topology, name: str, text: str) -> list[Core]:
    """Return the cores in the user's list of hardware threads."""
    try:
        cpus = parse_list(text)
    except ValueError:
        raise ConfigError(f"{name}: cores are {text!r}; write them like 0-7,16") from None
    usable = {cpu for core in topology.cores for cpu in core.cpus}
    if not cpus or cpus - usable:
        raise ConfigError(
            f"{name}: cores {format_list(cpus - usable) or 'none'} are not among those that this process may use: "
            f"{format_list(usable)}"
        )
    return [
        Core(tuple(cpu for cpu in core.cpus if cpu in cpus), core.node)
        for core in topology.cores
        if cpus & set(core.cpus)
    ]


def _split(cores: Sequence[Core], workers: Sequence[str]) -> dict[str, list[Core]]:
    """Split cores into even shares of adjacent ones; empty shares if there are too few."""
    if not workers or len(cores) < len(workers):
        return {}
    share, remainder = divmod(len(cores), len(workers))
    shares, start = {}, 0
    for index, name in enumerate(workers):
        end = start + share + (index < remainder)
        shares[name] = list(cores[start:end])
        start = end
    return shares


def _plan(topology: Topology, wanted: Wanted, node: int | None, share: list[Core], why_none: str) -> WorkerPlan:
    gpu: PciDevice | None = topology.gpu(wanted.gpus[0]) if wanted.gpus else None
    nic = topology.nearest_nic(gpu, node)
    device = f"{len(wanted.gpus)} GPU{'s' if len(wanted.gpus) > 1 else ''}" if wanted.gpus else "cpu"
    plan = WorkerPlan(wanted.name, device, node, wanted.nic or (nic.name if nic else ""))
    cores = _chosen(topology, wanted.name, wanted.cores) if wanted.cores else share
    if not wanted.pin:
        return replace(plan, why="as the spec says")
    if wanted.gpus:
        return _plan_gpus(topology, wanted, plan)
    if not cores:
        return replace(plan, why=why_none)
    if wanted.transfer_cores:
        transfer = _chosen(topology, wanted.name, wanted.transfer_cores)
        kept = {cpu for core in transfer for cpu in core.cpus}
        model, loop = [core for core in cores if not kept & set(core.cpus)] or cores, transfer
    elif wanted.num_transfer_cores is not None or len(cores) >= MIN_CORES_TO_SPLIT:
        model, transfer, loop = _apart(wanted, cores)
    elif len(cores) == len(topology.cores):
        return replace(plan, num_cores=len(cores), why="too few cores to reserve any for transfers")
    else:
        model, transfer, loop = cores, [], []
    return replace(
        plan, model_cpus=_cpus(model), transfer_cpus=_cpus(transfer), io_cpus=_cpus(loop), num_cores=len(model)
    )


def _plan_gpus(topology: Topology, wanted: Wanted, plan: WorkerPlan) -> WorkerPlan:
    """Return ``plan`` with the cores that a GPU worker is bound to (its GPUs' nodes' if the machine has other nodes)
    and those of its transfer threads. Pools plan their workers one by one, so nothing depends on other workers."""
    gpus = [gpu for gpu in map(topology.gpu, wanted.gpus) if gpu is not None and gpu.node is not None]
    nodes = {gpu.node for gpu in gpus} if len(gpus) == len(wanted.gpus) and wanted.node is None else {plan.node}
    gpus = [gpu for gpu in gpus if gpu.node in nodes]
    kept: list[Core] = []
    if wanted.cores:
        kept = _chosen(topology, wanted.name, wanted.cores)
    elif None not in nodes and len(nodes) < len(topology.nodes):
        kept = [core for core in topology.cores if core.node in nodes]
    if wanted.transfer_cores:
        transfer = _chosen(topology, wanted.name, wanted.transfer_cores)
    elif wanted.cores:
        transfer = kept[len(kept) - _num_apart(wanted, kept, 0) :]
    else:
        transfer = [core for gpu in gpus for core in _cores_of_gpu(topology, wanted, gpu, by_default=bool(kept))]
        others = [gpu for gpu in topology.gpus if gpu not in gpus and gpu.node in nodes]
        theirs = [core for gpu in others for core in _cores_of_gpu(topology, wanted, gpu, by_default=bool(kept))]
        kept = [core for core in kept if core not in theirs]
    return replace(plan, node_cpus=_cpus({*kept, *transfer} if kept else ()), transfer_cpus=_cpus(transfer))


def _cores_of_gpu(topology: Topology, wanted: Wanted, gpu: PciDevice, *, by_default: bool) -> list[Core]:
    """Choose cores for the transfers of a GPU's worker: the last ones of the GPU's even share of its node."""
    neighbours = [other.name for other in topology.gpus if other.node == gpu.node]
    share = [] if gpu.node is None else _split(topology.cores_of(gpu.node), neighbours).get(gpu.name, [])
    usual = TRANSFER_CORES_PER_GPU if by_default and len(share) >= MIN_CORES_TO_SPLIT_PER_GPU else 0
    return share[len(share) - _num_apart(wanted, share, usual) :]


def _num_apart(wanted: Wanted, cores: Sequence[Core], usual: int) -> int:
    """Return how many of ``cores`` are reserved for transfers. Raises :class:`ConfigError` if none would be left."""
    number = usual if wanted.num_transfer_cores is None else wanted.num_transfer_cores
    if number and number >= len(cores):
        raise ConfigError(
            f"{wanted.name}: num_transfer_cores is {number}, of {len(cores)} cores; leave one or more to the model"
        )
    return number


def _cpus(cores: Iterable[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))


def _apart(wanted: Wanted, cores: list[Core]) -> tuple[list[Core], list[Core], list[Core]]:
    """Split cores: for the model, for transfers, for the engine loop; the last ones are kept free of the model."""
    usual = min(MAX_TRANSFER_CORES, max(1, len(cores) // CORES_PER_TRANSFER_CORE))
    num_transfer = _num_apart(wanted, cores, usual)
    num_loop = 1 if len(cores) >= 2 * MIN_CORES_TO_SPLIT and len(cores) > num_transfer + 1 else 0
    num_model = len(cores) - num_transfer - num_loop
    transfer = cores[num_model : num_model + num_transfer]
    return cores[:num_model], transfer, cores[num_model + num_transfer :] or transfer
