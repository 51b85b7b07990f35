"""A worker process from its config to its end: model, KV memory, connector, loop."""

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import torch

from splitserve.config import EngineConfig, WorkerConfig
from splitserve.decode.build import build_core
from splitserve.decode.gpu_memory import free_kv_bytes
from splitserve.decode.memory_plan import MemoryPlan, plan_kv_memory
from splitserve.errors import ConfigError, HandshakeError
from splitserve.kernels.registry import select_kernels
from splitserve.kvconnector.digest import digests_of, first_digests_of, no_digests
from splitserve.kvconnector.layout import block_bytes
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.nixl import NixlConnector
from splitserve.messages import LayoutRecord, WorkerInfo
from splitserve.models.checkpoint import weights_version
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.cuda_runner import CudaRunner
from splitserve.models.decoder import DecoderModel
from splitserve.models.loader import load_model, resolve_dtype
from splitserve.models.runner import ModelRunner
from splitserve.prefill.executor import Executor, OverlappedExecutor, StepExecutor
from splitserve.prefill.loop import Waker, WorkerLoop
from splitserve.prefill.sockets import WorkerSockets
from splitserve.request import Party, Role
from splitserve.security import check_exposure, is_loopback
from splitserve.step import SampleSpec, ScheduledChunk, StepPlan

logger = logging.getLogger(__name__)

Progress = Callable[[str, dict[str, str]], None]


@dataclass(frozen=True, slots=True)
class _Served:
    """What a worker serves, once it is loaded and placed."""

    memory: KVMemory
    runner: ModelRunner
    max_model_len: int
    vocab_size: int


def run_worker(config: WorkerConfig, progress: Progress) -> None:
    """Serve until SIGTERM, which drains (a second one ends it at once), or SIGINT, which ends it at once.

    ``progress`` hears of the stages "weights", "kv_memory" and "ready". Raises :class:`CheckpointError` or
    :class:`ConfigError`, before the worker is known to anybody, for what can't be served; :class:`HandshakeError` if
    the router refuses it.
    """
    check_exposure(config.host, config.secret)
    if is_loopback(config.host):
        # UCX listens on every network interface and asks nobody who he is: keep it to this machine, too.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    threads = config.engine.threads or _num_usable_cores()
    torch.set_num_threads(threads)
    model_config = load_model_config(config.engine.model)
    device = _device(config.engine.device)
    engine = config.engine.on(device.type)
    config = msgspec.structs.replace(config, engine=engine)
    model, layout = _load(config, model_config, device, progress)
    if device.type == "cuda" and not engine.kv_memory_bytes:
        engine = msgspec.structs.replace(engine, kv_memory_bytes=free_kv_bytes(model, layout, engine))
    plan = plan_kv_memory(
        engine,
        block_bytes=block_bytes(layout),
        max_position_embeddings=model_config.max_position_embeddings,
        available_bytes=psutil.virtual_memory().available,
    )
    memory = KVMemory(layout, plan.num_blocks, device)
    runner = _make_runner(model, memory, plan.max_model_len, engine)
    _warm_up(runner)
    progress("kv_memory", _describe_memory(memory, plan))
    served = _Served(memory, runner, plan.max_model_len, model_config.vocab_size)
    _serve(config, served, threads, progress)


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but PyTorch finds no CUDA device; use --device cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _make_runner(model: DecoderModel, memory: KVMemory, max_model_len: int, engine: EngineConfig) -> ModelRunner:
    if model.device.type != "cuda":
        return ModelRunner(model, memory.blocks)
    runner = CudaRunner(model, memory.blocks, max_num_seqs=engine.max_num_seqs, max_model_len=max_model_len)
    if not engine.enforce_eager:
        logger.info("CUDA graphs captured in %.1f s", runner.capture())
    return runner


