"""Checks after a storm: blocks, processes, threads, handles, shared memory and memory must be as before."""

import os
import re
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from splitserve.protocol.handover.reads import ReadPath

HELD_GAUGES = (
    "blocks_referenced",
    "blocks_quarantined",
    "reads_in_flight",
    "requests_tracked",
    "requests_in_flight",
    "num_running",
    "num_waiting",
)
RUN_VARIABLE = "SPLITSERVE_CHAOS_RUN"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only read
SYSV_SHARED_MEMORY = Path("/proc/sysvipc/shm")


@dataclass(frozen=True, slots=True)
class Metrics:
    """Samples of the router's metrics page."""

    workers: dict[str, dict[str, float]]  # gauges and counters of each worker, by worker and by name
    totals: dict[str, float]  # the router's own samples, by name with labels

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        workers: dict[str, dict[str, float]] = {}
        totals: dict[str, float] = {}
        for name, labels, value in re.findall(r"^splitserve_(\w+)(\{.*\})? (\S+)$", text, re.MULTILINE):
            if name.startswith("worker_"):
                worker = dict(re.findall(r'(\w+)="([^"]*)"', labels))["worker"]
                workers.setdefault(worker, {})[name.removeprefix("worker_")] = float(value)
            else:
                totals[name + labels] = float(value)
        return cls(workers, totals)

    @property
    def ready(self) -> set[str]:
        return {name for name, values in self.workers.items() if values.get("ready")}

    def held(self) -> list[str]:
        """Describe what is still held for requests; empty when the cluster is idle."""
        found = [
            f"{worker}: {gauge} {values[gauge]:g}"
            for worker, values in sorted(self.workers.items())
            for gauge in HELD_GAUGES
            if values.get(gauge)
        ]
        in_flight = self.totals.get("requests_in_flight", 0.0)
        return [*found, f"router: requests_in_flight {in_flight:g}"] if in_flight else found

    def free_or_cached(self) -> dict[str, int]:
        return {name: int(v["blocks_free"] + v["blocks_cached"]) for name, v in self.workers.items()}

    def reads_by_path(self) -> dict[str, int]:
        """Return the reads of KV by path, of the workers' present processes."""
        counts = Counter[str]()
        for values in self.workers.values():
            for path in ReadPath:
                counts[path.value] += int(values.get(f"reads_{path.value}_total", 0.0))
        return {path: count for path, count in counts.items() if count}

    def transports(self) -> list[str]:
        """Return the transports of the workers' links."""
        return sorted({found for key in self.totals for found in re.findall(r'^link_bytes_.*transport="([^"]*)"', key)})

    def labelled(self, name: str) -> dict[str, float]:
        """Return samples of one counter by their labels, as ``label=value`` pairs."""
        prefix = name + "{"
        return {
            key.removeprefix(prefix).rstrip("}").replace('"', ""): value
            for key, value in sorted(self.totals.items())
            if key.startswith(prefix)
        }


@dataclass(frozen=True, slots=True)
class ProcessState:
    pid: int
    resident_bytes: int
    threads: int
    handles: int

    @classmethod
    def of(cls, pid: int) -> "ProcessState":
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(pid, process.memory_info().rss, process.num_threads(), process.num_fds())


def process_states(pids: Mapping[str, int]) -> dict[str, ProcessState]:
    return {name: ProcessState.of(pid) for name, pid in pids.items()}


def growth(
    before: Mapping[str, ProcessState], after: Mapping[str, ProcessState], *, memory_bytes: int, handles: int
) -> list[str]:
    """Describe processes that use more than before, beyond the bounds.

    A worker that was started again is compared with the earlier workers of its role: it has done less than they had.
    """
    found = []
    for name, state in sorted(after.items()):
        peers = [other for peer, other in before.items() if _role(peer) == _role(name)]
        limits = {
            "resident MiB": (state.resident_bytes >> 20, (max(p.resident_bytes for p in peers) + memory_bytes) >> 20),
            "threads": (state.threads, max(p.threads for p in peers)),
            "handles": (state.handles, max(p.handles for p in peers) + handles),
        }
        found += [f"{name}: {value} {unit}, at most {most}" for unit, (value, most) in limits.items() if value > most]
    return found


def _role(name: str) -> str:
    return name.partition("-")[0]


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@dataclass(slots=True)
class Leftovers:
    """Leftovers of a run: found by comparison with the state before anything started.

    Children carry ``environment``, so that even an orphaned one is found. Shared memory is that of the children's own
    folders, other segments of UCX that no living process has mapped, and System V's by its creator.
    """

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    pids: set[int] = field(default_factory=set)
    threads: set[str] = field(default_factory=lambda: {thread.name for thread in threading.enumerate()})
    handles: int = field(default_factory=lambda: psutil.Process().num_fds())
    children: set[int] = field(default_factory=_children)
    shared_memory: set[str] = field(default_factory=lambda: set(_shared_memory_files()))

    @property
    def environment(self) -> dict[str, str]:
        return {RUN_VARIABLE: self.run_id}

    def note_pids(self, pids: Mapping[str, int]) -> None:
        """Note every process that ever belonged to the run, to recognise the owners of System V shared memory."""
        self.pids |= set(pids.values())

    def found(self) -> list[str]:
        """Describe everything that is left over."""
        found = [f"process {process.pid} ({process.name()})" for process in self._processes()]
        found += [f"child process {pid}" for pid in sorted(_children() - self.children)]
        found += [f"thread {thread.name}" for thread in threading.enumerate() if thread.name not in self.threads]
        handles = psutil.Process().num_fds()
        if handles > self.handles:
            found.append(f"{handles - self.handles} handles of this process")
        ours = f"splitserve-{os.getpid()}-"
        new = sorted(
            name for name in set(_shared_memory_files()) - self.shared_memory if name.startswith((ours, "ucx_"))
        )
        if new:
            mapped = _mapped_shared_memory()
            # UCX of any process here unlinks a segment right after its creation: what was just made is gone by now.
            stayed = (name for name in new if name not in mapped and (SHARED_MEMORY / name).exists())
            found += [f"shared memory {SHARED_MEMORY / name}" for name in stayed]
        return found + [f"System V shared memory {segment}" for segment in self._sysv_segments()]

    def _processes(self) -> Iterator[psutil.Process]:
        marker = f"{RUN_VARIABLE}={self.run_id}".encode()
        for process in psutil.process_iter():
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            except OSError:  # another user's process, or one that has just ended
                continue
            if marker in environment.split(b"\0"):
                yield process

    def _sysv_segments(self) -> list[str]:
        if not SYSV_SHARED_MEMORY.exists():
            return []
        header, *rows = (line.split() for line in SYSV_SHARED_MEMORY.read_text().splitlines())
        segment, creator = header.index("shmid"), header.index("cpid")
        return [row[segment] for row in rows if int(row[creator]) in self.pids]


def _shared_memory_files() -> list[str]:
    return os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []


def _mapped_shared_memory() -> set[str]:
    """Return the names of the files that a living process has mapped."""
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        names |= set(re.findall(rf" {SHARED_MEMORY}/(\S+)$", text, re.MULTILINE))
    return names
