"""Settings of every process. Frozen; defaults are written here once; they travel to child processes as JSON."""

from collections.abc import Iterator
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from splitserve.protocol.engine_config import ENDPOINT, MAX_MEMORY_BYTES, MAX_SECONDS, EngineConfig
from splitserve.protocol.placement.policies import DEFAULT_POLICY, PLACEMENT_POLICIES, POLICIES_IN_WORDS
from splitserve.protocol.request import Role
from splitserve.protocol.settings import Setting, problems_of

__all__ = [
    "AUTO",
    "NONE",
    "SECRETS",
    "Confidential",
    "CoreAffinity",
    "EngineConfig",
    "HttpLimits",
    "LMCacheConfig",
    "ProtocolConfig",
    "RouterConfig",
    "WorkerConfig",
    "protocol_problems",
]


SECRETS = ("secret", "api_key", "admin_key")

AUTO = "auto"
NONE = "none"

Duration: TypeAlias = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
Delay: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Bound: TypeAlias = Annotated[int, Meta(gt=0)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=2**16 - 1)]


class ProtocolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Time-outs and bounds of the hand-over protocol."""

    request_deadline_seconds: Annotated[
        Duration, Meta(description="Lifetime of a request, on every process by its own clock.")
    ] = 600.0
    lease_seconds: Annotated[
        Duration, Meta(description="How long prefill keeps blocks for a decode worker that has vanished.")
    ] = 10.0
    renew_interval_seconds: Annotated[Duration, Meta(description="Time between renewals of a lease.")] = 2.0
    offer_resend_seconds: Annotated[
        Delay, Meta(description="Time after which an unanswered offer or greeting is sent again.")
    ] = 0.5
    host_offer_after_seconds: Annotated[
        Delay,
        Meta(description="Time that decode has to read a complete offer before its blocks may move to the host tier."),
    ] = 0.5
    read_deadline_seconds: Annotated[
        Duration, Meta(description="Deadline of a read, plus its size over min_read_bytes_per_second.")
    ] = 5.0
    min_read_bytes_per_second: Annotated[float, Meta(gt=0, description="Slowest read that is no failure.")] = 50e6
    heartbeat_seconds: Annotated[Duration, Meta(description="Time between heartbeats of a worker.")] = 1.0
    dead_after_seconds: Annotated[Duration, Meta(description="Silence after which a worker counts as dead.")] = 5.0
    tombstone_seconds: Annotated[
        Delay, Meta(description="How long late messages of an ended request are recognised.")
    ] = 60.0
    drain_seconds: Annotated[Delay, Meta(description="Time that a draining worker has to finish its requests.")] = 30.0
    no_worker_wait_seconds: Annotated[
        Delay, Meta(description="How long a new request waits while no worker can take it.")
    ] = 10.0
    stream_keep_alive_seconds: Annotated[
        Duration, Meta(description="Silence of a stream after which it gets a comment.")
    ] = 5.0
    max_tombstones: Annotated[Bound, Meta(description="Ended requests that a worker remembers.")] = 4096
    max_parked: Annotated[Bound, Meta(description="Early messages that a worker keeps for later.")] = 1024
    max_requests: Annotated[Bound, Meta(description="Requests that a worker takes at once.")] = 4096
    max_requests_waiting: Annotated[Bound, Meta(description="New requests that wait in the router for a worker.")] = 256
    max_waiting_mib: Annotated[
        Bound, Meta(description="Bodies of requests that wait so, in MiB; a single one may be larger.")
    ] = 64
    max_peers: Annotated[Bound, Meta(description="Peers of a worker.")] = 256
    max_reads_in_flight_per_request: Annotated[
        Bound, Meta(description="Reads of one request that are posted at once.")
    ] = 2
    max_blocks_per_read: Annotated[Bound, Meta(description="Blocks of one read.")] = 256


def protocol_problems(protocol: ProtocolConfig) -> Iterator[tuple[str, str]]:
    """Fields, and what is wrong with them."""
    yield from problems_of(protocol)
    for shorter, longer in (("renew_interval_seconds", "lease_seconds"), ("heartbeat_seconds", "dead_after_seconds")):
        if not getattr(protocol, shorter) < getattr(protocol, longer):
            yield shorter, f"must be less than {longer} ({getattr(protocol, longer)}), got {getattr(protocol, shorter)}"


class Confidential(msgspec.Struct, frozen=True, kw_only=True):
    """Base of configs with secrets: those never show in a repr, and with that in no log and no traceback."""

    def __repr__(self) -> str:
        shown = (f"{name}={self._shown(name)}" for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(shown)})"

    def _shown(self, name: str) -> str:
        value = getattr(self, name)
        return "'...'" if name in SECRETS and value else repr(value)


class CoreAffinity(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware threads of a worker: those of its process (none: its affinity stays as it is), and among them those of
    its model and transfer threads. ``numa_node`` is the node of its host memory; None: not known, or any node."""

    cpus: tuple[int, ...] = ()
    model_cpus: tuple[int, ...] = ()
    transfer_cpus: tuple[int, ...] = ()
    numa_node: int | None = None


