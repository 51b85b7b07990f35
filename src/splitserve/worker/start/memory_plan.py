"""The number of a worker's KV blocks, and the longest sequence: a plan, and the memory that a GPU has left for it."""

import bisect
import gc
import logging
from dataclasses import dataclass

import torch

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout.memory import TORCH_DTYPES
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.models.decoder import RunnableModel
from splitserve.models.runner.cuda import CudaRunner
from splitserve.models.runner.graph_sizes import MAX_MIXED_CHUNKS, batch_sizes
from splitserve.protocol.cache_layout import CacheLayout
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
    """The blocks of each group of the cache, and the longest sequence."""

    num_blocks: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Pools:
    """The pools of a cache's groups as functions of the first one's blocks. ``most``: of each group, the blocks that
    it can use at all; None: as many as the first group has. ``block_bytes``: on all ranks together."""

    block_bytes: tuple[int, ...]
    most: tuple[int | None, ...]

    @classmethod
    def of(cls, cache: CacheLayout, engine: EngineConfig, longest: int) -> "_Pools":
        """Return the pools for sequences of up to ``longest`` blocks.

        A prompt holds window blocks of all its tokens when it begins, later those of a window.
        """
        numbers = range(len(cache.groups))
        most = [
            longest + 2 * engine.max_num_seqs * (num_blocks_for(group.window, group.block_tokens) + 1)
            if group.window
            else None
            for group in cache.groups
        ]
        return cls(tuple(cache.num_ranks * cache.blocks(number).block_bytes for number in numbers), tuple(most))

    def num_blocks(self, first: int) -> tuple[int, ...]:
        """Return the blocks of each group if the first one has ``first``."""
        return tuple(first if most is None else min(first, most) for most in self.most)

    def num_bytes(self, first: int) -> int:
        return sum(count * size for count, size in zip(self.num_blocks(first), self.block_bytes, strict=True))

    def within(self, num_bytes: int) -> int:
        """Return the first group's blocks, as many as fit with the others into that many bytes."""
        most = num_bytes // self.block_bytes[0] + 1
        return bisect.bisect_right(range(1, most + 1), num_bytes, key=self.num_bytes)


def plan_kv_memory(
    engine: EngineConfig, cache: CacheLayout, *, max_position_embeddings: int, available_bytes: int
) -> MemoryPlan:
    """Return numbers of blocks and context length, from the user's settings and the available memory of the ranks.

    By default KV memory takes 1 GiB, or more if one longest sequence needs it, but at most a quarter of the available
    memory, and not more than twice the memory that ``max_num_seqs`` longest sequences fill. The default context length
    is the model's, cut to the pool's tokens; a requested one that doesn't fit is an error that names one that fits. A
    group of windows has the blocks that twice ``max_num_seqs`` sequences need beside a longest prompt.
    """
    block_size = engine.block_size
    wanted_len = engine.max_model_len or max_position_embeddings
    if engine.max_model_len > max_position_embeddings:
        raise ConfigError(
            f"--max-model-len is {engine.max_model_len}, but the model's positions end at {max_position_embeddings}"
        )
    longest = num_blocks_for(wanted_len, block_size)
    pools = _Pools.of(cache, engine, longest)
    if engine.kv_memory_bytes:
        num_blocks = pools.within(engine.kv_memory_bytes)
    else:
        most = min(pools.num_bytes(2 * engine.max_num_seqs * longest), int(available_bytes * MAX_SHARE_OF_AVAILABLE))
        num_blocks = pools.within(min(max(DEFAULT_KV_BYTES, pools.num_bytes(longest)), most))
    capacity = num_blocks * block_size
    if engine.max_model_len and capacity < engine.max_model_len:
        raise ConfigError(
            f"KV memory holds {capacity} tokens, fewer than --max-model-len {engine.max_model_len}; "
            f"raise --kv-memory to {pools.num_bytes(longest)} bytes or lower --max-model-len"
        )
    if num_blocks < 2:
        raise ConfigError(f"KV memory holds {num_blocks} blocks of {pools.num_bytes(1)} bytes; raise --kv-memory")
    return MemoryPlan(pools.num_blocks(num_blocks), min(wanted_len, capacity))


def free_kv_bytes(model: RunnableModel, layout: LayoutRecord, engine: EngineConfig) -> int:
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
    return blocks.nbytes
