"""The number of a worker's KV blocks, and the longest sequence: a plan, and the memory that a GPU has left for it."""

import gc
import logging
from dataclasses import dataclass

import torch

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout.memory import TORCH_DTYPES
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.models.decoder import DecoderModel
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.graph_sizes import MAX_MIXED_CHUNKS, batch_sizes
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

logger = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 1 << 30
MAX_SHARE_OF_AVAILABLE = 0.25
_GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=1)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    max_model_len: int


def plan_kv_memory(
    engine: EngineConfig, *, block_bytes: int, max_position_embeddings: int, available_bytes: int
) -> MemoryPlan:
    """Return number of blocks and context length, from the user's settings and the available memory.

    By default the pool takes 1 GiB, or more if one longest sequence needs it, but at most a quarter of the available
    memory, and not more than twice the memory that ``max_num_seqs`` longest sequences fill. The default context length
    is the model's, cut to the pool's tokens; a requested one that doesn't fit is an error that names one that fits.
    """
    block_size = engine.block_size
    wanted_len = engine.max_model_len or max_position_embeddings
    if engine.max_model_len > max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {engine.max_model_len}, but the model's positions end at {max_position_embeddings}"
        )
    if engine.kv_memory_bytes:
        num_blocks = engine.kv_memory_bytes // block_bytes
    else:
        longest = num_blocks_for(wanted_len, block_size)
        most = min(2 * engine.max_num_seqs * longest, int(available_bytes * MAX_SHARE_OF_AVAILABLE) // block_bytes)
        num_blocks = min(max(DEFAULT_KV_BYTES // block_bytes, longest), most)
    capacity = num_blocks * block_size
    if engine.max_model_len and capacity < engine.max_model_len:
        needed = num_blocks_for(engine.max_model_len, block_size) * block_bytes
        raise ConfigError(
            f"KV memory holds {capacity} tokens, fewer than --max-model-len {engine.max_model_len}; "
            f"raise --kv-memory to {needed} bytes or lower --max-model-len"
        )
    if num_blocks < 2:
        raise ConfigError(f"KV memory holds {num_blocks} blocks of {block_bytes} bytes; raise --kv-memory")
    return MemoryPlan(num_blocks, min(wanted_len, capacity))


def free_kv_bytes(model: DecoderModel, layout: LayoutRecord, engine: EngineConfig) -> int:
    """Return ``gpu_memory_utilization`` of the device, less weights, other processes, and what steps and graphs need.

    The largest prefill step and the largest decode graph are run over a little KV memory, and measured. The logits of
    all other graphs are added: they don't share memory, unless several ranks gather them, where that is more than
    enough. Raises :class:`ConfigError` if nothing is left.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    tried_bytes = _try_largest_steps(model, layout, engine)
    step_bytes = torch.cuda.max_memory_reserved() - before - tried_bytes
    gc.collect()
    torch.cuda.empty_cache()
    graph_rows = 0 if engine.enforce_eager else sum(batch_sizes(engine.max_num_seqs)) - engine.max_num_seqs
    if engine.capture_mixed_steps and not engine.enforce_eager:
        graph_rows += engine.max_num_seqs + MAX_MIXED_CHUNKS
    graph_bytes = graph_rows * model.config.vocab_size * model.dtype.itemsize
    free, total = torch.cuda.mem_get_info()
    kv_bytes = int(total * engine.gpu_memory_utilization) - (total - free) - step_bytes - graph_bytes
    logger.info(
        "GPU memory: %.1f GiB, %.1f used by weights and others, %.1f for steps, %.1f for graphs, %.1f for KV",
        *(number / _GIB for number in (total, total - free, step_bytes, graph_bytes, kv_bytes)),
    )
    if kv_bytes < layout.block_bytes:
        raise ConfigError(
            f"--gpu-memory-utilization {engine.gpu_memory_utilization} leaves no memory for KV: weights and other "
            f"processes take {(total - free) / _GIB:.1f} of {total / _GIB:.1f} GiB, steps {step_bytes / _GIB:.1f}"
        )
    return kv_bytes


def _try_largest_steps(model: DecoderModel, layout: LayoutRecord, engine: EngineConfig) -> int:
    """Run the largest steps; return the bytes of KV memory that they used."""
    num_tokens = min(engine.max_num_batched_tokens, model.config.max_position_embeddings)
    num_blocks = num_blocks_for(num_tokens, layout.block_size)
    blocks = torch.zeros((num_blocks, *layout.block_shape), dtype=TORCH_DTYPES[layout.dtype], device=model.device)
    max_model_len = engine.max_model_len or model.config.max_position_embeddings
    runner = CudaRunner(model, blocks, max_num_seqs=engine.max_num_seqs, max_model_len=max_model_len)
    runner.run(StepPlan([ScheduledChunk([0] * num_tokens, 0, range(num_blocks), _GREEDY)]))
    if not engine.enforce_eager:
        runner.capture([engine.max_num_seqs])
    return blocks.nbytes