class WorkerConfig(Confidential, frozen=True, kw_only=True):
    """One worker process. ``membership`` is the endpoint that it registers with, or those of several router processes,
    separated by commas; ``host`` the address it binds.

    ``secret`` protects its side channels; see :mod:`splitserve.common.security`.
    """

    engine_id: str
    role: Role
    engine: EngineConfig
    membership: str
    host: str = "127.0.0.1"
    protocol: ProtocolConfig = ProtocolConfig()
    secret: str = ""
    affinity: CoreAffinity = CoreAffinity()
    request_log: bool = True  # a line when the work for a request is done; off: only if it failed


class LMCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An LMCache server on this machine, which listens at the loopback address and keeps KV in chunks."""

    memory_bytes: Annotated[
        int,
        Meta(ge=1 << 20, le=MAX_MEMORY_BYTES, description="Shared memory of the server: bytes, or like 16GiB."),
        Setting(flags=("--memory",), command="lmcache", metavar="SIZE", form="size", location="lmcache.memory"),
    ] = 4 << 30
    chunk_tokens: Annotated[
        int,
        Meta(ge=1, le=65536, description="Tokens of each piece of KV that is kept."),
        Setting(flags=("--chunk-tokens",), command="lmcache", metavar="N", location="lmcache.chunk_tokens"),
    ] = 256
    port: Annotated[
        Port,
        Meta(description="Port at the loopback address; 0 takes a free one."),
        Setting(flags=("--port",), command="lmcache", location="lmcache.port"),
    ] = 0
    backends: Annotated[
        tuple[str, ...],  # JSON objects
        Meta(description="Objects that LMCache's --l2-adapter takes, like {type: fs, base_path: /var/cache/lmcache}."),
        Setting(
            flags=("--backend",),
            command="lmcache",
            metavar="JSON",
            location="lmcache.backends",
            help='value of LMCache\'s --l2-adapter, like {"type": "fs", "base_path": "/var/cache/lmcache"}; repeatable',
        ),
    ] = ()
    environment: Annotated[
        str,
        Meta(description="Directory of the virtual environment with LMCache; empty: beside our own."),
        Setting(flags=("--environment",), command="lmcache", metavar="DIR", location="lmcache.environment"),
    ] = ""


MAX_ROUTERS = 16


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the router's HTTP connections (:mod:`splitserve.router.http.sockets.connections`)."""

    max_header_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=16 << 20,
            description="Bytes of a request line with its headers, and of the trailers after a body (431 beyond).",
        ),
    ] = 64 * 1024
    max_headers: Annotated[
        int, Meta(ge=1, le=65536, description="Headers of a request, and trailers after a body (431 beyond).")
    ] = 256
    header_seconds: Annotated[
        Duration,
        Meta(description="Time from a request's first byte, or a new connection, to the end of its headers (408)."),
    ] = 20.0
    keep_alive_seconds: Annotated[
        int, Meta(ge=1, le=int(MAX_SECONDS), description="Time that a connection may be idle between requests.")
    ] = 75
    linger_seconds: Annotated[
        Delay, Meta(description="Time that a refused client has to read the reason before its connection is closed.")
    ] = 2.0
    max_pipelined: Annotated[
        int, Meta(ge=1, le=4096, description="Requests that wait on one connection for the answer to another one.")
    ] = 16
    max_connections: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="Connections at once; 0: 8192, or twice as many as requests in flight, if that is more.",
        ),
    ] = 0


class RequestClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A class of requests, which clients name: its objectives and its priority."""

    name: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9_-]{0,38}$", description="Name that clients give.")]
    ttft_ms: Annotated[float, Meta(ge=0, description="Time to first token; 0: none.")] = 0.0
    itl_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="Time per output token after the first; workers size prompts beside outputs by it; 0: none.",
        ),
    ] = 0.0
    priority: Annotated[
        int, Meta(ge=-(2**31), lt=2**31, description="Lower begins sooner; a request's own priority wins.")
    ] = 0


class RouterConfig(Confidential, frozen=True, kw_only=True):
    """The router process.

    ``on_awake_cores`` keeps it on half of its machine's cores, as ``keep_cores_awake`` keeps workers there.
    ``peers``: the membership endpoints of the other router processes on the same port, by ``name``; these share the
    listening socket ``listener_fd`` (-1: the router has one of its own).
    ``secret`` protects its side channels; ``api_key`` is the key that /v1 requires of clients, "" for none;
    ``admin_key`` the one that /admin requires, "" for the same.
    """

    model: str
    served_model_name: str
    name: str = "router"
    peers: dict[str, str] = {}
    host: Annotated[
        str,
        Meta(min_length=1, description="Address that the endpoint binds."),
        Setting(flags=("--host",), form="address", group=ENDPOINT, location="router.host"),
    ] = "127.0.0.1"
    port: Annotated[
        Port,
        Meta(description="Port that the endpoint binds; 0 takes a free one."),
        Setting(flags=("--port",), group=ENDPOINT, location="router.port"),
    ] = 8000
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_ROUTERS,
            description="Router processes on the port. One uses one core; more help where that is busy. Not on Ray.",
        ),
        Setting(flags=("--router-workers",), metavar="N", group=ENDPOINT, location="router.workers"),
    ] = 1
    listener_fd: int = -1
    membership_host: str = "127.0.0.1"
    membership_port: Port = 0
    policy: Annotated[
        str,
        Meta(description=f"How requests are placed; {POLICIES_IN_WORDS}."),
        Setting(flags=("--policy",), choices=tuple(PLACEMENT_POLICIES), group=ENDPOINT, location="router.policy"),
    ] = DEFAULT_POLICY
    max_requests_in_flight: Annotated[
        int,
        Meta(ge=1, description="Requests in flight; clients get 429 beyond."),
        Setting(location="router.max_requests_in_flight"),
    ] = 1024
    max_body_mib: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Largest body of a request (413 beyond); parsing one MiB can hold all streams for 10 ms.",
        ),
        Setting(flags=("--max-body-mib",), metavar="MIB", group=ENDPOINT, location="router.max_body_mib"),
    ] = 4
    ttft_objective_ms: Annotated[
        float, Meta(ge=0, description="Time to first token; 0: none."), Setting(location="objectives.ttft_ms")
    ] = 0.0
    tpot_objective_ms: Annotated[
        float,
        Meta(
            ge=0,
            description="Time per output token after the first; workers size prompts beside outputs by it; 0: none.",
        ),
        Setting(location="objectives.tpot_ms"),
    ] = 0.0
    classes: Annotated[
        list[RequestClass],
        Meta(max_length=64, description="Classes of requests; one named default replaces that of these objectives."),
        Setting(location="objectives.classes"),
    ] = []
    tenants_file: Annotated[
        str,
        Meta(description="YAML file with the tenants' keys, shares and limits, read again on SIGHUP; empty: none."),
        Setting(flags=("--tenants",), metavar="FILE", form="path", group=ENDPOINT, location="router.tenants"),
    ] = ""
    request_log: Annotated[
        bool,
        Meta(description="Write a line to the log when a request ends, in each process; off: only if it failed."),
        Setting(flags=("--request-log",), group=ENDPOINT, location="router.request_log"),
    ] = True
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="OpenTelemetry collector that takes traces by OTLP over HTTP, like http://127.0.0.1:4318; "
            "empty: none."
        ),
        Setting(flags=("--otlp-endpoint",), metavar="URL", group=ENDPOINT, location="router.otlp_endpoint"),
    ] = ""
    trace_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Share of requests that are traced, where the client doesn't decide."),
        Setting(flags=("--trace-ratio",), metavar="RATIO", group=ENDPOINT, location="router.trace_ratio"),
    ] = 1.0
    on_awake_cores: bool = False
    response_template: Annotated[
        str,
        Meta(
            min_length=1,
            description="Form of the model's reasoning and tool calls: auto, none, the name of a known form, or a file "
            "of JSON.",
        ),
        Setting(
            flags=("--response-template",),
            metavar="NAME|FILE",
            form="name or path",
            group=ENDPOINT,
            location="router.response_template",
        ),
    ] = "auto"
    protocol: ProtocolConfig = ProtocolConfig()
    http: HttpLimits = HttpLimits()
    secret: str = ""
    api_key: str = ""
    admin_key: str = ""
    aliases: Annotated[
        list[str],
        Meta(description="Further ids that clients may use for the model."),
        Setting(location="model.aliases"),
    ] = []
    generation_config: Annotated[
        str,
        Meta(
            min_length=1,
            description="Source of sampling defaults, where a request sets none: auto for the model's "
            "generation_config.json, none for temperature 1 and no truncation, or a directory with that file.",
        ),
        Setting(
            flags=("--generation-config",),
            metavar="auto|none|DIR",
            form="source",
            group=ENDPOINT,
            location="router.generation_config",
        ),
    ] = AUTO
    chat_template: Annotated[
        str,
        Meta(description="File with a chat template (Jinja) that replaces the model's; empty: the model's."),
        Setting(
            flags=("--chat-template",), metavar="FILE", form="path", group=ENDPOINT, location="router.chat_template"
        ),
    ] = ""
    allowed_origins: Annotated[
        list[str],
        Meta(description="Origins of web pages that may call the endpoint (CORS), like https://app.example.com; or *."),
        Setting(flags=("--allowed-origins",), metavar="ORIGIN", group=ENDPOINT, location="router.allowed_origins"),
    ] = []
