"""The cluster spec: the parts of a cluster as pure data, in the shape of the YAML document that describes it.

:mod:`.document` reads and writes the document, :mod:`.expansion` derives the configs of the processes from it, and the
options of ``splitserve serve`` are a shorthand for it (:mod:`.shorthand`). Secrets are references (an environment
variable or a file), never values. A spec that can't work is refused with the location of each fault and a remedy.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from splitserve.common.errors import ConfigError
from splitserve.orchestration.spec.model_source import is_model_id
from splitserve.orchestration.spec.sizes import parse_bytes
from splitserve.protocol.config import HttpLimits, LMCacheConfig, ProtocolConfig, RequestClass, RouterConfig
from splitserve.protocol.engine_config import ENDPOINT, WORKERS, Device, Dtype, EngineConfig, LoadFormat, ModelBackend
from splitserve.protocol.request import Role
from splitserve.protocol.settings import Setting, description_of, hints_of, meta_of, setting_of

Name: TypeAlias = Annotated[str, Meta(pattern="^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
ModelName: TypeAlias = Annotated[str, Meta(min_length=1)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
NotNegative: TypeAlias = Annotated[int, Meta(ge=0)]

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
_ROUTER: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(RouterConfig)}
_LMCACHE: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(LMCacheConfig)}
_GIVEN_BACK_BYTES_PER_SECOND = 4 << 30  # 8 GiB of small pages took 1.3 s
API_KEY_VARIABLE = "SPLITSERVE_API_KEY"
ADMIN_KEY_VARIABLE = "SPLITSERVE_ADMIN_KEY"
SECRET_VARIABLE = "SPLITSERVE_SECRET"  # noqa: S105 - a variable's name
SECRET_VARIABLES = frozenset({SECRET_VARIABLE, API_KEY_VARIABLE, ADMIN_KEY_VARIABLE})

_ENGINE_HINTS = hints_of(EngineConfig)
_ROUTER_HINTS = hints_of(RouterConfig)
_LMCACHE_HINTS = hints_of(LMCacheConfig)


def locations_of(config: type[Struct]) -> dict[str, str]:
    """Return the locations of those fields of ``config`` that name one; ``pools[]`` stands for each pool."""
    return {field: location for field, hint in hints_of(config).items() if (location := setting_of(hint).location)}


LOCATIONS = locations_of(EngineConfig)
"""Locations of those fields of :class:`EngineConfig` that aren't below ``engine``."""
ROUTER_LOCATIONS = locations_of(RouterConfig)


def _engine(field: str) -> Meta:
    """Return the description of a field of :class:`EngineConfig`, for the part of the document where it is set."""
    return description_of(_ENGINE_HINTS[field])


def _router(field: str) -> Meta:
    """Return the description and range of a field of :class:`RouterConfig`."""
    return meta_of(_ROUTER_HINTS[field])


