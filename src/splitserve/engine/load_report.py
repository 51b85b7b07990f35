"""The load that a worker reports with each heartbeat."""

from collections.abc import Sequence as ListLike

import msgspec

from splitserve.engine.parts import Part
from splitserve.engine.scheduling import StepScheduler
from splitserve.engine.sequence import Sequence
from splitserve.engine.state import EngineState
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.protocol.counters import WorkerLoad


def load_of(
    state: EngineState, scheduler: StepScheduler, parts: ListLike[Part], *, is_frozen: bool = False
) -> WorkerLoad:
    """Return load and counters of a worker's core. ``is_frozen``: it runs no step, and none is in flight."""
    tiers = state.blocks.tiers
    pool = min(state.blocks.pools, key=lambda pool: pool.num_available / pool.num_blocks)  # the scarcest group's
    outside = [sequence for part in parts for sequence in part.waiting]
    waiting = [*outside, *scheduler.prompts.waiting, *scheduler.prompts.active]
    counters = msgspec.structs.asdict(state.counters) | {
        "step_tokens": state.counters.step_tokens.copy(),  # the engine adds to them in place
        "step_sequences": state.counters.step_sequences.copy(),
    }
    load = WorkerLoad(
        **counters,
        num_waiting=len(waiting),
        num_running=scheduler.num_running,
        waiting_tokens=sum(sequence.num_remaining for sequence in waiting),
        blocks_free=pool.count(BlockState.FREE),
        blocks_cached=pool.count(BlockState.CACHED),
        blocks_referenced=pool.count(BlockState.REFERENCED),
        blocks_reserved=sum(_num_reserved(sequence, state.blocks.block_size) for sequence in state.sequences.values()),
        blocks_quarantined=pool.count(BlockState.QUARANTINED),
        tier_blocks=tiers.num_blocks,
        tiers=tiers.report(state.block_bytes * state.layout.tensor_parallel_size),
        frozen=int(is_frozen),
        freeze_number=state.freeze_number,
        requests_tracked=len(state.sequences) + sum(part.num_live for part in parts),
    )
    for part in parts:
        load = part.report(load)
    return load


def _num_reserved(sequence: Sequence, block_size: int) -> int:
    """Return the blocks that a sequence holds for tokens without KV so far."""
    return max(0, len(sequence.block_ids) - num_blocks_for(sequence.num_computed, block_size))
