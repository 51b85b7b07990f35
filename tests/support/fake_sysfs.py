"""Machines as sysfs shows them, written below a folder. Not a test module."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def write_machine(
    root: Path,
    *,
    nodes: int = 1,
    cores_per_node: int = 4,
    threads_per_core: int = 1,
    offline: Sequence[int] = (),
    memory_gib: Mapping[int, int] | None = None,
    gpu_nodes: Sequence[int] = (),
    nic_nodes: Sequence[int] = (),
    rdma_nodes: Sequence[int] = (),
) -> Path:
    """CPUs are numbered as Linux does on most servers: first all cores, node by node, then their second threads.

    GPUs and network devices hang on the nodes that are given (-1: the platform doesn't say), each under a bridge of its
    node; RDMA devices share the bridge of the GPU with their index, if there is one.
    """
    system = root / "devices/system"
    num_cores = nodes * cores_per_node
    num_cpus = num_cores * threads_per_core
    online = [cpu for cpu in range(num_cpus) if cpu not in offline]
    _write(system / "cpu/online", ",".join(map(str, online)))
    for cpu in range(num_cpus):
        if cpu not in offline:  # the kernel shows no topology of a thread that is off
            siblings = [cpu % num_cores + n * num_cores for n in range(threads_per_core)]
            mine = [sibling for sibling in siblings if sibling not in offline]
            _write(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", ",".join(map(str, mine)))
    for node in range(nodes):
        members = [cpu for cpu in online if cpu % num_cores // cores_per_node == node]
        _write(system / f"node/node{node}/cpulist", ",".join(map(str, members)))
        kib = (memory_gib or {}).get(node, 64) << 20
        _write(
            system / f"node/node{node}/meminfo", f"Node {node} MemTotal:       {kib} kB\nNode {node} MemFree: 1 kB\n"
        )
    for index, node in enumerate(gpu_nodes):
        address = f"0000:{0x18 + index:02x}:00.0"
        _device(root, _bus(node, index), address, node, {"vendor": "0x10de", "class": "0x030200"})
    for index, node in enumerate(nic_nodes):
        address = f"0000:{0x80 + index:02x}:00.0"
        path = _device(root, f"pci0000:7{max(node, 0)}/0000:7{max(node, 0)}:01.0", address, node, {"vendor": "0x8086"})
        _link(root / f"class/net/eth{index}/device", path)
    (root / "class/net/lo").mkdir(parents=True, exist_ok=True)
    for index, node in enumerate(rdma_nodes):
        path = _device(root, _bus(node, index), f"0000:{0xA0 + index:02x}:00.0", node, {"vendor": "0x15b3"})
        _link(root / f"class/infiniband/mlx5_{index}/device", path)
        (root / f"class/infiniband/mlx5_{index}/ports/1").mkdir(parents=True)
    return root


def _bus(node: int, index: int) -> str:
    return f"pci0000:{0x10 + max(node, 0):02x}/0000:{0x10 + max(node, 0):02x}:{index:02x}.0"


def _device(root: Path, bus: str, address: str, node: int, files: Mapping[str, str]) -> Path:
    path = root / "devices" / bus / address
    for name, text in {"numa_node": str(node), "class": "0x020000", **files}.items():
        _write(path / name, text)
    _link(root / "bus/pci/devices" / address, path)
    return path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