def _settings(name: str, config: type[Struct]) -> Any:
    """Return a struct with the fields of ``config``, all optional: it follows that class by itself."""
    fields = []
    for field, hint in hints_of(config).items():
        choices = setting_of(hint).choices
        kind: Any = Literal[choices] if choices else hint.__origin__
        if field not in LOCATIONS:
            fields.append((field, Annotated[kind, description_of(hint), setting_of(hint)] | UnsetType, UNSET))
    return msgspec.defstruct(name, fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


EngineSettings: Any = _settings("EngineSettings", EngineConfig)
ProtocolSettings: Any = _settings("ProtocolSettings", ProtocolConfig)
HttpSettings: Any = _settings("HttpSettings", HttpLimits)


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the document's parts."""


class ModelSpec(Part, frozen=True, kw_only=True):
    """The one model that the cluster serves."""

    path: Annotated[str, Meta(min_length=1), _engine("model")]
    revision: Annotated[
        str,
        Meta(description="Branch, tag or commit of a model of the Hub; empty: its main branch."),
        Setting(flags=("--revision",), metavar="REVISION", group=ENDPOINT),
    ] = ""
    served_name: Annotated[str, _engine("served_model_name")] = ""
    aliases: Annotated[list[ModelName], _router("aliases")] = []
    load_format: Annotated[LoadFormat, _engine("load_format")] = "auto"
    backend: Annotated[ModelBackend, _engine("model_backend")] = "auto"
    max_model_len: Annotated[int, _engine("max_model_len")] = 0
    seed: Annotated[int, _engine("seed")] = 0


class MemorySpec(Part, frozen=True, kw_only=True):
    """Memory that a worker takes."""

    kv: Annotated[int | str, _engine("kv_memory_bytes")] = _DEFAULTS["kv_memory_bytes"]
    host: Annotated[int | str, _engine("host_kv_memory_bytes")] = _DEFAULTS["host_kv_memory_bytes"]
    disk: Annotated[int | str, _engine("disk_kv_bytes")] = _DEFAULTS["disk_kv_bytes"]
    gpu_utilization: Annotated[float, _engine("gpu_memory_utilization")] = _DEFAULTS["gpu_memory_utilization"]


class LMCacheSpec(Part, frozen=True, kw_only=True):
    """An LMCache server on each machine, whose memory its workers share; the cluster starts it, or it runs already."""

    endpoint: Annotated[str, _engine("lmcache_endpoint")] = ""
    memory: Annotated[int | str, description_of(_LMCACHE_HINTS["memory_bytes"])] = _LMCACHE["memory_bytes"]
    chunk_tokens: Annotated[int, meta_of(_LMCACHE_HINTS["chunk_tokens"])] = _LMCACHE["chunk_tokens"]
    port: Annotated[int, meta_of(_LMCACHE_HINTS["port"])] = _LMCACHE["port"]
    backends: Annotated[list[dict[str, Any]], meta_of(_LMCACHE_HINTS["backends"])] = []
    environment: Annotated[str, meta_of(_LMCACHE_HINTS["environment"])] = _LMCACHE["environment"]


class NodeSpec(Part, frozen=True, kw_only=True):
    """Restriction to certain nodes of a Ray cluster. It has no effect on one machine."""

    labels: Annotated[
        dict[str, str], Meta(description="Ray node labels that a node must have; values may be !x, in(x,y), !in(x,y).")
    ] = {}
    resources: Annotated[
        dict[str, float], Meta(description="Custom Ray resources that each process reserves, like {rack-7: 0.01}.")
    ] = {}


class AffinitySpec(Part, frozen=True, kw_only=True):
    """Overrides of the plan of cores and devices, which `serve` and `up` print at the start."""

    pin: Annotated[bool, Meta(description="Bind workers to NUMA nodes, and threads to cores, where that helps.")] = True
    numa_node: Annotated[NotNegative | None, Meta(description="NUMA node of all workers of the pool.")] = None
    cores: Annotated[list[str], Meta(description="Hardware threads of each worker in turn, like ['0-7', '8-15'].")] = []
    transfer_cores: Annotated[
        list[str], Meta(description="Hardware threads among them that move KV, of each worker in turn.")
    ] = []
    num_transfer_cores: Annotated[
        NotNegative | None, Meta(description="Number of transfer cores, where they aren't named.")
    ] = None
    nic: Annotated[str, Meta(description="Network device, as UCX calls it; empty: UCX's own choice.")] = ""


class PoolSpec(Part, frozen=True, kw_only=True):
    """Workers of one kind."""

    name: Annotated[Name, Meta(description="Workers are called NAME-0, NAME-1, ...")]
    role: Annotated[Role, Meta(description="Phase that the workers compute; mixed: both.")]
    count: Annotated[int, Meta(ge=0, le=4096, description="Number of workers.")] = 1
    tensor_parallel_size: Annotated[int, _engine("tensor_parallel_size")] = _DEFAULTS["tensor_parallel_size"]
    device: Annotated[Device, _engine("device")] = "auto"
    dtype: Annotated[Dtype, _engine("dtype")] = "auto"
    memory: MemorySpec = MemorySpec()
    lmcache: Annotated[bool, Meta(description="Whether the workers use the cluster's LMCache server.")] = True
    threads: Annotated[int, _engine("threads")] = _DEFAULTS["threads"]
    engine: EngineSettings = EngineSettings()
    nodes: NodeSpec = NodeSpec()
    affinity: AffinitySpec = AffinitySpec()
    environment: Annotated[dict[str, str], Meta(description="Variables added to the workers' environment.")] = {}


class RouterSpec(Part, frozen=True, kw_only=True):
    """The HTTP endpoint and the placement of requests."""

    host: Annotated[str, _router("host")] = _ROUTER["host"]
    port: Annotated[int, _router("port")] = _ROUTER["port"]
    workers: Annotated[int, _router("workers")] = _ROUTER["workers"]
    policy: Annotated[str, _router("policy")] = _ROUTER["policy"]
    max_requests_in_flight: Annotated[int, _router("max_requests_in_flight")] = _ROUTER["max_requests_in_flight"]
    max_body_mib: Annotated[int, _router("max_body_mib")] = _ROUTER["max_body_mib"]
    response_template: Annotated[str, _router("response_template")] = _ROUTER["response_template"]
    generation_config: Annotated[str, _router("generation_config")] = _ROUTER["generation_config"]
    chat_template: Annotated[str, _router("chat_template")] = _ROUTER["chat_template"]
    allowed_origins: Annotated[list[str], _router("allowed_origins")] = []
    tenants: Annotated[str, _router("tenants_file")] = _ROUTER["tenants_file"]
    request_log: Annotated[bool, _router("request_log")] = _ROUTER["request_log"]
    otlp_endpoint: Annotated[str, _router("otlp_endpoint")] = _ROUTER["otlp_endpoint"]
    trace_ratio: Annotated[float, _router("trace_ratio")] = _ROUTER["trace_ratio"]
    nodes: NodeSpec = NodeSpec()


class NetworkSpec(Part, frozen=True, kw_only=True):
    """Choice of the address that each process binds on its machine, and at which the other processes reach it."""

    host: Annotated[
        str,
        Meta(
            description="Address that workers and membership bind; empty: 127.0.0.1 on one machine, the node's own "
            "address on Ray."
        ),
        Setting(flags=("--worker-host",), metavar="ADDRESS", group=WORKERS),
    ] = ""
    interface: Annotated[
        str,
        Meta(description="Network interface whose address they bind instead, like eth0."),
        Setting(flags=("--interface",), metavar="NAME", group=WORKERS),
    ] = ""
    ip_version: Annotated[
        Literal[4, 6],
        Meta(description="Version of the interface's address."),
        Setting(flags=("--ipv6",), const=6, group=WORKERS, help="bind the interface's IPv6 address, not its IPv4 one"),
    ] = 4


class ConnectorSpec(Part, frozen=True, kw_only=True):
    """The library that moves KV blocks between workers."""

    name: Annotated[Literal["nixl"], Meta(description="Library that moves KV.")] = "nixl"
    transports: Annotated[list[str], Meta(description="UCX transports, like [tcp]; empty: UCX's own choice.")] = []
    devices: Annotated[list[str], Meta(description="UCX network devices, like [mlx5_0:1]; empty: UCX's choice.")] = []
    verify_kv: Annotated[bool, _engine("verify_kv")] = False


class ObjectivesSpec(Part, frozen=True, kw_only=True):
    """Objectives for the latency of answers. The router counts the requests that met them."""

    ttft_ms: Annotated[float, _router("ttft_objective_ms")] = _ROUTER["ttft_objective_ms"]
    tpot_ms: Annotated[float, _router("tpot_objective_ms")] = _ROUTER["tpot_objective_ms"]
    classes: Annotated[list[RequestClass], _router("classes")] = []


class SecretRef(Part, frozen=True, kw_only=True):
    """Reference to a secret: exactly one of the two. The process that needs the secret reads it on its own machine."""

    env: Annotated[str, Meta(description="Name of an environment variable.")] = ""
    file: Annotated[str, Meta(description="Path of a file.")] = ""


class SecretsSpec(Part, frozen=True, kw_only=True):
    """References to secrets. Without one, SPLITSERVE_SECRET, SPLITSERVE_API_KEY and SPLITSERVE_ADMIN_KEY
    count, where they are set."""

    shared: Annotated[
        SecretRef | None,
        Meta(description="Secret that protects messages between processes, needed off loopback."),
        Setting(
            flags=("--secret-file",),
            metavar="PATH",
            form="path",
            group=WORKERS,
            location="secrets.shared.file",
            help="file with the secret that protects messages between processes, needed off loopback; "
            f"empty: ${SECRET_VARIABLE}, else none",
        ),
    ] = None
    api_key: Annotated[
        SecretRef | None,
        Meta(description="Key that /v1 and /admin require as 'Authorization: Bearer KEY'."),
        Setting(
            flags=("--api-key-file",),
            metavar="PATH",
            form="path",
            group=ENDPOINT,
            location="secrets.api_key.file",
            help="file with the key that /v1 and /admin require as 'Authorization: Bearer KEY'; "
            f"empty: ${API_KEY_VARIABLE}, else none",
        ),
    ] = None
    admin_key: Annotated[
        SecretRef | None,
        Meta(description="Key that /admin requires instead of the API key, so that clients can't operate the cluster."),
        Setting(
            flags=("--admin-key-file",),
            metavar="PATH",
            form="path",
            group=ENDPOINT,
            location="secrets.admin_key.file",
            help="file with the key that /admin requires instead of the API key; "
            f"empty: ${ADMIN_KEY_VARIABLE}, else the API key",
        ),
    ] = None


class DevicesSpec(Part, frozen=True, kw_only=True):
    """GPUs of the machine. On Ray, Ray assigns them."""

    share: Annotated[
        bool,
        Meta(description="Let workers have the same GPU; set their KV memory then."),
        Setting(flags=("--share-gpus",), group=WORKERS),
    ] = False


class ClusterSpec(Part, frozen=True, kw_only=True):
    """A cluster that serves one model; :func:`.conversion.convert_spec` refuses one that can't work."""

    name: Annotated[Name, Meta(description="Name of the cluster, for `splitserve status --name` and others.")] = (
        "default"
    )
    model: ModelSpec
    pools: Annotated[list[PoolSpec], Meta(min_length=1)]
    engine: Annotated[EngineSettings, Meta(description="For all pools; a pool's own win.")] = EngineSettings()
    router: RouterSpec = RouterSpec()
    http: Annotated[HttpSettings, Meta(description="Bounds of HTTP connections.")] = HttpSettings()
    network: NetworkSpec = NetworkSpec()
    connector: ConnectorSpec = ConnectorSpec()
    lmcache: Annotated[LMCacheSpec | None, Meta(description="KV that workers share; absent: none.")] = None
    objectives: ObjectivesSpec = ObjectivesSpec()
    secrets: SecretsSpec = SecretsSpec()
    devices: DevicesSpec = DevicesSpec()
    protocol: Annotated[ProtocolSettings, Meta(description="Time-outs and bounds of the hand-over.")] = (
        ProtocolSettings()
    )

    @property
    def num_workers(self) -> int:
        return sum(pool.count for pool in self.pools)

    @property
    def served_model_name(self) -> str:
        """Return the model id that clients send: the configured one, else the Hub's, else the directory's name."""
        path = self.model.path
        return self.model.served_name or (path if is_model_id(path) else Path(path).resolve().name)

    def pool(self, name: str) -> PoolSpec:
        """Return the pool of that name. An unknown name raises :class:`ConfigError`, which lists the pools."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise ConfigError(f"there is no pool {name!r}; the pools are {', '.join(pool.name for pool in self.pools)}")

    def protocol_config(self) -> ProtocolConfig:
        return ProtocolConfig(**set_fields(self.protocol))

    def http_limits(self) -> HttpLimits:
        return HttpLimits(**set_fields(self.http))

    def router_settings(self) -> dict[str, Any]:
        """Return the values of those fields of :class:`RouterConfig` that are settings."""
        return {field: value_at(self, self.pools[0], location) for field, location in ROUTER_LOCATIONS.items()}

    def engine_config(self, pool: PoolSpec) -> EngineConfig:
        """Return the engine's settings in ``pool``, without those that differ between its workers."""
        values = {field: value_at(self, pool, location) for field, location in LOCATIONS.items()}
        values |= {field: num_bytes_of(value) for field, value in values.items() if field.endswith("_bytes")}
        values["served_model_name"] = self.served_model_name
        values["lmcache_endpoint"] = self.lmcache.endpoint if self.lmcache and pool.lmcache else ""
        return EngineConfig(**{**values, **set_fields(self.engine), **set_fields(pool.engine)})

    def give_back_seconds(self) -> float:
        """Return the time in which a stopping worker frees the largest host tier: freeing pinned pages is slow."""
        return max((num_bytes_of(pool.memory.host) for pool in self.pools), default=0) / _GIVEN_BACK_BYTES_PER_SECOND

    def lmcache_config(self) -> LMCacheConfig | None:
        """Return the config of the LMCache server to start; None if none is used, or one is running already."""
        lmcache = self.lmcache
        if lmcache is None or lmcache.endpoint or not any(pool.lmcache for pool in self.pools):
            return None
        return LMCacheConfig(
            memory_bytes=num_bytes_of(lmcache.memory),
            chunk_tokens=lmcache.chunk_tokens,
            port=lmcache.port,
            backends=tuple(msgspec.json.encode(backend).decode() for backend in lmcache.backends),
            environment=lmcache.environment,
        )

    def keeps_lmcache_for(self, pool: PoolSpec) -> bool:
        """Return whether the pool's workers use an LMCache server that the cluster starts."""
        return pool.lmcache and self.lmcache_config() is not None

    def describe(self) -> str:
        """Return the pools in words, like ``2 prefill + 1 decode``."""
        return " + ".join(f"{pool.count} {pool.name}" for pool in self.pools if pool.count) or "no worker"


def value_at(spec: ClusterSpec, pool: PoolSpec, location: str) -> Any:
    """Return what ``spec`` has at ``location`` (below ``pools[]``: what ``pool`` has); None without that part."""
    first, *names = location.split(".")
    value = pool if first == "pools[]" else getattr(spec, first)
    for name in names:
        value = None if value is None else getattr(value, name)
    return value


class SpecError(ConfigError):
    """A cluster spec that can't work. ``problems`` are pairs of a location in the document and a message.

    ``repaired``: the spec with wrong values replaced, for further checks; None if it can't be repaired.
    """

    def __init__(self, problems: list[tuple[str, str]], repaired: ClusterSpec | None = None) -> None:
        super().__init__("; ".join(f"{location}: {text}" if location else text for location, text in problems))
        self.problems = problems
        self.repaired = repaired


def set_fields(settings: Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(settings).items() if value is not UNSET}


def num_bytes_of(size: int | str) -> int:
    return parse_bytes(size) if isinstance(size, str) else size
