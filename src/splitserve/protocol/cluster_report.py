"""The router's report of its cluster, for the search for faults: the answer of GET /admin/workers, as typed data.

Ages are in seconds at ``clock_seconds``, the router's Unix time.
"""

from enum import StrEnum

import msgspec

from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.membership import PeerLink, WorkerInfo


class WorkerState(StrEnum):
    """State of a registered worker, as membership sees it (docs/concepts/handover.md)."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A registered worker.

    ``silent_seconds``: since its last heartbeat, or since it registered. ``clock_offset_seconds``: how far its clock
    is ahead of the router's, minus the heartbeat's travel time; None before the first heartbeat.
    """

    info: WorkerInfo
    state: WorkerState
    silent_seconds: float
    num_heartbeats: int
    load: WorkerLoad
    links: list[PeerLink]
    clock_offset_seconds: float | None = None


class RefusedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker whose registration was refused, and that hasn't registered with other settings since."""

    engine_id: str
    machine: str
    endpoint: str
    reason: str
    seconds_ago: float


class Stranger(msgspec.Struct, frozen=True, kw_only=True):
    """Connections to membership that didn't show the cluster's secret. ``address``: where they came from."""

    address: str
    num_attempts: int
    seconds_ago: float


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """``model`` is the checkpoint's directory on the router's machine, ``membership`` the endpoint where workers
    register. ``has_secret``: whether side channels require a secret."""

    version: str
    machine: str
    pid: int
    clock_seconds: float
    model: str
    served_model_name: str
    membership: str
    has_secret: bool
    heartbeat_seconds: float
    dead_after_seconds: float
    workers: list[WorkerReport]
    refused: list[RefusedWorker] = []
    strangers: list[Stranger] = []
