"""Requests to a running cluster and its replies: one set of messages for every transport.

A local cluster receives them on a socket (:mod:`.socket`), one on Ray through its controller. Everything is decoded
strictly. Requests that take time (scaling, draining, an upgrade) are answered when they have begun; the next
:class:`ClusterStatus` shows their progress.
"""

from typing import TypeAlias

import msgspec

from splitserve.common.errors import ConfigError, WireError
from splitserve.orchestration.cluster.restarts import AbandonedWorker, StartTimes
from splitserve.orchestration.cluster.rolling_upgrade import UpgradeState
from splitserve.orchestration.cluster.roster import WorkerPhase
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.conversion import convert_spec


class Request(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all requests."""


class GetStatus(Request, frozen=True):
    pass


class Scale(Request, frozen=True):
    pool: str
    count: int


class DrainWorker(Request, frozen=True):
    name: str
    force: bool = False  # although it is the last worker of its role


class UpgradeCluster(Request, frozen=True):
    """Replacement of all workers, one by one."""

    spec: dict[str, object] | None = None  # as plain data, whose name is ignored; None: the present one, for new code
    allow_gap: bool = False  # even if a pool's only worker must leave before its successor is ready

    def target(self, present: ClusterSpec) -> ClusterSpec:
        """Return the spec to upgrade to. Raises :class:`ConfigError`."""
        return present if self.spec is None else convert_spec({**self.spec, "name": present.name})


class Stop(Request, frozen=True):
    """End of everything now; requests in flight get an error."""


class Reply(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all replies."""


class Accepted(Reply, frozen=True):
    pass


class Refused(Reply, frozen=True):
    reason: str


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Status of a router, a worker or an LMCache server."""

    name: str
    pool: str = ""
    role: str = ""
    phase: WorkerPhase
    pid: int = 0
    runs_on: str = ""  # machine and devices, for people
    revision: int = 1
    num_restarts: int = 0
    seconds_ready: float | None = None  # None unless it is ready
    wanted: bool = True
    last_words: str = ""  # reason of its predecessor's end
    due_in_seconds: float | None = None  # time until its next start; None unless it waits for one
    times: StartTimes = StartTimes()  # of its last start, in seconds since 1970 by the clock of the cluster's launcher


class UpgradeStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: UpgradeState
    num_replaced: int
    num_workers: int
    problem: str = ""


class ClusterStatus(Reply, frozen=True, kw_only=True):
    """Status of a cluster and all its processes."""

    name: str
    version: str
    state: str  # starting, serving or stopping
    model: str
    url: str
    revision: int
    counts: dict[str, int]  # wanted workers by pool
    router: ProcessStatus
    workers: list[ProcessStatus]
    upgrade: UpgradeStatus | None = None
    more_routers: list[ProcessStatus] = []  # further router processes on the port
    lmcache: list[ProcessStatus] = []  # LMCache servers that the cluster keeps
    abandoned: list[AbandonedWorker] = []  # until their pool is scaled

    @property
    def is_upgrading(self) -> bool:
        return self.upgrade is not None and self.upgrade.state is UpgradeState.RUNNING

    @property
    def is_settled(self) -> bool:
        """State in which all workers are ready and no upgrade is running."""
        return not self.is_upgrading and all(worker.phase is WorkerPhase.READY for worker in self.workers)


AnyRequest: TypeAlias = GetStatus | Scale | DrainWorker | UpgradeCluster | Stop
AnyReply: TypeAlias = Accepted | Refused | ClusterStatus

_request_decoder: msgspec.json.Decoder[AnyRequest] = msgspec.json.Decoder(AnyRequest, strict=True)
_reply_decoder: msgspec.json.Decoder[AnyReply] = msgspec.json.Decoder(AnyReply, strict=True)


def encode(message: AnyRequest | AnyReply) -> bytes:
    return msgspec.json.encode(message)


def decode_request(data: bytes) -> AnyRequest:
    """Decode a request. Raises :class:`WireError`."""
    try:
        return _request_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the request can't be decoded: {error}") from error


def decode_reply(data: bytes) -> AnyReply:
    """Decode a reply. Raises :class:`WireError`."""
    try:
        return _reply_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the cluster's answer can't be read (is it another version?): {error}") from error


class RefusedError(ConfigError):
    """Refusal of a request by the cluster; the message is the cluster's own."""


def accepted(reply: AnyReply) -> None:
    """Raise :class:`RefusedError` unless the request was accepted."""
    if isinstance(reply, Refused):
        raise RefusedError(reply.reason)
