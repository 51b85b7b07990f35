"""The number of a worker's KV blocks, and the longest sequence: a plan from settings and memory. Pure arithmetic."""

import bisect
from dataclasses import dataclass

from splitserve.common.errors import ConfigError
from splitserve.protocol.cache_layout import CacheLayout
from splitserve.protocol.config import EngineConfig

DEFAULT_KV_BYTES = 1 << 30
MAX_SHARE_OF_AVAILABLE = 0.25


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


def window_blocks(window: int, block_size: int) -> int:
    """Return how many blocks a sequence's window covers at most, wherever it begins in the first of them."""
    return blocks_for(window - 1, block_size) + 1


def token_bytes(cache: CacheLayout) -> int:
    """Return the bytes that each token of a sequence adds to the cache, on all ranks together."""
    full = [number for number, group in enumerate(cache.groups) if not group.window]
    return sum(cache.num_ranks * cache.blocks(each).block_bytes // cache.groups[each].block_tokens for each in full)


def sequence_bytes(cache: CacheLayout) -> int:
    """Return the most bytes that a sequence takes besides, whatever its length: those of its windows."""
    return sum(
        cache.num_ranks * cache.blocks(number).block_bytes * window_blocks(group.window, group.block_tokens)
        for number, group in enumerate(cache.groups)
        if group.window
    )


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
            longest + 2 * engine.max_num_seqs * (blocks_for(group.window, group.block_tokens) + 1)
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
    longest = blocks_for(wanted_len, block_size)
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


def longest_sequences(cache: CacheLayout, plan: MemoryPlan) -> int:
    """Return how many sequences of the plan's length its blocks hold at once."""
    numbers = [
        count // (window_blocks(group.window, group.block_tokens) if group.window else longest)
        for count, group in zip(plan.num_blocks, cache.groups, strict=True)
        for longest in [blocks_for(plan.max_model_len, group.block_tokens)]
    ]
    return min(numbers)
