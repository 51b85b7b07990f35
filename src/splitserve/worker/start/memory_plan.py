"""The memory that a GPU has left for KV blocks, beside weights and steps."""

import contextlib
import gc
import logging

import torch

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout.memory import TORCH_DTYPES
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.models.decoder import RunnableModel
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.graph_sizes import MAX_MIXED_CHUNKS, TOKENS_ALONE, MixedSize, batch_sizes
from splitserve.protocol.config import EngineConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.step import SampleSpec, ScheduledChunk, StepPlan

logger = logging.getLogger(__name__)

_GREEDY = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0, position=1)
_GIB = 1 << 30


def free_kv_bytes(model: RunnableModel, layout: LayoutRecord, engine: EngineConfig) -> int:
    """Return ``gpu_memory_utilization`` of the device, less weights, other processes, and what steps and graphs need.

    The largest steps and graphs of prefill and of decode are run over a little KV memory, and measured. The logits of
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


def _try_largest_steps(model: RunnableModel, layout: LayoutRecord, engine: EngineConfig) -> int:
    """Run the largest steps; return the bytes of KV memory that they used. All layers share one group here."""
    num_tokens = min(engine.max_num_batched_tokens, model.config.max_position_embeddings)
    num_blocks = num_blocks_for(num_tokens, layout.block_size)
    shape = (num_blocks, model.config.num_layers, *layout.block_shape[1:])
    blocks = torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=model.device)
    max_model_len = engine.max_model_len or model.config.max_position_embeddings
    runner = CudaRunner(model, blocks, max_num_seqs=engine.max_num_seqs, max_model_len=max_model_len)
    runner.run(StepPlan([ScheduledChunk([0] * num_tokens, 0, range(num_blocks), _GREEDY)]))
    if not engine.enforce_eager:
        runner.capture([engine.max_num_seqs])
        if engine.capture_mixed_steps:
            with contextlib.suppress(NotImplementedError):
                runner.capture_mixed([MixedSize(0, min(num_tokens, TOKENS_ALONE[-1]))])
    return blocks.nbytes
