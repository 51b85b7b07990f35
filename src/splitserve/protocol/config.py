"""Settings of every process. Frozen; defaults are written here once; they travel to child processes as JSON."""

import math
from collections.abc import Iterator

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.protocol.request import Role

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "fp8")
ATTENTION_BACKENDS = ("auto", "hybrid", "flashinfer", "triton", "reference")
DISK_KV_BACKENDS = ("posix", "gds")
KEEP_POLICIES = ("all", "second-use", "prompt")
SECRETS = ("secret", "api_key")
MAX_MEMORY_BYTES = 1 << 60
MAX_TOKENS = 1 << 24
MAX_SECONDS = 86400.0
MIN_MODEL_LEN = 2
"""A token of the prompt and one of the answer."""
_CHOICES = {
    "dtype": DTYPES,
    "device": DEVICES,
    "load_format": ("auto", "dummy"),
    "attention_backend": ATTENTION_BACKENDS,
    "disk_kv_backend": DISK_KV_BACKENDS,
    "kv_keep": KEEP_POLICIES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
}
_RANGES = {
    "block_size": (0, 4096),
    "kv_memory_bytes": (0, MAX_MEMORY_BYTES),
    "host_kv_memory_bytes": (0, MAX_MEMORY_BYTES),
    "disk_kv_bytes": (0, MAX_MEMORY_BYTES),
    "max_model_len": (0, MAX_TOKENS),
    "max_num_batched_tokens": (0, MAX_TOKENS),
    "max_num_prefill_tokens_beside_decode": (0, MAX_TOKENS),
    "tail_chunk_tokens": (0, MAX_TOKENS),
    "max_num_seqs": (1, 65536),
    "threads": (0, 4096),
    "read_threads": (0, 256),
    "tensor_parallel_size": (1, 64),
    "seed": (0, 2**63 - 1),
}
"""Bounds of whole numbers that hold on every machine; :func:`machine_problems` has those of one machine."""
MAX_THREADS_PER_CPU = 2
"""Threads of a worker for each hardware thread: more than one is slow, which the doctor says, but runs."""


class SettingsError(ConfigError):
    """Settings that can't work. ``problems`` are pairs of a field and what is wrong with it."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{field} {text}" for field, text in problems))
        self.problems = problems


class ProtocolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Time-outs and bounds of the hand-over protocol. Seconds unless the name says otherwise."""

    request_deadline_seconds: float = 600.0
    lease_seconds: float = 10.0
    renew_interval_seconds: float = 2.0
    offer_resend_seconds: float = 0.5
    host_offer_after_seconds: float = 0.5
    read_deadline_seconds: float = 5.0
    min_read_bytes_per_second: float = 50e6
    heartbeat_seconds: float = 1.0
    dead_after_seconds: float = 5.0
    tombstone_seconds: float = 60.0
    drain_seconds: float = 30.0
    no_worker_wait_seconds: float = 10.0
    stream_keep_alive_seconds: float = 5.0
    max_tombstones: int = 4096
    max_parked: int = 1024
    max_requests: int = 4096
    max_requests_waiting: int = 256
    max_peers: int = 256
    max_reads_in_flight_per_request: int = 2
    max_blocks_per_read: int = 256


class DeviceDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a 0 in :class:`EngineConfig` stands for. Prefill tokens beside decode 0: no other bound than the step's."""

    block_size: int
    max_num_batched_tokens: int
    max_num_prefill_tokens_beside_decode: int
    tail_chunk_tokens: int


