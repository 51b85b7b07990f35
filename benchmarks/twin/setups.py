"""Workers of the twin: as those of a running cluster, or as settings and a model's config make them."""

from collections.abc import Sequence

import msgspec
import psutil

from splitserve.benchmarks.goodput.arms import Arm
from splitserve.benchmarks.twin.calibration import CPU, is_measured
from splitserve.common.errors import ConfigError
from splitserve.models.config import ModelConfig
from splitserve.models.declared import check_tensor_parallel_size
from splitserve.models.kv_plan import MemoryPlan, plan_kv_memory
from splitserve.models.step_costs import decode_bytes
from splitserve.protocol.cache_layout import CacheLayout
from splitserve.protocol.cluster_report import ClusterReport
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.request import Role
from splitserve.simulation.twin.models import Calibration
from splitserve.simulation.twin.worker import WorkerSetup
from splitserve.worker.start.served_model import layout_of

GPU_BYTES = {"B200": 180e9, "H200": 141e9, "H100": 80e9, "A100": 80e9, "L40S": 48e9}
STEP_BYTES = 3e9
"""Memory that steps and CUDA graphs take of a GPU, beside weights and KV."""


def setups_of_arm(
    arm: Arm, engine: EngineConfig, config: ModelConfig, calibration: Calibration, gpu: str
) -> list[WorkerSetup]:
    """Return the workers of an arm. ``gpu``: the name of their device, or "cpu".

    The number of blocks comes from the function by which workers size their memory. Raises :class:`ConfigError`.
    """
    engine = arm.engine(engine).on(CPU if gpu == CPU else "cuda")
    dtype = "float32" if gpu == CPU else "bfloat16"
    check_tensor_parallel_size(config, engine.tensor_parallel_size, engine.expert_parallel)
    layout = layout_of(engine, config, dtype, engine.tensor_parallel_size)
    plan = _memory(engine, config, layout.cache, gpu)
    host_bytes = engine.host_kv_memory_bytes or calibration.host_kv_bytes
    host_slots = host_bytes // (layout.block_bytes * layout.tensor_parallel_size) if layout.cache.is_simple else 0
    numbers = {Role.PREFILL: arm.num_prefill, Role.DECODE: arm.num_decode, Role.MIXED: arm.num_mixed}
    return [
        WorkerSetup(
            name=f"{role}-{number}",
            role=role,
            engine=engine,
            layout=layout,
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
            vocab_size=config.vocab_size,
            model=calibration.step_model(role),
            law=calibration.law(role),
            host_slots=host_slots,
        )
        for role, count in numbers.items()
        for number in range(count)
    ]


def setups_of_cluster(report: ClusterReport, calibration: Calibration) -> list[WorkerSetup]:
    """Return the workers of a running cluster, with their limits and numbers of blocks."""
    setups = []
    for worker in report.workers:
        info = worker.info
        if not info.layout.cache.is_simple:
            raise ConfigError(
                f"{info.party.engine_id} has a cache of several groups, whose sizes a cluster doesn't report: simulate "
                "its model with --model"
            )
        engine = EngineConfig(
            model=info.layout.model,
            block_size=info.layout.block_size,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_num_prefill_tokens_beside_decode=info.max_num_prefill_tokens,
            max_num_prefill_tokens_within_objective=info.max_num_sized_tokens,
            enable_prefix_caching=info.prefix_caching,
        ).on("cuda" if "cuda" in info.setup.device.lower() or "nvidia" in info.setup.device.lower() else CPU)
        setups.append(
            WorkerSetup(
                name=info.party.engine_id,
                role=info.role,
                engine=engine,
                layout=info.layout,
                num_blocks=(info.num_blocks,),
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
                host_slots=info.setup.host_kv_bytes // info.layout.block_bytes,
                model=worker.step_model if is_measured(worker.step_model) else calibration.step_model(info.role),
            )
        )
    return setups


def described(setups: Sequence[WorkerSetup]) -> str:
    """Return a line on each kind of worker."""
    kinds: dict[tuple[str, int, int, int], int] = {}
    for setup in setups:
        tokens = setup.num_blocks[0] * setup.layout.block_size
        kind = (str(setup.role), tokens, setup.engine.max_num_seqs, setup.engine.max_num_batched_tokens)
        kinds[kind] = kinds.get(kind, 0) + 1
    return "; ".join(
        f"{count} {role} with KV of {tokens} tokens, {seqs} sequences, steps of {budget} tokens"
        for (role, tokens, seqs, budget), count in kinds.items()
    )


def _memory(engine: EngineConfig, config: ModelConfig, cache: CacheLayout, gpu: str) -> MemoryPlan:
    if gpu != CPU and not engine.kv_memory_bytes:
        weights = decode_bytes(config, 0, 0, 2)
        if not config.tie_word_embeddings:  # no step reads the whole embedding, but it takes its memory
            weights += 2 * config.vocab_size * config.hidden_size
        left = engine.tensor_parallel_size * (GPU_BYTES[gpu] * engine.gpu_memory_utilization - STEP_BYTES) - weights
        if left <= 0:
            raise ConfigError(
                f"the model's {weights / 1e9:.0f} GB of weights don't fit {engine.tensor_parallel_size} {gpu}: raise "
                "--tensor-parallel-size"
            )
        engine = msgspec.structs.replace(engine, kv_memory_bytes=int(left))
    return plan_kv_memory(
        engine,
        cache,
        max_position_embeddings=config.max_position_embeddings,
        available_bytes=psutil.virtual_memory().available,
    )
