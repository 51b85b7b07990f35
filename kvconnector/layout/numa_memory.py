"""Host memory on a given NUMA node: bound before its first touch, checked afterwards.

If the kernel can't bind memory, or there is only one node, memory stays where it is.
"""

import ctypes
import logging
import mmap
import os
import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")
MPOL_BIND = 2
PAGES_LOOKED_AT_ONCE = 1 << 20
_SYSCALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}  # mbind, move_pages


def parse_cpu_list(text: str) -> set[int]:
    """Parse the kernel's notation: "0-2,5" is {0, 1, 2, 5}."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def node_of_cpus(cpus: set[int], nodes: Path = NODES) -> int | None:
    """Return the node that contains all of ``cpus``; None if they are spread over nodes, or if it is unknown."""
    for folder in nodes.glob("node[0-9]*"):
        try:
            if cpus <= parse_cpu_list((folder / "cpulist").read_text()):
                return int(folder.name.removeprefix("node"))
        except OSError:
            continue
    return None


def cpus_of_node(node: int, nodes: Path = NODES) -> set[int]:
    """Return the hardware threads of a node; an empty set if the platform doesn't report them."""
    try:
        return parse_cpu_list((nodes / f"node{node}" / "cpulist").read_text())
    except OSError:
        return set()


def node_of_gpu(device: torch.device, devices: Path = PCI_DEVICES) -> int | None:
    """Return the node that a GPU is attached to; None if the platform doesn't report it."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        address = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    except AttributeError:  # an older PyTorch
        return None
    try:
        text = (devices / "{:04x}:{:02x}:{:02x}.0".format(*address) / "numa_node").read_text()
    except OSError:
        return None
    return int(text) if int(text) >= 0 else None


def node_of_device(device: torch.device) -> int | None:
    """Return the node for a worker's host memory: that of its GPU, or that of the cores that it may use."""
    if device.type == "cuda":
        return node_of_gpu(device)
    return node_of_cpus(set(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


class HostMemory:
    """``num_bytes`` of zeroed host memory, allocated once, on ``node`` if given, of huge pages if possible.

    ``bytes``: uint8 ``[num_bytes]``. ``placement``: number of pages by node, as read back; empty if that isn't
    possible. Pages on nodes other than ``node`` are logged.
    """

    def __init__(self, num_bytes: int, node: int | None = None) -> None:
        self._buffer = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._buffer.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(self._buffer, dtype=np.uint8)
        self.node = node
        if node is not None and not _bind(self.address, num_bytes, node):
            logger.warning(
                "host memory can't be bound to NUMA node %d; each page is allocated on the node that touches it first",
                node,
            )
        self.bytes.fill(0)  # first touch
        self.placement = pages_by_node(self.address, num_bytes)
        if self.num_remote_bytes:
            logger.warning(
                "%d of %d bytes of host memory aren't on NUMA node %d", self.num_remote_bytes, num_bytes, node
            )

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    @property
    def num_remote_bytes(self) -> int:
        """Bytes on nodes other than ``node``."""
        return remote_bytes(self.placement, len(self.bytes), self.node)

    def describe(self) -> str:
        """Return a text for people: the size, and the share of pages by node."""
        total = sum(self.placement.values())
        shares = ", ".join(f"{count / total:.0%} on node {node}" for node, count in sorted(self.placement.items()))
        return f"{len(self.bytes) / 2**30:.2f} GiB" + (f", {shares}" if total else "")


def remote_bytes(pages: Mapping[int, int], num_bytes: int, node: int | None) -> int:
    """Return how many of ``num_bytes`` are on NUMA nodes other than ``node``, given the number of pages by node."""
    total = sum(pages.values())
    if node is None or not total:
        return 0
    return round(num_bytes * (total - pages.get(node, 0)) / total)


def _syscall_numbers() -> tuple[int, int] | None:
    return _SYSCALLS.get(platform.machine()) if platform.system() == "Linux" else None


def _bind(address: int, num_bytes: int, node: int) -> bool:
    numbers = _syscall_numbers()
    if numbers is None:
        return False
    mask = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    if node >= 16 * bits:
        return False
    mask[node // bits] = 1 << (node % bits)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), ctypes.c_int(MPOL_BIND), mask)
    return not libc.syscall(ctypes.c_long(numbers[0]), *arguments, ctypes.c_ulong(16 * bits), ctypes.c_uint(0))


def pages_by_node(address: int, num_bytes: int) -> dict[int, int]:
    """Count the pages by node, checking each page; return an empty dict if the platform can't report them."""
    numbers = _syscall_numbers()
    if numbers is None:
        return {}
    libc, found = ctypes.CDLL(None, use_errno=True), Counter[int]()
    for low in range(0, num_bytes, PAGES_LOOKED_AT_ONCE * mmap.PAGESIZE):
        high = min(low + PAGES_LOOKED_AT_ONCE * mmap.PAGESIZE, num_bytes)
        pages = np.arange(address + low, address + high, mmap.PAGESIZE, dtype=np.uint64)
        status = np.full(len(pages), -1, dtype=np.int32)
        pointers = ctypes.c_void_p(pages.ctypes.data), None, ctypes.c_void_p(status.ctypes.data)
        if libc.syscall(
            ctypes.c_long(numbers[1]), ctypes.c_int(0), ctypes.c_ulong(len(pages)), *pointers, ctypes.c_int(0)
        ):
            return {}
        nodes, counts = np.unique(status[status >= 0], return_counts=True)
        found.update(dict(zip(nodes.tolist(), counts.tolist(), strict=True)))
    return dict(found)
