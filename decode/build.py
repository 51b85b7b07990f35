"""Puts a worker together from its parts, by role."""

import secrets
from collections.abc import Sequence

import numpy as np

from splitserve.block_hash import root_hash
from splitserve.config import EngineConfig, WorkerConfig
from splitserve.decode.core import DecodeCore
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.kvconnector.block_pool import BlockPool
from splitserve.kvconnector.connector import KVConnector
from splitserve.kvconnector.digest import LeadingDigests, no_digests
from splitserve.kvconnector.kv_events import KVEventLog, KVEvents
from splitserve.kvconnector.shared_tier import NO_SHARED_TIER, SharedTier
from splitserve.kvconnector.tier import Tier
from splitserve.kvconnector.tier_policy import make_policy
from splitserve.kvconnector.tiers import Tiers
from splitserve.memory_records import LayoutRecord
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.engine_state import EngineState
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.prefill.sequence import BlockManager
from splitserve.prefill.source import SourceSide
from splitserve.request import Party, Role


def build_core(
    config: WorkerConfig,
    me: Party,
    layout: LayoutRecord,
    generations: "np.typing.NDArray[np.uint64]",
    connector: KVConnector,
    *,
    max_model_len: int,
    vocab_size: int,
    first_generation: int | None = None,
    leading_digests: LeadingDigests = no_digests,
    tiers: Sequence[Tier] = (),
    shared_tier: SharedTier = NO_SHARED_TIER,
) -> PrefillCore:
    """A prefill worker pulls from nobody; decode and mixed workers can do both phases.

    The settings of ``config.engine`` that depend on the device are decided (:meth:`EngineConfig.on`).

    ``leading_digests`` gives the digests that go with offered blocks. ``tiers`` hold blocks below the device, cheapest
    first; ``shared_tier`` holds other workers', too.
    """
    engine = config.engine
    first = secrets.randbits(63) if first_generation is None else first_generation
    if not engine.enable_prefix_caching:
        tiers, shared_tier = (), NO_SHARED_TIER
    blocks = _block_manager(engine, layout, generations, first_generation=first, tiers=tiers, shared_tier=shared_tier)
    state = EngineState(
        me=me,
        layout=layout,
        blocks=blocks,
        protocol=config.protocol,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
    )
    prefill = PrefillScheduler(
        blocks,
        max_num_seqs=engine.max_num_seqs,
        tail_chunk_tokens=engine.tail_chunk_tokens if config.role is Role.PREFILL else 0,
    )
    source = SourceSide(state, prefill, connector.served(), leading_digests)
    if config.role is Role.PREFILL:
        return PrefillCore(state, prefill, source, max_num_batched_tokens=engine.max_num_batched_tokens)
    return DecodeCore(
        state,
        DecodeScheduler(
            blocks,
            prefill,
            max_num_seqs=engine.max_num_seqs,
            max_num_prefill_tokens=engine.max_num_prefill_tokens_beside_decode,
        ),
        source,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        connector=connector.name,
    )


def _block_manager(
    engine: EngineConfig,
    layout: LayoutRecord,
    generations: "np.typing.NDArray[np.uint64]",
    *,
    first_generation: int,
    tiers: Sequence[Tier],
    shared_tier: SharedTier,
) -> BlockManager:
    """The pool of device blocks, with ``tiers`` below it."""
    events = KVEventLog() if engine.kv_events else KVEvents()
    pool = BlockPool(
        generations,
        first_generation=first_generation,
        enable_prefix_caching=engine.enable_prefix_caching,
        events=events,
    )
    below = Tiers(
        pool,
        tiers,
        policy=make_policy(engine.kv_keep),
        load_seconds=engine.kv_load_seconds,
        events=events,
        shared=shared_tier,
    )
    return BlockManager(pool, layout.block_size, root_hash(layout), below)
