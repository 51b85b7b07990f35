"""Topology of a machine as far as affinity needs it: cores, NUMA nodes, GPUs, network devices. From sysfs alone.

Everything is read below a root that is an argument, and only resources that this process may use count: its affinity
mask (which includes the cgroup's cpuset) and the memory nodes that it is allowed. A platform without sysfs is one node
with the CPUs of the mask.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
PROC = Path("/proc")
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"


@dataclass(frozen=True, slots=True)
class Core:
    """Physical core: its hardware threads that this process may use, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """NUMA node."""

    index: int
    memory_bytes: int
    may_allocate: bool  # whether this process may have memory there


@dataclass(frozen=True, slots=True)
class PciDevice:
    """GPU or network device."""

    name: str  # a GPU's PCI address, a network device's name in UCX
    node: int | None  # None: the platform doesn't report it
    path: tuple[str, ...]  # bridges above it, the root first


@dataclass(frozen=True, slots=True)
class Topology:
    """Cores, NUMA nodes and devices of a machine."""

    cores: tuple[Core, ...]  # in the order of their first hardware thread
    nodes: tuple[NumaNode, ...]
    gpus: tuple[PciDevice, ...] = ()
    nics: tuple[PciDevice, ...] = ()

    def cores_of(self, node: int) -> tuple[Core, ...]:
        return tuple(core for core in self.cores if core.node == node)

    def gpu(self, pci_bus_id: str) -> PciDevice | None:
        """Return the GPU with this address, as written by sysfs or by ``nvidia-smi`` (a longer domain, capital
        letters)."""
        wanted = normal_pci_address(pci_bus_id)
        return next((gpu for gpu in self.gpus if gpu.name == wanted), None)

    def nearest_nic(self, device: PciDevice | None, node: int | None) -> PciDevice | None:
        """Return the network device with the most bridges in common with ``device``, preferably on its node."""
        local = [nic for nic in self.nics if nic.node == node] if node is not None else []

        def distance(nic: PciDevice) -> tuple[int, str]:
            return (-_num_common(nic.path, device.path) if device else 0, nic.name)

        return min(local or self.nics, key=distance, default=None)


def read_topology(cpus: Collection[int], sys_root: Path = SYS, proc_root: Path = PROC) -> Topology:
    """Read the topology. ``cpus``: the hardware threads that this process may use (its affinity mask)."""
    folder = sys_root / "devices/system"
    online = parse_list(_read(folder / "cpu/online")) or set(cpus)
    usable = sorted(online & set(cpus))
    nodes = _nodes(folder / "node", proc_root)
    node_of = {cpu: node for node, members in _node_members(folder / "node").items() for cpu in members}
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in usable:
        siblings = parse_list(_read(folder / f"cpu/cpu{cpu}/topology/thread_siblings_list")) or {cpu}
        mine = tuple(sorted(siblings & set(usable) | {cpu}))
        cores.setdefault(mine, Core(mine, node_of.get(cpu, 0)))
    return Topology(
        cores=tuple(cores.values()),
        nodes=nodes or (NumaNode(0, 0, may_allocate=True),),
        gpus=_gpus(sys_root),
        nics=_nics(sys_root),
    )


def parse_list(text: str) -> set[int]:
    """Parse a list like ``0-2,5``, the kernel's notation. Raises :class:`ValueError` for anything else."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def format_list(cpus: Collection[int]) -> str:
    """Format ``{0, 1, 2, 5}`` as ``0-2,5``, the inverse of :func:`parse_list`."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def normal_pci_address(address: str) -> str:
    """Convert ``00000000:18:00.0`` to sysfs's form ``0000:18:00.0``."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _nodes(folder: Path, proc_root: Path) -> tuple[NumaNode, ...]:
    allowed = _allowed_memory_nodes(proc_root)
    return tuple(
        NumaNode(index, _memory_bytes(folder / f"node{index}"), allowed is None or index in allowed)
        for index in sorted(_node_members(folder))
    )


def _node_members(folder: Path) -> dict[int, set[int]]:
    """Return nodes with memory or processors, and the processors of each."""
    members = {}
    for entry in folder.glob("node[0-9]*") if folder.is_dir() else ():
        members[int(entry.name.removeprefix("node"))] = parse_list(_read(entry / "cpulist"))
    return members


def _memory_bytes(folder: Path) -> int:
    for line in _read(folder / "meminfo").splitlines():
        if "MemTotal:" in line:
            return int(line.split()[-2]) * 1024
    return 0


def _allowed_memory_nodes(proc_root: Path) -> set[int] | None:
    for line in _read(proc_root / "self/status").splitlines():
        if line.startswith("Mems_allowed_list:"):
            return parse_list(line.split(":", 1)[1])
    return None


def _gpus(sys_root: Path) -> tuple[PciDevice, ...]:
    found = []
    folder = sys_root / "bus/pci/devices"
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _read(entry / "vendor").strip() == _NVIDIA and _read(entry / "class").startswith(_DISPLAY_CLASS):
            found.append(PciDevice(entry.name, _node_of(entry), _bridges(entry)))
    return tuple(found)


def _nics(sys_root: Path) -> tuple[PciDevice, ...]:
    """Return RDMA devices by port, as UCX names them, if there are any; else the Ethernet devices of PCI."""
    rdma = []
    folder = sys_root / "class/infiniband"
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        ports = sorted(port.name for port in (entry / "ports").iterdir()) if (entry / "ports").is_dir() else ["1"]
        device = entry / "device"
        rdma += [PciDevice(f"{entry.name}:{port}", _node_of(device), _bridges(device)) for port in ports]
    if rdma:
        return tuple(rdma)
    folder = sys_root / "class/net"
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return tuple(
        PciDevice(entry.name, _node_of(entry / "device"), _bridges(entry / "device"))
        for entry in entries
        if (entry / "device").exists()
    )


def _node_of(device: Path) -> int | None:
    text = _read(device / "numa_node").strip()
    return int(text) if text and int(text) >= 0 else None


def _bridges(device: Path) -> tuple[str, ...]:
    """Return the PCI addresses of the bridges above the device."""
    return tuple(part for part in device.resolve().parts if part.startswith("pci") or part.count(":") == 2)[:-1]


def _num_common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
