"""What a cluster consists of: pure data, in the shape of the YAML document that describes it.

:mod:`.document` reads and writes the document, :mod:`.expansion` makes the configs of the processes of it, and the
options of ``splitserve serve`` are a shorthand for it (:mod:`.shorthand`). Secrets are references (an environment
variable or a file), never values. Whatever can't work is refused with the place in the document and a remedy.
"""

import typing
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.orchestration.spec.sizes import parse_bytes
from splitserve.protocol.config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    EngineConfig,
    LMCacheConfig,
    ProtocolConfig,
    RouterConfig,
)

Name: TypeAlias = Annotated[str, Meta(pattern="^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
NotNegative: TypeAlias = Annotated[int, Meta(ge=0)]

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
_ROUTER: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(RouterConfig)}
_LMCACHE: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(LMCacheConfig)}
MAX_BODY_MIB = 64
_GIVEN_BACK_BYTES_PER_SECOND = 4 << 30  # 8 GiB of small pages took 1.3 s
_CHOICES = {
    "dtype": DTYPES,
    "device": DEVICES,
    "attention_backend": ATTENTION_BACKENDS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
}
# Fields of an EngineConfig that the document has elsewhere, or that aren't a user's to set.
_ELSEWHERE = frozenset(
    {
        *("model", "served_model_name", "load_format", "max_model_len", "seed", "verify_kv"),
        *("dtype", "device", "threads", "kv_memory_bytes", "gpu_memory_utilization", "tensor_parallel_size"),
        *("host_kv_memory_bytes", "disk_kv_bytes", "lmcache_endpoint"),
    }
)


def _settings(name: str, config: type[Struct], left_out: Collection[str] = ()) -> Any:
    """A struct with the fields of ``config``, all optional and none negative: it follows that class by itself."""
    fields = []
    for field, hint in typing.get_type_hints(config).items():
        kind: Any = Annotated[hint, Meta(ge=0)] if hint in (int, float) else hint
        kind = Literal[_CHOICES[field]] if field in _CHOICES else kind
        if field not in left_out:
            fields.append((field, kind | UnsetType, UNSET))
    return msgspec.defstruct(name, fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


EngineSettings: Any = _settings("EngineSettings", EngineConfig, _ELSEWHERE)
ProtocolSettings: Any = _settings("ProtocolSettings", ProtocolConfig)


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the document's parts."""


class ModelSpec(Part, frozen=True, kw_only=True):
    """The one model that the cluster serves."""

    path: Annotated[str, Meta(min_length=1, description="Directory of a Hugging Face checkpoint, on every machine.")]
    served_name: Annotated[str, Meta(description="Id that clients use; empty: the directory's name.")] = ""
    load_format: Annotated[Literal["auto", "dummy"], Meta(description="dummy: random weights, for measuring.")] = "auto"
    max_model_len: Annotated[int, Meta(ge=0, description="Context in tokens; 0: the model's own.")] = 0
    seed: Annotated[int, Meta(description="Of dummy weights.")] = 0


class MemorySpec(Part, frozen=True, kw_only=True):
    """How much memory a worker takes."""

    kv: Annotated[int | str, Meta(description="Of KV, for each worker: bytes, or like 512MiB; 0: decide at start.")] = 0
    host: Annotated[
        int | str, Meta(description="Of the machine's own, for KV beyond that: bytes, or like 16GiB; 0: none.")
    ] = 0
    disk: Annotated[
        int | str, Meta(description="Of files in engine.disk_kv_dir, for each worker: bytes, or like 64GiB, at most.")
    ] = _DEFAULTS["disk_kv_bytes"]
    gpu_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Share of a GPU's memory that a worker takes in all, unless kv is given.")
    ] = _DEFAULTS["gpu_memory_utilization"]


class LMCacheSpec(Part, frozen=True, kw_only=True):
    """An LMCache server on each machine, whose memory the workers there share. One is started, or is there already."""

    endpoint: Annotated[
        str, Meta(description="Of a server that runs already on each worker's machine; empty: one is started there.")
    ] = ""
    memory: Annotated[int | str, Meta(description="Shared memory of the server: bytes, or like 16GiB.")] = _LMCACHE[
        "memory_bytes"
    ]
    chunk_tokens: Annotated[int, Meta(ge=1, description="KV is kept in pieces of this length.")] = _LMCACHE[
        "chunk_tokens"
    ]
    port: Annotated[int, Meta(ge=0, lt=2**16, description="At the loopback address; 0 takes a free one.")] = 0
    backends: Annotated[
        list[dict[str, Any]],
        Meta(description="What LMCache's --l2-adapter takes, like {type: fs, base_path: /var/cache/lmcache}."),
    ] = []
    environment: Annotated[
        str, Meta(description="Directory of the virtual environment with LMCache; empty: beside our own.")
    ] = ""


