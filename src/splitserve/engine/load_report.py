"""The load that a worker reports with each heartbeat."""

from collections.abc import Sequence as ListLike

from splitserve.engine.parts import Part
from splitserve.engine.scheduling import StepScheduler
from splitserve.engine.state import EngineState
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.protocol.messages.membership import WorkerLoad


def load_of(state: EngineState, scheduler: StepScheduler, parts: ListLike[Part]) -> WorkerLoad:
    """Return load and counters of a worker's core."""
    pool, counters, tiers = state.blocks.pool, state.counters, state.blocks.tiers
    outside = [sequence for part in parts for sequence in part.waiting]
    waiting = [*outside, *scheduler.prompts.waiting, *scheduler.prompts.active]
    load = WorkerLoad(
        num_waiting=len(waiting),
        num_running=scheduler.num_running,
        waiting_tokens=sum(sequence.num_remaining for sequence in waiting),
        blocks_free=pool.count(BlockState.FREE),
        blocks_cached=pool.count(BlockState.CACHED),
        blocks_referenced=pool.count(BlockState.REFERENCED),
        blocks_quarantined=pool.count(BlockState.QUARANTINED),
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        output_tokens=counters.output_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        preemptions=scheduler.decodes.num_preemptions,
        handovers=counters.handovers,
        handover_bytes=counters.handover_bytes,
        handover_failures=counters.handover_failures,
        stale_messages=counters.stale_messages,
        kv_mismatches=counters.kv_mismatches,
        reads_direct=counters.reads_direct,
        reads_layers=counters.reads_layers,
        reads_staged=counters.reads_staged,
        reads_gathered=counters.reads_gathered,
        reads_mapped=counters.reads_mapped,
        reads_kernel=counters.reads_kernel,
        tier_blocks=tiers.num_blocks,
        tier_stored_blocks=tiers.counters.tier_stored_blocks,
        tier_loaded_blocks=tiers.counters.tier_loaded_blocks,
        tier_failures=tiers.counters.tier_failures,
        peer_prefixes=counters.peer_prefixes,
        peer_prefix_blocks=counters.peer_prefix_blocks,
        peer_prefix_failures=counters.peer_prefix_failures,
        other_copies=counters.other_copies,
        host_offered_blocks=counters.host_offered_blocks,
        reads_repeated=counters.reads_repeated,
        tiers=tiers.report(state.block_bytes),
        requests_tracked=len(state.sequences) + sum(part.num_live for part in parts),
    )
    for part in parts:
        load = part.report(load)
    return load
