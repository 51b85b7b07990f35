"""What can be asked of a running cluster, and what it answers: one set of messages, whichever way they travel.

A local cluster hears them on a socket (:mod:`.socket`), one on Ray through its controller. Everything is
decoded strictly. Requests that take their time (scaling, draining, an upgrade) are answered when they have begun; how
far they are is seen in the next :class:`ClusterStatus`.
"""

from typing import TypeAlias

import msgspec

from splitserve.common.errors import ConfigError, WireError
from splitserve.orchestration.cluster.restarts import StartTimes
from splitserve.orchestration.cluster.rolling_upgrade import UpgradeState
from splitserve.orchestration.cluster.roster import Phase
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


class UpgradeCluster(Request, frozen=True):
    """``spec``: as plain data, whose name doesn't matter; None: as it is, for new code."""

    spec: dict[str, object] | None = None
    allow_gap: bool = False

    def target(self, present: ClusterSpec) -> ClusterSpec:
        """Raises :class:`ConfigError`."""
        return present if self.spec is None else convert_spec({**self.spec, "name": present.name})


class Stop(Request, frozen=True):
    """End everything now; requests that are under way get an error."""


class Reply(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all replies."""


class Accepted(Reply, frozen=True):
    pass


class Refused(Reply, frozen=True):
    reason: str


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router or a worker. ``seconds_ready`` is None unless it is ready.

    ``place`` says where it runs, for people; ``last_words`` how its predecessor ended; ``times`` are those of its last
    start, in seconds since 1970 by the clock of the cluster's launcher.
    """

    name: str
    pool: str = ""
    role: str = ""
    phase: Phase
    pid: int = 0
    place: str = ""
    revision: int = 1
    num_restarts: int = 0
    seconds_ready: float | None = None
    wanted: bool = True
    last_words: str = ""
    times: StartTimes = StartTimes()


class UpgradeStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: UpgradeState
    num_replaced: int
    num_workers: int
    problem: str = ""


class ClusterStatus(Reply, frozen=True, kw_only=True):
    """``state``: starting, serving or stopping. ``counts``: workers that are wanted, by pool."""

    name: str
    version: str
    state: str
    model: str
    url: str
    revision: int
    counts: dict[str, int]
    router: ProcessStatus
    workers: list[ProcessStatus]
    upgrade: UpgradeStatus | None = None

    @property
    def is_upgrading(self) -> bool:
        return self.upgrade is not None and self.upgrade.state is UpgradeState.RUNNING

    @property
    def is_settled(self) -> bool:
        """Whether all that is wanted is there, and nothing else."""
        return not self.is_upgrading and all(worker.phase is Phase.READY for worker in self.workers)


AnyRequest: TypeAlias = GetStatus | Scale | DrainWorker | UpgradeCluster | Stop
AnyReply: TypeAlias = Accepted | Refused | ClusterStatus

_request_decoder: msgspec.json.Decoder[AnyRequest] = msgspec.json.Decoder(AnyRequest, strict=True)
_reply_decoder: msgspec.json.Decoder[AnyReply] = msgspec.json.Decoder(AnyReply, strict=True)


def encode(message: AnyRequest | AnyReply) -> bytes:
    return msgspec.json.encode(message)


def decode_request(data: bytes) -> AnyRequest:
    """Raises :class:`WireError`."""
    try:
        return _request_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"this is no request to a cluster: {error}") from error


def decode_reply(data: bytes) -> AnyReply:
    """Raises :class:`WireError`."""
    try:
        return _reply_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the cluster's answer can't be read (is it another version?): {error}") from error


class RefusedError(ConfigError):
    """The cluster doesn't do what it was asked for; the message is its own."""


def accepted(reply: AnyReply) -> None:
    """Raise :class:`RefusedError` unless the request was accepted."""
    if isinstance(reply, Refused):
        raise RefusedError(reply.reason)