def _load(
    config: WorkerConfig, model_config: ModelConfig, device: torch.device, progress: Progress
) -> tuple[DecoderModel, LayoutRecord]:
    engine = config.engine
    started = time.monotonic()
    dtype = resolve_dtype(engine.dtype, model_config, device)
    backend = engine.attention_backend
    overrides = {} if backend == "auto" else {"make_attention": backend}
    try:
        kernels = select_kernels(device, dtype, overrides, model_config.head_dim)
    except ValueError as error:
        raise ConfigError(f"--attention-backend {backend}: {error}") from error
    logger.info("kernels: %s", ", ".join(f"{name} {choice}" for name, choice in kernels.backends.items()))
    model = load_model(
        engine.model, model_config, dtype=dtype, device=device, load_format=engine.load_format, kernels=kernels
    )
    layout = LayoutRecord(
        model=engine.served_model_name or Path(engine.model).resolve().name,
        weights_version=weights_version(engine.model, engine.load_format),
        dtype=str(dtype).removeprefix("torch."),
        block_size=engine.block_size,
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
    )
    progress("weights", {"seconds": f"{time.monotonic() - started:.1f}", "dtype": layout.dtype})
    return model, layout


def _warm_up(runner: ModelRunner) -> None:
    """Run one small step of each kind, so that the first request doesn't pay for lazy initialisation."""
    sample = SampleSpec(temperature=1.0, top_k=2, top_p=0.9, seed=0, choice=0, position=1)
    length = min(8, runner.block_size)
    runner.run(StepPlan([ScheduledChunk([0] * length, 0, [0], sample)]))
    runner.run(StepPlan([ScheduledChunk([0], 0, [0], sample)]))
    runner.kv_cache[0].zero_()


def _describe_memory(memory: KVMemory, plan: MemoryPlan) -> dict[str, str]:
    return {
        "blocks": str(memory.num_blocks),
        "bytes": str(memory.num_blocks * memory.block_bytes),
        "tokens": str(memory.num_blocks * memory.layout.block_size),
        "max_model_len": str(plan.max_model_len),
    }


def _serve(config: WorkerConfig, served: _Served, threads: int, progress: Progress) -> None:
    memory = served.memory
    me = Party(config.engine_id, secrets.randbits(63))
    waker = Waker()
    sockets = WorkerSockets(me, config.host, config.membership, config.secret)
    verify = config.engine.verify_kv
    connector = NixlConnector(me, memory, waker.wake, digests_of(memory) if verify else no_digests)
    core = build_core(
        config,
        me,
        memory.layout,
        memory.generations,
        connector,
        max_model_len=served.max_model_len,
        vocab_size=served.vocab_size,
        digest_blocks=first_digests_of(memory) if verify else no_digests,
    )
    info = WorkerInfo(
        party=me,
        role=Role(config.role),
        endpoint=sockets.endpoint,
        pid=os.getpid(),
        layout=memory.layout,
        num_blocks=memory.num_blocks,
        max_num_seqs=config.engine.max_num_seqs,
        max_model_len=served.max_model_len,
        vocab_size=served.vocab_size,
    )
    executor: Executor
    if isinstance(served.runner, CudaRunner):
        executor = OverlappedExecutor(served.runner, waker.wake)
    else:
        executor = StepExecutor(served.runner, waker.wake)
    loop = WorkerLoop(config, core, connector, executor, sockets=sockets, waker=waker, info=info)
    signal.signal(signal.SIGTERM, lambda *_: loop.drain())
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    while not loop.registered and not loop.stopping:
        loop.run_once()
        if loop.refusal:
            loop.stop()
    if loop.refusal:
        loop.run()  # which ends at once, and closes what it owns
        raise HandshakeError(f"the router refuses {config.engine_id}: {loop.refusal}")
    progress("ready", {"endpoint": sockets.endpoint, "threads": str(threads)})
    loop.run()
    logger.info("stopped; last load: %s", msgspec.json.encode(core.load()).decode())


def _num_usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