DEVICE_DEFAULTS = {
    "cpu": DeviceDefaults(
        block_size=16, max_num_batched_tokens=512, max_num_prefill_tokens_beside_decode=0, tail_chunk_tokens=64
    ),
    # 320 prompt tokens beside up to 64 that decode fill three tiles of 128 rows of a GEMM. The last
    # chunk: benchmarks/results/README.md compares 512 and 1024 tokens.
    "cuda": DeviceDefaults(
        block_size=64, max_num_batched_tokens=8192, max_num_prefill_tokens_beside_decode=320, tail_chunk_tokens=1024
    ),
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker serves, and with how much of the machine.

    ``kv_memory_bytes`` 0 and ``max_model_len`` 0 mean: decide at start; what is 0 of :class:`DeviceDefaults`, by device
    (:meth:`on`). ``max_num_batched_tokens`` bounds the tokens of one step, ``max_num_prefill_tokens_beside_decode``
    those of prompts in a step that also decodes: running sequences get their next token soon, while a prompt that comes
    to an idle worker is computed in large chunks.
    ``tail_chunk_tokens`` keeps the last chunk of a prompt that is handed over small, so that little is left to move
    once the first token is out. ``threads`` 0 means: all cores of the process's affinity mask.
    ``read_threads`` read KV from a peer at once, 0: as many as fill the link between two devices of that kind. With
    ``map_peer_memory`` a GPU copies from a peer's memory itself, through a mapping of it, where that is faster.
    With ``verify_kv`` blocks that are handed over carry digests, which decode compares with what landed: a pass over
    the data on both sides.
    ``gpu_memory_utilization`` is the share of a GPU's memory that the worker takes in all, if ``kv_memory_bytes``
    doesn't say. ``kv_cache_dtype`` "fp8" halves KV memory and what a hand-over moves, at some cost in accuracy.
    ``tensor_parallel_size`` processes share a worker's model, KV memory and threads, on as many GPUs
    where there are any. ``enforce_eager`` turns CUDA graphs off; ``capture_mixed_steps`` has graphs
    for steps with a small prefill, too, beside decode or alone. With ``late_launch`` a GPU gets its next decode step
    just in time, so that who arrives meanwhile is in it. With ``keep_cores_awake`` a worker on a GPU stays on half of
    the cores that it may use, and those don't sleep while it has requests: for machines that do nothing else.
    ``profile_dir``: where profiles of steps go that are asked for; "" refuses them.
    ``host_kv_memory_bytes`` of host memory hold blocks beyond those of ``kv_memory_bytes``, 0 for none; at most
    ``disk_kv_bytes`` more are files in ``disk_kv_dir``, "" for none, and outlive the process; ``disk_kv_backend`` of
    NIXL's, one of :data:`DISK_KV_BACKENDS`, moves them. ``kv_keep`` says what goes there, one of
    :data:`KEEP_POLICIES`. A request waits at most ``kv_load_seconds`` for its blocks to come up again, then it computes
    them. ``lmcache_endpoint`` is where an LMCache server of this machine listens, "" for none: what is kept goes there,
    too, for all workers that use it. With ``kv_events`` the worker publishes what it holds (docs/guides/kv-events.md).
    """

    model: str
    served_model_name: str = ""
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    block_size: int = 0
    kv_memory_bytes: int = 0
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    max_num_prefill_tokens_beside_decode: int = 0
    max_num_seqs: int = 64
    tail_chunk_tokens: int = 0
    enable_prefix_caching: bool = True
    verify_kv: bool = False
    attention_backend: str = "auto"
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False
    capture_mixed_steps: bool = True
    late_launch: bool = True
    keep_cores_awake: bool = False
    map_peer_memory: bool = True
    gpu_memory_utilization: float = 0.9
    threads: int = 0
    read_threads: int = 0
    tensor_parallel_size: int = 1
    seed: int = 0
    profile_dir: str = ""
    host_kv_memory_bytes: int = 0
    kv_keep: str = "all"
    kv_load_seconds: float = 5.0
    disk_kv_dir: str = ""
    disk_kv_bytes: int = 16 << 30
    disk_kv_backend: str = "posix"
    lmcache_endpoint: str = ""
    kv_events: bool = False

    def __post_init__(self) -> None:
        problems = list(_engine_problems(self))
        if problems:
            raise SettingsError(problems)

    def on(self, device: str) -> "EngineConfig":
        """With all that depends on the device decided for "cpu" or "cuda"."""
        defaults = DEVICE_DEFAULTS[device]
        max_tokens = self.max_num_batched_tokens or max(defaults.max_num_batched_tokens, self.max_num_seqs)
        beside = self.max_num_prefill_tokens_beside_decode or defaults.max_num_prefill_tokens_beside_decode
        return msgspec.structs.replace(
            self,
            block_size=self.block_size or defaults.block_size,
            max_num_batched_tokens=max_tokens,
            max_num_prefill_tokens_beside_decode=min(beside or max_tokens, max_tokens),
            tail_chunk_tokens=self.tail_chunk_tokens or defaults.tail_chunk_tokens,
        )


def _engine_problems(engine: EngineConfig) -> Iterator[tuple[str, str]]:
    """Fields, and what is wrong with them on any machine."""
    for field, choices in _CHOICES.items():
        if getattr(engine, field) not in choices:
            yield field, f"is {getattr(engine, field)!r}; choose one of {', '.join(choices)}"
    for field, (least, most) in _RANGES.items():
        if not least <= getattr(engine, field) <= most:
            yield field, f"must be between {least} and {most}, got {getattr(engine, field)}"
    if 0 < engine.max_model_len < MIN_MODEL_LEN:
        yield "max_model_len", f"must be at least {MIN_MODEL_LEN} (a token in, a token out), got {engine.max_model_len}"
    if not 0.0 < engine.kv_load_seconds <= MAX_SECONDS:
        yield "kv_load_seconds", f"must be more than 0 and at most {MAX_SECONDS:g}, got {engine.kv_load_seconds}"
    if not 0.0 < engine.gpu_memory_utilization <= 1.0:
        yield "gpu_memory_utilization", f"must be in (0, 1], got {engine.gpu_memory_utilization}"
    if engine.verify_kv and engine.tensor_parallel_size > 1:
        yield (
            "verify_kv",
            f"compares blocks of workers of one rank, but tensor_parallel_size is {engine.tensor_parallel_size}; "
            "leave one of them out",
        )
    if 0 < engine.max_num_batched_tokens < engine.max_num_seqs:
        yield (
            "max_num_batched_tokens",
            f"({engine.max_num_batched_tokens}) is smaller than max_num_seqs ({engine.max_num_seqs}): a step could not "
            "hold one token of each running sequence",
        )


def machine_problems(engine: EngineConfig, num_cpus: int) -> Iterator[tuple[str, str]]:
    """Fields, and what is wrong with them on a machine with ``num_cpus`` hardware threads."""
    most = MAX_THREADS_PER_CPU * num_cpus
    for field in ("threads", "read_threads"):
        if getattr(engine, field) > most:
            yield (
                field,
                f"must be between 0 and {most} on this machine ({num_cpus} hardware threads), got "
                f"{getattr(engine, field)}; 0 lets it decide",
            )


def protocol_problems(protocol: ProtocolConfig) -> Iterator[tuple[str, str]]:
    """Fields, and what is wrong with them."""
    for field in ProtocolConfig.__struct_fields__:
        value = getattr(protocol, field)
        most = MAX_SECONDS if field.endswith("_seconds") else math.inf
        least_is_allowed = field in _MAY_BE_ZERO
        if not (math.isfinite(value) and (value >= 0 if least_is_allowed else value > 0) and value <= most):
            bounds = "at least 0" if least_is_allowed else "more than 0"
            yield field, f"must be {bounds}{'' if most == math.inf else f' and at most {most:g}'}, got {value}"
    for shorter, longer in (("renew_interval_seconds", "lease_seconds"), ("heartbeat_seconds", "dead_after_seconds")):
        if not getattr(protocol, shorter) < getattr(protocol, longer):
            yield shorter, f"must be less than {longer} ({getattr(protocol, longer)}), got {getattr(protocol, shorter)}"


_MAY_BE_ZERO = frozenset(
    {"drain_seconds", "no_worker_wait_seconds", "tombstone_seconds", "host_offer_after_seconds", "offer_resend_seconds"}
)


class Confidential(msgspec.Struct, frozen=True, kw_only=True):
    """Base of configs with secrets: those never show in a repr, and with that in no log and no traceback."""

    def __repr__(self) -> str:
        shown = (f"{name}={self._shown(name)}" for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(shown)})"

    def _shown(self, name: str) -> str:
        value = getattr(self, name)
        return "'...'" if name in SECRETS and value else repr(value)


class CorePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware threads of a worker: of its process (none: as they are), and of its model and transfer threads among
    them. ``numa_node`` is where its host memory belongs; None: not known, or all the same."""

    cpus: tuple[int, ...] = ()
    model_cpus: tuple[int, ...] = ()
    transfer_cpus: tuple[int, ...] = ()
    numa_node: int | None = None


class WorkerConfig(Confidential, frozen=True, kw_only=True):
    """One worker process. ``membership`` is the endpoint that it registers with; ``host`` the address it binds.

    ``secret`` protects its side channels; see :mod:`splitserve.common.security`.
    """

    engine_id: str
    role: Role
    engine: EngineConfig
    membership: str
    host: str = "127.0.0.1"
    protocol: ProtocolConfig = ProtocolConfig()
    secret: str = ""
    placement: CorePlacement = CorePlacement()


class LMCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An LMCache server on this machine, which listens at the loopback address. A port 0 takes a free one.

    ``memory_bytes`` of shared memory hold KV, in chunks of ``chunk_tokens``. ``backends`` are JSON objects, as its
    option ``--l2-adapter`` takes them: where it keeps what doesn't fit. ``environment``: the directory of the virtual
    environment that has LMCache in it, "" for the one beside our own.
    """

    memory_bytes: int = 4 << 30
    chunk_tokens: int = 256
    port: int = 0
    backends: tuple[str, ...] = ()
    environment: str = ""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the router's HTTP connections (:mod:`splitserve.router.http.connections`)."""

    max_header_bytes: int = 64 * 1024  # of a request line with its headers, and of the trailers after a body
    max_headers: int = 256  # likewise
    header_seconds: float = 20.0  # from a request's first byte, or a new connection, to the end of its headers
    keep_alive_seconds: int = 75  # between requests
    linger_seconds: float = 2.0  # for a client to read why it was refused
    max_pipelined: int = 16  # requests that wait on one connection for the answer to another one
    max_connections: int = 0  # 0: 8192, or twice as many as requests in flight, if that is more


class RouterConfig(Confidential, frozen=True, kw_only=True):
    """The router process. A port 0 takes a free one. ``max_requests_in_flight`` bounds what it admits (429 beyond),
    ``max_body_mib`` a request's body (413): parsing one MiB of text can hold the event loop for 10 ms.

    Objectives are what an answer should take, 0 for none: the router counts the requests that met them.
    ``on_awake_cores`` keeps it on half of its machine's cores, as ``keep_cores_awake`` keeps workers there.
    ``secret`` protects its side channels; ``api_key`` is what /v1 wants of clients, "" asks for nothing.
    """

    model: str
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    membership_host: str = "127.0.0.1"
    membership_port: int = 0
    policy: str = "least-loaded"
    max_requests_in_flight: int = 1024
    max_body_mib: int = 4
    ttft_objective_seconds: float = 0.0
    tpot_objective_seconds: float = 0.0
    on_awake_cores: bool = False
    protocol: ProtocolConfig = ProtocolConfig()
    http: HttpLimits = HttpLimits()
    secret: str = ""
    api_key: str = ""