class NodeSpec(Part, frozen=True, kw_only=True):
    """Which nodes of a Ray cluster may be used. Of no effect on one machine."""

    labels: Annotated[
        dict[str, str], Meta(description="Ray node labels that a node must have; values may be !x, in(x,y), !in(x,y).")
    ] = {}
    resources: Annotated[
        dict[str, float], Meta(description="Custom Ray resources that each process reserves, like {rack-7: 0.01}.")
    ] = {}


class PlacementSpec(Part, frozen=True, kw_only=True):
    """Overrides of the plan of cores and devices, which `serve` and `up` print at the start."""

    pin: Annotated[bool, Meta(description="Bind workers to NUMA nodes, and threads to cores, where that helps.")] = True
    numa_node: Annotated[NotNegative | None, Meta(description="Of all workers of the pool.")] = None
    cores: Annotated[list[str], Meta(description="Hardware threads of each worker in turn, like ['0-7', '8-15'].")] = []
    transfer_cores: Annotated[list[str], Meta(description="Those of them that move KV, of each worker in turn.")] = []
    num_transfer_cores: Annotated[NotNegative | None, Meta(description="How many, if not which.")] = None
    nic: Annotated[str, Meta(description="Network device, as UCX calls it; empty: UCX's own choice.")] = ""


class PoolSpec(Part, frozen=True, kw_only=True):
    """Workers of one kind."""

    name: Annotated[Name, Meta(description="Workers are called NAME-0, NAME-1, ...")]
    role: Annotated[Literal["prefill", "decode", "mixed"], Meta(description="mixed: both phases.")]
    count: Annotated[int, Meta(ge=0, le=4096, description="Number of workers.")] = 1
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64, description="GPUs (ranks) of each worker, on one node.")] = 1
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto: CUDA where there is one.")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Of weights and KV; auto: the checkpoint's. All pools must agree."),
    ] = "auto"
    memory: MemorySpec = MemorySpec()
    lmcache: Annotated[bool, Meta(description="Whether the workers use the cluster's LMCache server.")] = True
    threads: Annotated[int, Meta(ge=0, description="Per worker; 0 splits a machine's cores between its workers.")] = 0
    engine: EngineSettings = EngineSettings()
    nodes: NodeSpec = NodeSpec()
    placement: PlacementSpec = PlacementSpec()
    environment: Annotated[dict[str, str], Meta(description="Added to the workers' environment.")] = {}


class RouterSpec(Part, frozen=True, kw_only=True):
    """The HTTP endpoint and how requests are placed."""

    host: Annotated[str, Meta(min_length=1, description="Address to bind.")] = _ROUTER["host"]
    port: Annotated[int, Meta(ge=0, lt=2**16, description="Port to bind; 0 takes a free one.")] = _ROUTER["port"]
    policy: Annotated[str, Meta(description="How requests are placed.")] = _ROUTER["policy"]
    max_requests_in_flight: Annotated[int, Meta(ge=1, description="Beyond that clients get 429.")] = _ROUTER[
        "max_requests_in_flight"
    ]
    max_body_mib: Annotated[int, Meta(ge=1, le=MAX_BODY_MIB, description="Beyond that a request's body gets 413.")] = (
        _ROUTER["max_body_mib"]
    )
    nodes: NodeSpec = NodeSpec()


class NetworkSpec(Part, frozen=True, kw_only=True):
    """The address at which a process is reached by the others: each process binds one of its own machine."""

    host: Annotated[
        str, Meta(description="Address to bind; empty: 127.0.0.1 on one machine, the node's own address on Ray.")
    ] = ""
    interface: Annotated[str, Meta(description="Bind the address of this network interface, like eth0.")] = ""
    ip_version: Annotated[Literal[4, 6], Meta(description="Which address of the interface.")] = 4


class ConnectorSpec(Part, frozen=True, kw_only=True):
    """What moves KV blocks between workers."""

    name: Literal["nixl"] = "nixl"
    transports: Annotated[list[str], Meta(description="UCX transports, like [tcp]; empty: UCX's own choice.")] = []
    devices: Annotated[list[str], Meta(description="UCX network devices, like [mlx5_0:1]; empty: UCX's choice.")] = []
    verify_kv: Annotated[bool, Meta(description="Digest blocks on both sides of each hand-over.")] = False


class ObjectivesSpec(Part, frozen=True, kw_only=True):
    """What an answer should take. The router counts the requests that met them."""

    ttft_ms: Annotated[float, Meta(ge=0, description="Time to first token; 0: none.")] = 0.0
    tpot_ms: Annotated[float, Meta(ge=0, description="Mean time per output token after the first; 0: none.")] = 0.0


class SecretRef(Part, frozen=True, kw_only=True):
    """Where a secret is: exactly one of the two. The process that needs it reads it on its own machine."""

    env: Annotated[str, Meta(description="Name of an environment variable.")] = ""
    file: Annotated[str, Meta(description="Path of a file.")] = ""


