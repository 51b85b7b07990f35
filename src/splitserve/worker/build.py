"""Puts a worker's core together from its parts. All roles have the same ones."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from splitserve.common.errors import ConfigError
from splitserve.decode.part import SinkPart
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.cache_groups import GroupPool, TableRule
from splitserve.engine.core import EngineCore
from splitserve.engine.requests import Requests
from splitserve.engine.scheduling import StepBudget, StepScheduler
from splitserve.engine.state import EngineState
from splitserve.kvconnector.blocks.digest import LeadingDigests, no_digests
from splitserve.kvconnector.blocks.kv_events import KVEventLog, KVEvents
from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.kvconnector.tiers.policy import make_policy
from splitserve.kvconnector.tiers.shared import NO_SHARED_TIER, SharedTier
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.kvconnector.tiers.tiers import Tiers
from splitserve.kvconnector.transfer.connector import KVConnector
from splitserve.models.runner.graph_sizes import MAX_MIXED_CHUNKS
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.prefill.source import SourcePart
from splitserve.protocol.block_hash import root_hash
from splitserve.protocol.config import EngineConfig, WorkerConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.placement.chunk_bounds import ChunkBounds
from splitserve.protocol.request import Party, Role

_GENERATIONS_APART = 1 << 60
"""Distance of two groups' first generations: an id of another group doesn't have the generation that was offered."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """A worker's KV memory, as its core sees it: numbers of blocks and their content, no bytes."""

    layout: LayoutRecord  # the same on all workers that hand KV over to each other
    generations: "np.typing.NDArray[np.uint64]"  # of the device blocks
    first_generation: int | None = None  # None: random, so that no other incarnation has had it
    other_generations: "Sequence[np.typing.NDArray[np.uint64]]" = ()  # of the groups after the first
    leading_digests: LeadingDigests = no_digests  # digests that go with offered blocks
    tiers: Sequence[Tier] = ()  # below the device, cheapest first
    shared_tier: SharedTier = field(default_factory=lambda: NO_SHARED_TIER)  # holds other workers' blocks, too


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """Bounds that the model sets on requests."""

    max_model_len: int  # tokens of a prompt and its output
    vocab_size: int  # token ids are below it


def build_core(
    config: WorkerConfig, me: Party, memory: BlockMemory, connector: KVConnector, bounds: ModelBounds
) -> EngineCore:
    """Return the core of a worker, which can do both phases: its role is the budget of its steps.

    The settings of ``config.engine`` that depend on the device are decided (:meth:`EngineConfig.on`).
    """
    blocks = _block_manager(config.engine, memory)
    state = EngineState(
        me=me,
        layout=memory.layout,
        blocks=blocks,
        protocol=config.protocol,
        max_model_len=bounds.max_model_len,
        vocab_size=bounds.vocab_size,
    )
    budget = step_budget(config)
    scheduler = StepScheduler(PrefillScheduler(blocks, budget), DecodeScheduler(blocks, state.counters), budget)
    requests = Requests(state, scheduler)
    source = SourcePart(requests, connector.served(), memory.leading_digests)
    return EngineCore(requests, [source, SinkPart(requests, connector.name)])


def step_budget(config: WorkerConfig) -> StepBudget:
    """Return the bounds of a worker's steps in its role."""
    engine = config.engine
    has_graphs = engine.device == "cuda" and engine.capture_mixed_steps and not engine.enforce_eager
    return StepBudget(
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        beside_decode=ChunkBounds(
            engine.max_num_prefill_tokens_beside_decode, engine.max_num_prefill_tokens_within_objective
        ),
        max_prompts_beside_decode=MAX_MIXED_CHUNKS if has_graphs else 0,
        tail_chunk_tokens=engine.tail_chunk_tokens if config.role is Role.PREFILL else 0,
        draws_second_tokens=engine.second_token_at_prefill,
    )


def _block_manager(engine: EngineConfig, memory: BlockMemory) -> BlockManager:
    """Return the pools of device blocks, with the tiers below them. Raises :class:`ConfigError` for tiers that can't
    hold the cache's blocks."""
    events = KVEventLog() if engine.kv_events else KVEvents()
    has_tiers = engine.enable_prefix_caching
    cache = memory.layout.cache
    first_generation = secrets.randbits(63) if memory.first_generation is None else memory.first_generation
    pool, *other_pools = [
        BlockPool(
            generations,
            first_generation=(first_generation + number * _GENERATIONS_APART) % 2**64,
            enable_prefix_caching=engine.enable_prefix_caching,
            events=events if number == 0 else None,
        )
        for number, generations in enumerate((memory.generations, *memory.other_generations))
    ]
    if not cache.is_simple and (memory.tiers or memory.shared_tier is not NO_SHARED_TIER):
        raise ConfigError("tiers below the device hold blocks of one full group; this model's cache has another form")
    below = Tiers(
        pool,
        memory.tiers if has_tiers else (),
        policy=make_policy(engine.kv_keep),
        load_seconds=engine.kv_load_seconds,
        events=events,
        shared=memory.shared_tier if has_tiers else NO_SHARED_TIER,
    )
    rules = [TableRule.of(group) for group in cache.groups[1:]]
    others = tuple(GroupPool(*pair) for pair in zip(other_pools, rules, strict=True))
    return BlockManager(pool, memory.layout.block_size, root_hash(memory.layout), below, others)
