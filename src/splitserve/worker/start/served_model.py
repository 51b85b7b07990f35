"""A model ready to run: weights, KV memory and runner, on one rank. All ranks of a worker do this together."""

import importlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from splitserve.common.errors import ConfigError
from splitserve.kernels.api import AttentionShape, Kernels
from splitserve.kernels.fp8.kv import FP8, DequantisingAttention
from splitserve.kernels.reference.linear import bound_primitive_caches
from splitserve.kernels.registry import select_kernels
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.tiers.host import load_gates
from splitserve.kvconnector.tiers.load_gates import LoadGates
from splitserve.models.cache_groups import cache_groups
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.declared import check_tensor_parallel_size
from splitserve.models.decoder import RunnableModel
from splitserve.models.kv_plan import MemoryPlan, plan_kv_memory
from splitserve.models.parallel.ranks import Collectives
from splitserve.models.roofline import device_rates, estimate_steps
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.graph_sizes import mixed_sizes
from splitserve.models.runner.runner import ModelRunner
from splitserve.models.weights.checkpoint import weights_version
from splitserve.models.weights.loader import load_model, resolve_dtype
from splitserve.models.weights.shard import local_config
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LATENT_ORDER, TRANSFORMERS_ORDER, LayoutRecord, latent_group
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Role
from splitserve.worker.start.beside import Beside
from splitserve.worker.start.clock import StartClock
from splitserve.worker.start.memory_plan import free_kv_bytes
from splitserve.worker.start.warm_up import StepLimits, load_attention, warm_up

logger = logging.getLogger(__name__)

Progress = Callable[[str, dict[str, str]], None]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A rank's model, loaded. ``memory`` holds the rank's own heads; ``limits`` of its steps; ``gates``: the gates by
    which the runner's steps wait for loads into the memory, None if they don't wait."""

    memory: KVMemory
    runner: ModelRunner
    max_model_len: int
    vocab_size: int
    limits: StepLimits
    gates: LoadGates | None = None
    step_estimates: Mapping[Role, StepModel] = field(default_factory=dict)  # of the time before steps were seen

    def warm_up(self, clock: StartClock) -> None:
        """Run steps of all kinds, before the first request. All ranks do this together."""
        with clock.phase("warm-up"):
            warm_up(self.runner, self.limits)


def device_of(wanted: str, rank: int, size: int) -> torch.device:
    """The device of a worker's rank: the current one, and those after it. Raises :class:`ConfigError`."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but PyTorch finds no CUDA device; use --device cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    first = torch.cuda.current_device()
    if first + size > torch.cuda.device_count():
        raise ConfigError(
            f"--tensor-parallel-size is {size}, but this worker sees {torch.cuda.device_count() - first} CUDA devices"
        )
    return torch.device("cuda", first + rank)


def load_served_model(
    engine: EngineConfig, device: torch.device, group: Collectives, progress: Progress, clock: StartClock | None = None
) -> ServedModel:
    """Load this rank's part of the model, allocate its KV memory, and make its runner, which is still to be warmed up.

    All ranks of ``group`` call it with the same ``engine``, whose settings that depend on the device are decided, and
    get the same number of blocks. ``progress`` is called at the stages "weights" and "kv_memory"; ``clock`` measures
    every phase. Raises :class:`CheckpointError` or :class:`ConfigError` for a model or settings that can't be served.
    """
    clock = clock or StartClock()
    if device.type == "cpu":
        bound_primitive_caches()
    model_config = load_model_config(engine.model, engine.model_backend)
    if model_config.transformers is not None:
        engine = msgspec.structs.replace(engine, enforce_eager=True)  # its code may wait for the device
    check_tensor_parallel_size(model_config, group.shard.size, engine.expert_parallel)
    model, layout = _load(engine, model_config, device, group, progress=progress, clock=clock)
    group.prepare(model_config.hidden_size, model.dtype)
    size = group.shard.size
    if device.type == "cuda" and not engine.kv_memory_bytes:
        with clock.phase("the largest steps, to size KV memory"):
            kv_bytes = size * group.lowest(free_kv_bytes(model, layout, engine))
        engine = msgspec.structs.replace(engine, kv_memory_bytes=kv_bytes)
    plan = plan_kv_memory(
        engine,
        layout.cache,
        max_position_embeddings=model_config.max_position_embeddings,
        available_bytes=group.lowest(psutil.virtual_memory().available),
    )
    with clock.phase("KV memory"):
        memory = KVMemory(layout, plan.num_blocks, device)
    limits = _step_limits(engine, plan)
    gates = load_gates(layout, device) if engine.host_kv_memory_bytes and engine.enable_prefix_caching else None
    runner = _make_runner(model, memory, limits, engine, clock=clock, gates=gates, group=group)
    progress("kv_memory", _describe_memory(memory, plan))
    rates = device_rates(device, engine.threads)
    estimates = {role: estimate_steps(model_config, rates, model.dtype.itemsize, size, role) for role in Role}
    return ServedModel(memory, runner, plan.max_model_len, model_config.vocab_size, limits, gates, estimates)


