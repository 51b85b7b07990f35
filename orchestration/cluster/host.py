"""Interface between a launcher and the machines where processes run: this machine
(:mod:`splitserve.orchestration.hosts.local`) or a Ray cluster."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from splitserve.orchestration.cluster.supervision import Snapshot
from splitserve.orchestration.control.requests import AnyReply, AnyRequest
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec
from splitserve.orchestration.spec.expansion import RouterPorts

LMCACHE = "lmcache"
"""Name of the process that keeps LMCache's server. Also the stage that a worker reports once its node is known, if it
uses a server that the cluster starts (detail ``server``: the name of that process)."""


@dataclass(frozen=True, slots=True)
class ChildProgress:
    """Progress of a child's start (see the entries for their stages)."""

    name: str
    stage: str
    detail: dict[str, str]


@dataclass(frozen=True, slots=True)
class ChildExited:
    """End of a child, which was reaped. ``returncode`` is :class:`subprocess.Popen`'s."""

    name: str
    returncode: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Request to the launcher to stop, from a signal or from a command."""

    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Request of a command, and the callable that takes its reply."""

    request: AnyRequest
    answer: Callable[[AnyReply], None]


Event = ChildProgress | ChildExited | StopRequested | Asked


class Memory(msgspec.Struct, frozen=True):
    """State that a launcher needs to take over from another one."""

    snapshot: Snapshot
    membership: str  # "": the router didn't listen yet
    url: str  # likewise
    has_served: bool = False  # all of it was ready: its start is over


class Child(Protocol):
    """Started process. Its events go to the ``emit`` that it was started with; the last is its exit."""

    name: str

    @property
    def pid(self) -> int:
        """Process id; 0 while it isn't known."""

    @property
    def runs_on(self) -> str:
        """Machine and devices that the process runs on, for people."""

    def send_signal(self, signal_number: int) -> None: ...

    def kill(self) -> None: ...

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; returns False if it hasn't come in time."""

    def describe_exit(self, returncode: int) -> str:
        """Return the reason of the process's end, in one line without its name."""


class Host(Protocol):
    """Starter of processes. Methods raise :class:`SplitserveError` or :class:`OSError` if that is impossible."""

    def prepare(self, spec: ClusterSpec) -> None:
        """Check that the cluster can be started, before anything is."""

    def start_router(self, name: str, spec: ClusterSpec, ports: RouterPorts, emit: Callable[[Event], None]) -> Child:
        """Start a router. Its stage ``membership`` (detail ``endpoint``) lets workers start: a host that chooses the
        port emits it at once, otherwise the router does when it listens."""

    def start_worker(
        self, name: str, spec: ClusterSpec, pool: PoolSpec, membership: str, emit: Callable[[Event], None]
    ) -> Child: ...

    def start_lmcache(self, name: str, spec: ClusterSpec, emit: Callable[[Event], None]) -> Child:
        """Start the LMCache server that workers have named at the stage :data:`LMCACHE`."""

    def has_room(self, pool: PoolSpec) -> bool:
        """Return whether one more worker of the pool could start now."""

    def release(self, name: str) -> None:
        """Free the devices of a worker or an LMCache server that has ended."""

    def remember(self, memory: Memory) -> None:
        """Store the state that a launcher needs to take over from this one, if the host supports that."""

    def close(self) -> None: ...
