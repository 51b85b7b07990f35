"""Facts about this machine for the doctor. This module collects them; the checks judge them."""

import ctypes
import errno
import importlib.metadata
import json
import platform
import queue
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil

from splitserve import __version__
from splitserve.common.cores import available_cores, usable_cpus
from splitserve.common.errors import ConfigError, SplitserveError
from splitserve.orchestration.cli.client import processes_of
from splitserve.orchestration.cli.requirements import requirements_of
from splitserve.orchestration.control.state_folder import known_clusters
from splitserve.orchestration.hosts.gpus import Gpu, list_gpus
from splitserve.orchestration.hosts.shared_memory import SHARED_MEMORY
from splitserve.orchestration.hosts.topology import Topology, read_topology

_PROBE_SECONDS = 120.0
_SLEEP_SECONDS = 0.005
_WAKE_ROUNDS = 41
_RDMA_DEVICES = Path("/sys/class/infiniband")
_TIME_ERROR = 5  # status of adjtimex: the clock isn't synchronised


@dataclass(frozen=True, slots=True)
class Package:
    """Python package that Splitserve requires."""

    name: str
    wanted: str  # the versions that we accept, like ``>=2.11,<2.14``
    version: str | None  # None: it isn't installed
    fits: bool


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts from PyTorch. See :mod:`splitserve.kvconnector.cuda.machine_probe`."""

    torch: str
    cuda: str | None
    gpus: list[dict[str, object]] = []
    peer_access: list[tuple[int, int, bool]] = []
    copied: str = ""
    copy_bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class PortUser:
    """Process that listens on a port."""

    pid: int  # 0: another user's process
    name: str
    is_splitserve: bool  # it answers as our endpoints do


@dataclass(frozen=True, slots=True)
class DeadCluster:
    """Cluster that has left processes or files behind its dead launcher."""

    name: str
    num_processes: int


@dataclass(frozen=True)
class MachineFacts:
    """Facts about this machine."""

    packages: tuple[Package, ...]
    num_cores: int
    wake_seconds: float
    topology: Topology
    gpus: tuple[Gpu, ...] | str  # or the reason why they can't be listed
    # Facts from PyTorch, or the reason why there are none; None if PyTorch wasn't loaded.
    torch: TorchFacts | str | None
    memlock_bytes: int | None  # None: no limit
    max_open_files: int | None  # None: no limit
    shared_memory_bytes: int | None
    memory_bytes: int
    rdma_devices: tuple[str, ...] = ()
    clock_is_synchronised: bool | None = None  # None: the kernel doesn't report it
    dead_clusters: tuple[DeadCluster, ...] = ()


def look_at_machine() -> MachineFacts:
    """Collect all facts but PyTorch's (:func:`with_torch`)."""
    gpus: tuple[Gpu, ...] | str
    try:
        gpus = tuple(list_gpus())
    except ConfigError as error:
        gpus = str(error)
    shared_memory = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    return MachineFacts(
        packages=required_packages(with_gpus=bool(gpus)),
        num_cores=available_cores(),
        wake_seconds=wake_seconds(),
        topology=read_topology(usable_cpus()),
        gpus=gpus,
        torch=None,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        max_open_files=_limit(resource.RLIMIT_NOFILE),
        shared_memory_bytes=shared_memory,
        memory_bytes=psutil.virtual_memory().total,
        rdma_devices=tuple(sorted(entry.name for entry in _RDMA_DEVICES.iterdir())) if _RDMA_DEVICES.is_dir() else (),
        clock_is_synchronised=_clock_is_synchronised(),
        dead_clusters=tuple(_dead_clusters()),
    )


def with_torch(facts: MachineFacts) -> MachineFacts:
    """Add PyTorch's facts, which another process collects: loading it takes some seconds."""
    return replace(facts, torch=ask_torch())


def wake_seconds() -> float:
    """Measure the seconds until a thread that has slept for some milliseconds runs: the median of several times."""
    asked, woken = queue.SimpleQueue[bool](), queue.SimpleQueue[float]()

    def sleep() -> None:
        while asked.get():
            woken.put(time.perf_counter())

    thread = threading.Thread(target=sleep, name="sleeper", daemon=True)
    thread.start()
    found = []
    for _ in range(_WAKE_ROUNDS):
        time.sleep(_SLEEP_SECONDS)
        called = time.perf_counter()
        asked.put(True)
        found.append(woken.get() - called)
    asked.put(False)
    thread.join()
    return statistics.median(found)


def required_packages(*, with_gpus: bool) -> tuple[Package, ...]:
    """Return the packages that our own metadata requires, with the installed versions; only Splitserve itself if it
    runs without being installed."""
    try:
        requirements = requirements_of(("", "gpu") if with_gpus else ("",))
    except importlib.metadata.PackageNotFoundError:
        return (Package("splitserve", "", None, fits=False),)
    found = []
    for wanted in requirements:
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        fits = version is not None and wanted.specifier.contains(version.partition("+")[0], prereleases=True)
        found.append(Package(wanted.name, str(wanted.specifier), version, fits))
    return tuple(found)


def ask_torch(copy_bytes: int = 0) -> TorchFacts | str:
    """Return the facts from PyTorch, loaded in a process of its own, or the reason why there are none. ``copy_bytes``:
    time a copy of that size."""
    command = [sys.executable, "-m", "splitserve.kvconnector.cuda.machine_probe", "--bytes", str(copy_bytes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"PyTorch's facts can't be read: {error}"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=TorchFacts)
    except (msgspec.DecodeError, IndexError) as error:
        return f"its facts can't be decoded: {error}"


def versions_of(*names: str) -> list[str]:
    """Return ``name version`` of the installed packages among ``names``, Splitserve and Python first."""
    found = [f"splitserve {__version__}", f"Python {platform.python_version()}"]
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def port_user(host: str, port: int) -> PortUser | str | None:
    """Return the process that listens on ``port`` of ``host``, or as text why no process could; None if the port is
    free.

    Port 0 is always free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            return None
        except OverflowError:
            return "ports go up to 65535"
        except OSError as error:
            name = error.strerror or str(error)
            if error.errno != errno.EADDRINUSE:
                return name
    try:
        holders = [each for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port]
        listening = [each.pid for each in holders if each.status == psutil.CONN_LISTEN and each.pid]
        pid = listening[0] if listening else 0
        name = psutil.Process(pid).name() if pid else name
    except (psutil.Error, OSError):
        pid = 0
    return PortUser(pid, name, _answers_as_ours(host, port))


def _answers_as_ours(host: str, port: int) -> bool:
    from splitserve.orchestration.doctor.http import Endpoint

    address = f"[{host}]" if ":" in host else host
    try:
        reply = Endpoint(f"http://{address}:{port}", timeout_seconds=2.0).get("/openapi.json")
        return b'"Splitserve"' in reply.body
    except (SplitserveError, json.JSONDecodeError):
        return False


def _dead_clusters() -> Sequence[DeadCluster]:
    found = []
    for folder in known_clusters():
        if not folder.is_claimed() and not folder.may_be_on_ray():
            found.append(DeadCluster(folder.name, len(processes_of(folder.path))))
    return found


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _clock_is_synchronised() -> bool | None:
    """Read the clock's state from the kernel, to which NTP daemons report."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        state = int(library.adjtimex(ctypes.create_string_buffer(512)))  # modes 0: nothing is changed
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR
