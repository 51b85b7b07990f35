"""Simulated machines: network namespaces of this one, each with an address of its own and a Ray node in it.

They share memory and processors, but not the network: traffic between them crosses a bridge. Needs root and ``ip``.
Everything is found by its name, and processes by their namespace; nothing is ended by a program's name.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitserve.common.errors import SplitserveError

RAY_PORT = 6379
START_SECONDS = 60.0
_OBJECT_STORE_BYTES = 80_000_000


class MachinesError(SplitserveError):
    """Failure to create the namespaces, or to start Ray in them."""


@dataclass(frozen=True, slots=True)
class Machine:
    namespace: str
    address: str


class Machines:
    """Set of machines: a context manager that removes all of them at its end. The first one is Ray's head."""

    def __init__(self, num_cpus: int, environment: Mapping[str, str]) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise MachinesError("network namespaces need root and the program ip (Debian: iproute2)")
        self._id = secrets.token_hex(2)
        self._net = f"10.{77 + int(self._id[:1], 16)}.{int(self._id[1:3], 16)}"
        self._bridge = f"ssb{self._id}"
        self._num_cpus = num_cpus
        self._made = 0
        self.machines: list[Machine] = []
        # The same token for all: Ray nodes that are started one by one don't know each other's otherwise.
        self._environment = {
            **os.environ,
            "RAY_memory_monitor_refresh_ms": "0",  # they share one machine's memory with other programs
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            **environment,
        }
        self.folder = Path(tempfile.mkdtemp(prefix="ssray-"))

    def __enter__(self) -> "Machines":
        # An address of its own: by default a bridge takes that of a port, which would change when the port's machine
        # dies; the others would then send to the old address until their caches expire.
        mac = f"02:00:00:00:{self._id[:2]}:{self._id[2:]}"
        _ip("link", "add", self._bridge, "address", mac, "type", "bridge")
        _ip("addr", "add", f"{self._net}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        return self

    def __exit__(self, *_error: object) -> None:
        for machine in list(self.machines):
            self.kill(machine)
        with contextlib.suppress(MachinesError):
            _ip("link", "del", self._bridge)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def ray_address(self) -> str:
        return f"{self.machines[0].address}:{RAY_PORT}"

    def add(self) -> Machine:
        """Add a machine, with a Ray node that has joined."""
        index, self._made = self._made, self._made + 1
        machine = Machine(f"ss{self._id}n{index}", f"{self._net}.{10 + index}")
        outer, inner = f"{machine.namespace}o", f"{machine.namespace}i"
        _ip("netns", "add", machine.namespace)
        self.machines.append(machine)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        _ip("link", "set", outer, "master", self._bridge, "up")
        _ip("link", "set", inner, "netns", machine.namespace)
        _ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", inner)
        _ip("-n", machine.namespace, "link", "set", inner, "up")
        _ip("-n", machine.namespace, "link", "set", "lo", "up")
        # Ray finds the machine's own address by this route.
        _ip("-n", machine.namespace, "route", "add", "default", "via", f"{self._net}.1")
        self._start_ray(machine, is_head=index == 0)
        return machine

    def kill(self, machine: Machine) -> None:
        """Kill everything on the machine, as if its power was cut."""
        for pid in _pids_in(machine):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.machines.remove(machine)
        with contextlib.suppress(MachinesError):
            _ip("link", "del", f"{machine.namespace}o")
        with contextlib.suppress(MachinesError):
            _ip("netns", "del", machine.namespace)

    def pids_in(self, machine: Machine) -> set[int]:
        """Return all processes on the machine."""
        return set(_pids_in(machine))

    def kill_raylet(self, machine: Machine) -> None:
        """Kill only Ray's process; the machine and its network stay."""
        for pid in _pids_in(machine):
            if _program_of(pid) == "raylet":
                os.kill(pid, signal.SIGKILL)

    def cut_off(self, machine: Machine) -> None:
        """Drop all packets to and from the machine, without any signal to either side; all its processes continue."""
        _ip("link", "set", f"{machine.namespace}o", "down")

    def reconnect(self, machine: Machine) -> None:
        _ip("link", "set", f"{machine.namespace}o", "up")

    def run(self, machine: Machine, arguments: Sequence[str], timeout_seconds: float = 180.0) -> str:
        """Return the output of ``splitserve`` with these arguments there. Raises :class:`MachinesError` if it fails."""
        command = ["ip", "netns", "exec", machine.namespace, sys.executable, "-m", "splitserve.orchestration.cli.main"]
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
            env=self._environment,
        )
        if done.returncode:
            raise MachinesError(f"splitserve {' '.join(arguments)}: {done.stdout[-1000:]} {done.stderr[-2000:]}")
        return done.stdout

    def _start_ray(self, machine: Machine, *, is_head: bool) -> None:
        where = ["--head", f"--port={RAY_PORT}", f"--temp-dir={self.folder}", "--include-dashboard=false"]
        if not is_head:
            where = [f"--address={self.ray_address}"]
        log_path = self.folder / f"{machine.namespace}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", machine.namespace, sys.executable, "-m", "ray.scripts.scripts", "start"),
                    *where,
                    *("--block", f"--node-ip-address={machine.address}", f"--num-cpus={self._num_cpus}"),
                    "--disable-usage-stats",
                    f"--object-store-memory={_OBJECT_STORE_BYTES}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in log_path.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise MachinesError(f"Ray didn't start: {log_path.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)


def _pids_in(machine: Machine) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", machine.namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def _program_of(pid: int) -> str:
    """Return the program of a process, "" if it has just ended."""
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachinesError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
