"""Settings of a worker's engine: each field is declared once, with its meaning, its range, and how users give it."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from splitserve.common.lmcache import endpoint_problem
from splitserve.protocol.settings import Setting, SettingsError, problems_of

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
LoadFormat: TypeAlias = Literal["auto", "dummy"]
ModelBackend: TypeAlias = Literal["auto", "native", "transformers"]
DTYPES: tuple[str, ...] = get_args(Dtype)
DEVICES: tuple[str, ...] = get_args(Device)
LOAD_FORMATS: tuple[str, ...] = get_args(LoadFormat)
MODEL_BACKENDS: tuple[str, ...] = get_args(ModelBackend)
KV_CACHE_DTYPES = ("auto", "fp8")
ATTENTION_BACKENDS = ("auto", "hybrid", "flashinfer", "triton", "reference")
EXPERT_PARALLEL = ("auto", "on", "off")
DISK_KV_BACKENDS = ("posix", "gds")


class KeepPolicyName(StrEnum):
    """Names of the policies in :mod:`splitserve.kvconnector.tiers.policy`."""

    ALL = "all"
    SECOND_USE = "second-use"
    PROMPT = "prompt"


KEEP_POLICIES = tuple(policy.value for policy in KeepPolicyName)
MAX_MEMORY_BYTES = 1 << 60
MAX_TOKENS = 1 << 24
MAX_SECONDS = 86400.0
MIN_MODEL_LEN = 2
"""A token of the prompt and one of the answer."""
MAX_THREADS_PER_CPU = 2
"""Threads of a worker for each hardware thread: more than one works but is slow, which the doctor reports."""


class DeviceDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values that a 0 in :class:`EngineConfig` stands for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_tokens_beside_decode: int = 0  # no bound but the step's
    max_num_prefill_tokens_within_objective: int = 0  # likewise
    block_size: int
    tail_chunk_tokens: int


DEVICE_DEFAULTS = {
    "cpu": DeviceDefaults(max_num_seqs=64, max_num_batched_tokens=512, block_size=16, tail_chunk_tokens=64),
    # Beside up to 64 sequences that decode, 320 prompt tokens fill three tiles of 128 rows of a GEMM; with objectives:
    # docs/decisions/029-steps-with-graphs.md. The last chunk: benchmarks/results/README.md compares 512 and 1024
    # tokens. Sequences: docs/decisions/028-sequences-at-once.md.
    "cuda": DeviceDefaults(
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_num_prefill_tokens_beside_decode=320,
        max_num_prefill_tokens_within_objective=576,
        block_size=64,
        tail_chunk_tokens=1024,
    ),
}


WORKERS = "workers"
ENDPOINT = "endpoint"
ENGINE = "engine"
KV_MEMORY = "KV memory"
KV_TIERS = "KV beyond a worker's own memory"
OPTION_GROUPS = (WORKERS, ENDPOINT, ENGINE, KV_MEMORY, KV_TIERS)
"""Headings of `splitserve serve --help`, in their order."""

TokenLimit: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
NumBytes: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_MEMORY_BYTES)]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's model, and its share of the machine.

    Settings of :class:`DeviceDefaults` that are 0 get their values by device (:meth:`on`).
    """

    model: Annotated[
        str,
        Meta(
            description="Directory of a Hugging Face checkpoint, on every machine; or a model id of the Hugging Face "
            "Hub, like Qwen/Qwen3-0.6B, which each machine downloads to its own cache."
        ),
        Setting(location="model.path"),
    ]
    served_model_name: Annotated[
        str,
        Meta(description="Id that clients use for the model; empty: the model id, or the directory's name."),
        Setting(
            flags=("--served-model-name",),
            metavar="ID",
            group=ENDPOINT,
            location="model.served_name",
            further="model.aliases",
            help="ids that clients use for the model, the first of them in answers to requests without one; none: the "
            "model id, or the directory's name",
        ),
    ] = ""
    dtype: Annotated[
        str,
        Meta(description="Type of weights and KV; auto: the checkpoint's. All pools must agree."),
        Setting(flags=("--dtype",), choices=DTYPES, group=ENGINE, location="pools[].dtype"),
    ] = "auto"
    device: Annotated[
        str,
        Meta(description="Kind of device; auto: CUDA if there is a GPU."),
        Setting(flags=("--device",), choices=DEVICES, group=ENGINE, location="pools[].device"),
    ] = "auto"
    load_format: Annotated[
        str,
        Meta(description="Source of weights; dummy: random ones, for measuring."),
        Setting(flags=("--load-format",), choices=LOAD_FORMATS, group=ENGINE, location="model.load_format"),
    ] = "auto"
    model_backend: Annotated[
        str,
        Meta(
            description="Code that computes the model; native: Splitserve's, for families that it has; transformers: "
            "that library's, over Splitserve's attention and KV memory, with one rank a worker; auto: native if there "
            "is a family."
        ),
        Setting(flags=("--model-backend",), choices=MODEL_BACKENDS, group=ENGINE, location="model.backend"),
    ] = "auto"
    seed: Annotated[
        int,
        Meta(ge=0, le=2**63 - 1, description="Seed of dummy weights."),
        Setting(flags=("--seed",), group=ENGINE, location="model.seed"),
    ] = 0
    max_model_len: Annotated[
        TokenLimit,
        Meta(description="Context length in tokens; 0: the model's own."),
        Setting(flags=("--max-model-len",), metavar="TOKENS", group=ENGINE, location="model.max_model_len"),
    ] = 0
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1, le=64, description="Processes (ranks) that share a worker's model, on one GPU each if there are GPUs."
        ),
        Setting(
            flags=("--tensor-parallel-size", "-tp"),
            metavar="N",
            group=ENGINE,
            location="pools[].tensor_parallel_size",
        ),
    ] = 1
    expert_parallel: Annotated[
        str,
        Meta(
            description="Split of a mixture of experts over a worker's ranks; on: each has some of the experts; off: "
            "each has a part of every expert; auto: the latter, unless the parts would be too small."
        ),
        Setting(flags=("--expert-parallel",), choices=EXPERT_PARALLEL, group=ENGINE),
    ] = "auto"
    threads: Annotated[
        int,
        Meta(ge=0, le=4096, description="Threads of each worker; 0 splits a machine's cores between its workers."),
        Setting(flags=("--threads",), metavar="T", group=WORKERS, location="pools[].threads"),
    ] = 0
    attention_backend: Annotated[
        str,
        Meta(description="Kernels of attention; auto: the best that can run."),
        Setting(flags=("--attention-backend",), choices=ATTENTION_BACKENDS, group=ENGINE),
    ] = "auto"
    enforce_eager: Annotated[
        bool, Meta(description="Run without CUDA graphs."), Setting(flags=("--enforce-eager",), group=ENGINE)
    ] = False
    capture_mixed_steps: Annotated[
        bool,
        Meta(description="Capture CUDA graphs of steps with a small prefill as well, beside decode or alone."),
        Setting(flags=("--capture-mixed-steps",), group=ENGINE),
    ] = True
    late_launch: Annotated[
        bool,
        Meta(description="Launch steps of a GPU that decodes just in time, so that newly arrived requests join them."),
        Setting(flags=("--late-launch",), group=ENGINE),
    ] = True
    keep_cores_awake: Annotated[
        bool,
        Meta(
            description="Keep workers on GPUs to half of the cores, and those awake while there are requests: sooner "
            "tokens, for machines that do nothing else."
        ),
        Setting(flags=("--keep-cores-awake",), group=ENGINE),
    ] = False
    max_num_batched_tokens: Annotated[
        TokenLimit,
        Meta(description="Tokens of one step; 0: 8192 on a GPU, 512 on CPU."),
        Setting(flags=("--max-batched-tokens", "--max-num-batched-tokens"), metavar="TOKENS", group=ENGINE),
    ] = 0
    max_num_prefill_tokens_beside_decode: Annotated[
        TokenLimit,
        Meta(
            description="Prompt tokens of a step that also decodes, or that a hand-over in progress would wait for; "
            "smaller: shorter ITL, later first tokens; 0: 320 on a GPU, as many as fit the step on CPU."
        ),
        Setting(flags=("--max-prefill-tokens-beside-decode",), metavar="TOKENS", group=ENGINE),
    ] = 0
    max_num_prefill_tokens_within_objective: Annotated[
        TokenLimit,
        Meta(description="The same at most where an ITL objective sizes prompts; 0: that if given, else 576 on a GPU."),
        Setting(flags=("--max-prefill-tokens-within-objective",), metavar="TOKENS", group=ENGINE),
    ] = 0
    max_num_seqs: Annotated[
        int,
        Meta(ge=0, le=65536, description="Sequences that run at once in a worker; 0: 256 on a GPU, 64 on CPU."),
        Setting(flags=("--max-num-seqs",), metavar="N", group=ENGINE),
    ] = 0
    tail_chunk_tokens: Annotated[
        TokenLimit,
        Meta(
            description="Tokens of the last chunk of a prompt that is handed over; small: little is left to move after "
            "the first token; 0: 1024 on a GPU, 64 on CPU."
        ),
    ] = 0
    second_token_at_prefill: Annotated[
        bool,
        Meta(description="Let a prefill worker without other prompts draw the second token, too, while KV is read."),
        Setting(flags=("--second-token-at-prefill",), group=ENGINE),
    ] = False
    profile_dir: Annotated[
        str,
        Meta(
            description="Directory on the worker's machine for profiles that POST /admin/profile asks for; empty: none."
        ),
        Setting(flags=("--profile-dir",), metavar="DIR", group=ENGINE),
    ] = ""
    block_size: Annotated[
        int,
        Meta(ge=0, le=4096, description="Tokens per KV block; 0: 64 on a GPU, 16 on CPU."),
        Setting(flags=("--block-size",), metavar="TOKENS", group=KV_MEMORY),
    ] = 0
    kv_cache_dtype: Annotated[
        str,
        Meta(description="Type of KV memory; auto: as dtype; fp8: half the memory and hand-over, less accuracy."),
        Setting(flags=("--kv-cache-dtype",), choices=KV_CACHE_DTYPES, group=KV_MEMORY),
    ] = "auto"
    kv_memory_bytes: Annotated[
        NumBytes,
        Meta(description="KV memory of each worker, like 512MiB, 2GB or 1.5g; 0: decided at start."),
        Setting(
            flags=("--kv-memory", "--kv-cache-memory-bytes"),
            metavar="SIZE",
            form="size",
            group=KV_MEMORY,
            location="pools[].memory.kv",
        ),
    ] = 0
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0, le=1, description="Share of a GPU's memory that a worker takes in all, unless its KV memory is given."
        ),
        Setting(
            flags=("--gpu-memory-utilization",),
            metavar="SHARE",
            group=KV_MEMORY,
            location="pools[].memory.gpu_utilization",
        ),
    ] = 0.9
    enable_prefix_caching: Annotated[
        bool,
        Meta(description="Reuse the KV of earlier prompts with the same beginning."),
        Setting(flags=("--enable-prefix-caching",), group=KV_MEMORY),
    ] = True
    verify_kv: Annotated[
        bool,
        Meta(
            description="Digest blocks on both sides of each hand-over; one that differs is logged, counted, not used."
        ),
        Setting(flags=("--verify-kv",), group=KV_MEMORY, location="connector.verify_kv"),
    ] = False
    read_threads: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description="Threads that read KV from a peer at once, where reads are posted to a transport; 0: as many "
            "as fill the link.",
        ),
        Setting(flags=("--read-threads",), metavar="N", group=KV_MEMORY),
    ] = 0
    map_peer_memory: Annotated[
        bool,
        Meta(description="Let a GPU copy from a peer's memory through a mapping of it, where that is faster."),
        Setting(flags=("--map-peer-memory",), group=KV_MEMORY),
    ] = True
    kv_events: Annotated[
        bool,
        Meta(description="Have workers publish what KV they hold (docs/guides/kv-events.md)."),
        Setting(flags=("--kv-events",), group=KV_MEMORY),
    ] = False
    host_kv_memory_bytes: Annotated[
        NumBytes,
        Meta(description="Host memory of each worker for more KV, like 16GiB, pinned on a GPU worker; 0: none."),
        Setting(
            flags=("--host-kv-memory",), metavar="SIZE", form="size", group=KV_TIERS, location="pools[].memory.host"
        ),
    ] = 0
    disk_kv_dir: Annotated[
        str,
        Meta(
            description="Directory for KV beyond host memory, which a worker finds again after a restart; empty: none."
        ),
        Setting(flags=("--disk-kv-dir",), metavar="DIR", group=KV_TIERS),
    ] = ""
    disk_kv_bytes: Annotated[
        NumBytes,
        Meta(description="Largest size of each worker's KV in disk_kv_dir, like 64GiB."),
        Setting(flags=("--disk-kv-size",), metavar="SIZE", form="size", group=KV_TIERS, location="pools[].memory.disk"),
    ] = 16 << 30
    disk_kv_backend: Annotated[
        str,
        Meta(
            description="NIXL backend that moves KV to disk_kv_dir: POSIX, or GPUDirect Storage where it is installed."
        ),
        Setting(flags=("--disk-kv-backend",), choices=DISK_KV_BACKENDS, group=KV_TIERS),
    ] = "posix"
    lmcache_endpoint: Annotated[
        str,
        Meta(
            description="Endpoint of an LMCache server that runs on each worker's machine already, like "
            "tcp://127.0.0.1:5555 (`splitserve lmcache`)."
        ),
        Setting(flags=("--lmcache",), metavar="ENDPOINT", group=KV_TIERS, location="lmcache.endpoint"),
    ] = ""
    kv_keep: Annotated[
        str,
        Meta(description="Blocks that are worth keeping beyond the device."),
        Setting(flags=("--kv-keep",), choices=KEEP_POLICIES, group=KV_TIERS),
    ] = KeepPolicyName.ALL.value
    kv_load_seconds: Annotated[
        float,
        Meta(gt=0, le=MAX_SECONDS, description="How long a request waits for KV from a tier before it computes it."),
        Setting(flags=("--kv-load-seconds",), metavar="S", group=KV_TIERS),
    ] = 5.0

    def __post_init__(self) -> None:
        problems = list(_engine_problems(self))
        if problems:
            raise SettingsError(problems)

    def on(self, device: str) -> "EngineConfig":
        """Return the config for "cpu" or "cuda", with all settings that depend on the device decided."""
        defaults = DEVICE_DEFAULTS[device]
        max_tokens = self.max_num_batched_tokens or max(defaults.max_num_batched_tokens, self.max_num_seqs)
        beside = self.max_num_prefill_tokens_beside_decode or defaults.max_num_prefill_tokens_beside_decode
        within = self.max_num_prefill_tokens_within_objective or self.max_num_prefill_tokens_beside_decode
        within = within or defaults.max_num_prefill_tokens_within_objective
        return msgspec.structs.replace(
            self,
            device=device,
            block_size=self.block_size or defaults.block_size,
            max_num_seqs=self.max_num_seqs or min(defaults.max_num_seqs, max_tokens),
            max_num_batched_tokens=max_tokens,
            max_num_prefill_tokens_beside_decode=min(beside or max_tokens, max_tokens),
            max_num_prefill_tokens_within_objective=min(within or max_tokens, max_tokens),
            tail_chunk_tokens=self.tail_chunk_tokens or defaults.tail_chunk_tokens,
        )


def _engine_problems(engine: EngineConfig) -> Iterator[tuple[str, str]]:
    """Fields, and what is wrong with them on any machine."""
    yield from problems_of(engine)
    if 0 < engine.max_model_len < MIN_MODEL_LEN:
        yield "max_model_len", f"must be at least {MIN_MODEL_LEN} (a token in, a token out), got {engine.max_model_len}"
    if engine.lmcache_endpoint and (problem := endpoint_problem(engine.lmcache_endpoint)):
        yield "lmcache_endpoint", problem
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
            words = f"must be between 0 and {most} on this machine ({num_cpus} hardware threads)"
            yield field, f"{words}, got {getattr(engine, field)}; 0 lets it decide"