def _load(
    engine: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    group: Collectives,
    *,
    progress: Progress,
    clock: StartClock,
) -> tuple[RunnableModel, LayoutRecord]:
    started = time.monotonic()
    dtype = resolve_dtype(engine.dtype, model_config, device)
    kv_dtype = FP8 if engine.kv_cache_dtype == "fp8" else dtype
    with clock.phase("kernels"):
        kernels = _select_kernels(engine, device, dtype, model_config)
    local = local_config(model_config, group.shard.size)
    shape = AttentionShape(
        local.num_heads, local.num_kv_heads, local.head_dim, engine.block_size, local.num_layers, dtype, device,
        has_sinks=local.sinks,
    )  # fmt: skip
    preloads = device.type == "cuda" and model_config.latent is None

    def preload() -> None:
        with clock.phase("attention kernels, beside the weights"):
            load_attention(kernels, shape)

    # One waits for a compiler, the other for files.
    preloading = Beside("attention-preload", preload) if preloads else None
    with clock.phase("weights"):
        options: dict[str, Any] = {
            "dtype": dtype,
            "device": device,
            "load_format": engine.load_format,
            "kernels": kernels,
        }
        if model_config.transformers is None:
            model: RunnableModel = load_model(engine.model, model_config, group=group, kv_dtype=kv_dtype, **options)
        else:
            loading = importlib.import_module("splitserve.models.transformers_backend.loading")
            model = loading.load_transformers_model(engine.model, model_config, **options)
    if preloading is not None:
        preloading.wait()
    layout = layout_of(engine, model_config, str(kv_dtype).removeprefix("torch."), group.shard.size)
    progress("weights", {"seconds": f"{time.monotonic() - started:.1f}", "dtype": str(dtype).removeprefix("torch.")})
    return model, layout


def layout_of(engine: EngineConfig, model_config: ModelConfig, kv_dtype: str, num_ranks: int) -> LayoutRecord:
    """Return the shape of a worker's KV memory; ``kv_dtype`` by its name in PyTorch, like "bfloat16"."""
    layout = LayoutRecord(
        model=engine.served_model_name or Path(engine.model).resolve().name,
        weights_version=weights_version(engine.model, engine.load_format),
        dtype=kv_dtype,
        block_size=engine.block_size,
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        tensor_parallel_size=num_ranks,
        groups=cache_groups(model_config, engine.block_size, kv_dtype),
    )
    if model_config.transformers is not None:
        return msgspec.structs.replace(layout, order=TRANSFORMERS_ORDER)
    if (latent := model_config.latent) is None:
        return layout
    group = latent_group(model_config.num_layers, engine.block_size, latent.width, kv_dtype)
    return msgspec.structs.replace(layout, head_dim=latent.width, order=LATENT_ORDER, groups=(group,))


def _select_kernels(
    engine: EngineConfig, device: torch.device, dtype: torch.dtype, model_config: ModelConfig
) -> Kernels:
    backend = engine.attention_backend
    fp8_kv = engine.kv_cache_dtype == "fp8"
    if fp8_kv and device.type == "cuda":
        if backend not in ("auto", "triton"):
            raise ConfigError(f"--kv-cache-dtype fp8 takes the attention backend triton, not {backend}")
        backend = "triton"
    operation = "make_attention" if model_config.latent is None else "make_latent_attention"
    overrides = {} if backend == "auto" else {operation: backend}
    try:
        kernels = select_kernels(device, dtype, overrides, model_config.head_dim, model_config.sinks)
    except ValueError as error:
        raise ConfigError(f"--attention-backend {backend}: {error}") from error
    logger.info("kernels: %s", ", ".join(f"{name} {choice}" for name, choice in kernels.backends.items()))
    if fp8_kv and device.type != "cuda":
        inner = kernels.make_attention
        kernels = replace(kernels, make_attention=lambda shape: DequantisingAttention(shape, inner))
    return kernels


def _make_runner(
    model: RunnableModel,
    memory: KVMemory,
    limits: StepLimits,
    engine: EngineConfig,
    *,
    clock: StartClock,
    gates: LoadGates | None,
    group: Collectives,
) -> ModelRunner:
    if model.device.type != "cuda":
        return ModelRunner(model, memory.kernel_views, model_dir=Path(engine.model))
    runner = CudaRunner(
        model,
        memory.kernel_views,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=limits.max_model_len,
        gates=gates,
        model_dir=Path(engine.model),
    )
    if not engine.enforce_eager:
        with clock.phase("CUDA graphs"):
            runner.capture()
            if engine.capture_mixed_steps:
                _capture_mixed(runner, limits, group)
    return runner


def _capture_mixed(runner: CudaRunner, limits: StepLimits, group: Collectives) -> None:
    beside, longest = limits.max_num_prefill_tokens_beside_decode, limits.longest_chunk
    sized = min(limits.max_num_prefill_tokens_within_objective, longest)
    try:
        runner.capture_mixed(mixed_sizes(limits.max_num_seqs, beside, longest, sized), group.lowest)
    except NotImplementedError as problem:
        logger.info("steps with prefill are launched kernel by kernel: %s", problem)


def _step_limits(engine: EngineConfig, plan: MemoryPlan) -> StepLimits:
    return StepLimits(
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_prefill_tokens_beside_decode=engine.max_num_prefill_tokens_beside_decode,
        max_num_prefill_tokens_within_objective=engine.max_num_prefill_tokens_within_objective,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks[0],
        block_size=engine.block_size,
        other_blocks=plan.num_blocks[1:],
    )


def _describe_memory(memory: KVMemory, plan: MemoryPlan) -> dict[str, str]:
    return {
        "blocks": str(memory.num_blocks),
        "bytes": str(memory.num_bytes * memory.layout.tensor_parallel_size),
        "tokens": str(memory.num_blocks * memory.layout.block_size),
        "max_model_len": str(plan.max_model_len),
    }