class SecretsSpec(Part, frozen=True, kw_only=True):
    """References to secrets. Without one, SPLITSERVE_SECRET and SPLITSERVE_API_KEY count, where they are set."""

    shared: Annotated[SecretRef | None, Meta(description="Protects what processes tell each other.")] = None
    api_key: Annotated[SecretRef | None, Meta(description="What clients must show.")] = None


class DevicesSpec(Part, frozen=True, kw_only=True):
    """GPUs of the machine. On Ray, Ray assigns them."""

    share: Annotated[bool, Meta(description="Let workers have the same GPU; set memory.kv then.")] = False


class ClusterSpec(Part, frozen=True, kw_only=True):
    """A cluster that serves one model; :func:`.conversion.convert_spec` refuses one that can't work."""

    name: Annotated[Name, Meta(description="Of the cluster: what `splitserve status --name` takes.")] = "default"
    model: ModelSpec
    pools: Annotated[list[PoolSpec], Meta(min_length=1)]
    engine: Annotated[EngineSettings, Meta(description="For all pools; a pool's own win.")] = EngineSettings()
    router: RouterSpec = RouterSpec()
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
        """The id under which clients ask for the model: as given, else the directory's name."""
        return self.model.served_name or Path(self.model.path).resolve().name

    def pool(self, name: str) -> PoolSpec:
        """Raises :class:`ConfigError` that lists the pools for an unknown name."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise ConfigError(f"there is no pool {name!r}; the pools are {', '.join(pool.name for pool in self.pools)}")

    def protocol_config(self) -> ProtocolConfig:
        return ProtocolConfig(**set_fields(self.protocol))

    def engine_config(self, pool: PoolSpec) -> EngineConfig:
        """The engine's settings in ``pool``, without what differs between its workers."""
        values: dict[str, Any] = {
            "model": self.model.path,
            "served_model_name": self.served_model_name,
            "load_format": self.model.load_format,
            "max_model_len": self.model.max_model_len,
            "seed": self.model.seed,
            "verify_kv": self.connector.verify_kv,
            "dtype": pool.dtype,
            "device": pool.device,
            "threads": pool.threads,
            "kv_memory_bytes": num_bytes_of(pool.memory.kv),
            "host_kv_memory_bytes": num_bytes_of(pool.memory.host),
            "disk_kv_bytes": num_bytes_of(pool.memory.disk),
            "gpu_memory_utilization": pool.memory.gpu_utilization,
            "lmcache_endpoint": self.lmcache.endpoint if self.lmcache and pool.lmcache else "",
            **set_fields(self.engine),
            **set_fields(pool.engine),
        }
        if "tensor_parallel_size" in _DEFAULTS:
            values["tensor_parallel_size"] = pool.tensor_parallel_size
        return EngineConfig(**values)

    def give_back_seconds(self) -> float:
        """That a worker may take at its end to give back the largest host tier there is: pinned pages go slowly."""
        return max((num_bytes_of(pool.memory.host) for pool in self.pools), default=0) / _GIVEN_BACK_BYTES_PER_SECOND

    def lmcache_config(self) -> LMCacheConfig | None:
        """Of the LMCache server that is to be started; None if there is to be none, or one is there already."""
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
        """Whether the pool's workers use an LMCache server that the cluster starts."""
        return pool.lmcache and self.lmcache_config() is not None

    def describe(self) -> str:
        """Like ``2 prefill + 1 decode``."""
        return " + ".join(f"{pool.count} {pool.name}" for pool in self.pools if pool.count) or "no worker"


class SpecError(ConfigError):
    """A cluster spec that can't work. ``problems`` are pairs of the place in the document and what is wrong there.

    ``repaired``: the spec with other values where some are wrong, for further checks; None if there is no making one.
    """

    def __init__(self, problems: list[tuple[str, str]], repaired: ClusterSpec | None = None) -> None:
        super().__init__("; ".join(f"{place}: {text}" if place else text for place, text in problems))
        self.problems = problems
        self.repaired = repaired


def check_model_directory(model: str) -> None:
    """Raise :class:`CheckpointError` unless ``model`` is a directory with a Hugging Face ``config.json``."""
    folder = Path(model)
    if not folder.exists():
        raise CheckpointError(
            f"no such directory: {model}. Give the path of a Hugging Face checkpoint on disk; "
            "`splitserve demo-model DIR` writes a small one"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{model} is not a Hugging Face checkpoint: it has no config.json "
            "(it needs that, *.safetensors and tokenizer.json)"
        )


def set_fields(settings: Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(settings).items() if value is not UNSET}


def num_bytes_of(size: int | str) -> int:
    return parse_bytes(size) if isinstance(size, str) else size
