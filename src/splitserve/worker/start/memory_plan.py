"""The number of a worker's KV blocks, and the longest sequence. Pure arithmetic."""

from dataclasses import dataclass

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.protocol.config import EngineConfig

DEFAULT_KV_BYTES = 1 << 30
MAX_SHARE_OF_AVAILABLE = 0.25


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
