"""Sequences, blocks and schedulers for tests of scheduling. Not a test module."""

import zlib

import numpy as np

from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.scheduling import Planned, StepBudget, StepScheduler
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.kvconnector.tiers.tiers import Tiers
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.protocol.counters import WorkerCounters
from splitserve.protocol.placement.chunk_bounds import ChunkBounds
from splitserve.protocol.request import Party, RequestKey, SamplingParams

BLOCK_SIZE = 4
ROUTER = Party("router", 1)


def make_blocks(num_blocks: int = 64) -> BlockManager:
    pool = BlockPool(np.zeros(num_blocks, dtype=np.uint64), first_generation=1)
    return BlockManager(pool, BLOCK_SIZE, b"root", Tiers(pool))


def make_sequence(
    name: str, tokens: int | list[int], *, max_tokens: int = 100, decodes_here: bool = True, itl_seconds: float = 0.0
) -> Sequence:
    """Distinct tokens by name, so that no two share a prefix by chance."""
    token_ids = (
        [zlib.crc32(f"{name} {i}".encode()) % 10_000 for i in range(tokens)]
        if isinstance(tokens, int)
        else list(tokens)
    )
    sampling = SamplingParams(max_tokens=max_tokens)
    return Sequence(
        RequestKey(name),
        ROUTER,
        token_ids,
        len(token_ids),
        sampling,
        deadline=100.0,
        itl_seconds=itl_seconds,
        decodes_here=decodes_here,
    )


def make_computed(blocks: BlockManager, name: str, num_prompt_tokens: int, *, itl_seconds: float = 0.0) -> Sequence:
    """A sequence whose prompt is computed and whose first token is drawn."""
    sequence = make_sequence(name, num_prompt_tokens, itl_seconds=itl_seconds)
    assert blocks.reserve(sequence)
    sequence.num_computed = num_prompt_tokens
    blocks.publish_computed(sequence)
    sequence.token_ids.append(1)
    sequence.stage = Stage.PULLING
    return sequence


def complete(blocks: BlockManager, planned: list[Planned]) -> None:
    """Complete a step as the core does, but draw no tokens."""
    for sequence, chunk in planned:
        sequence.num_computed += len(chunk.token_ids)
        blocks.publish_computed(sequence)


def lengths(planned: list[Planned]) -> list[tuple[str, int]]:
    return [(sequence.key.request_id, len(chunk.token_ids)) for sequence, chunk in planned]


def make_prefill(
    blocks: BlockManager | None = None, *, max_num_seqs: int, tail_chunk_tokens: int = 0
) -> PrefillScheduler:
    budget = StepBudget(1000, max_num_seqs, ChunkBounds(1000, 1000), tail_chunk_tokens)
    return PrefillScheduler(make_blocks() if blocks is None else blocks, budget)


def make_decode(
    num_blocks: int = 64,
    max_num_seqs: int = 4,
    max_num_prefill_tokens: int = 1000,
    max_num_sized_tokens: int = 1000,
    max_prompts: int = 0,
) -> tuple[BlockManager, StepScheduler]:
    blocks = make_blocks(num_blocks)
    bounds = ChunkBounds(max_num_prefill_tokens, max_num_sized_tokens)
    budget = StepBudget(1000, max_num_seqs, bounds, max_prompts_beside_decode=max_prompts)
    return blocks, StepScheduler(PrefillScheduler(blocks, budget), DecodeScheduler(blocks, WorkerCounters()), budget)


def plan(scheduler: StepScheduler, num_tokens: int) -> list[Planned]:
    """A step of at most ``num_tokens``."""
    scheduler.budget.max_num_batched_tokens = num_tokens
    planned = scheduler.plan()
    scheduler.check_invariants()
    return planned
