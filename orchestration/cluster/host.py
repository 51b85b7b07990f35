"""What a launcher needs of the place where processes run: this machine (:mod:`splitserve.orchestration.hosts.local`) or
a Ray cluster."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from splitserve.orchestration.cluster.supervision import Snapshot
from splitserve.orchestration.control.requests import AnyReply, AnyRequest
from splitserve.orchestration.spec.cluster_spec import ClusterSpec, PoolSpec
from splitserve.orchestration.spec.expansion import RouterPorts

LMCACHE = "lmcache"
"""The name of the process that keeps LMCache's server; and the stage at which a worker's place is known that uses one
which the cluster starts (``server``: the name of that process)."""


@dataclass(frozen=True, slots=True)
class ChildProgress:
    """A child reports a step of its start (see the entries for their stages)."""

    name: str
    stage: str
    detail: dict[str, str]


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A child has ended and was reaped. ``returncode`` is :class:`subprocess.Popen`'s."""

    name: str
    returncode: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal, or somebody, asks the launcher to stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and where its reply goes."""

    request: AnyRequest
    answer: Callable[[AnyReply], None]


Event = ChildProgress | ChildExited | StopRequested | Asked


class Memory(msgspec.Struct, frozen=True):
    """What a launcher must know that goes on in place of another one; "": the router didn't listen yet."""

    snapshot: Snapshot
    membership: str
    url: str


class Child(Protocol):
    """A process that was started. Its events go to the ``emit`` that it was started with; the last is its exit."""

    name: str

    @property
    def pid(self) -> int:
        """0 where it isn't known (yet)."""

    @property
    def place(self) -> str:
        """Where it runs, for people."""

    def send_signal(self, signal_number: int) -> None: ...

    def kill(self) -> None: ...

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end; False if it hasn't come in time."""

    def describe_exit(self, returncode: int) -> str:
        """Why it ended, in one line without its name."""


class Host(Protocol):
    """Starts processes. Methods raise :class:`SplitserveError` or :class:`OSError` for what can't be."""

    def prepare(self, spec: ClusterSpec) -> None:
        """Check, before anything is started, that the cluster can be."""

    def start_router(self, spec: ClusterSpec, ports: RouterPorts, emit: Callable[[Event], None]) -> Child: ...

    def start_worker(
        self, name: str, spec: ClusterSpec, pool: PoolSpec, membership: str, emit: Callable[[Event], None]
    ) -> Child: ...

    def start_lmcache(self, name: str, spec: ClusterSpec, emit: Callable[[Event], None]) -> Child:
        """The LMCache server that workers have named at the stage :data:`LMCACHE`."""

    def has_room(self, pool: PoolSpec) -> bool:
        """Whether one more worker of the pool could start now."""

    def release(self, name: str) -> None:
        """The worker, or the LMCache server, is gone: its devices are free."""

    def remember(self, memory: Memory) -> None:
        """Keep what a launcher needs to know that goes on in place of this one, where there may be such a launcher."""

    def close(self) -> None: ...
