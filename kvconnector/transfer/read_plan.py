"""Plan of reads: the peer's ranks that a rank reads from, and the bytes of their blocks that it needs. Pure arithmetic.

A rank's block is ``[layer, kv_head, 2, token, head_dim]`` with the rank's own heads. If both sides split the heads
alike, a block is one contiguous read. If they don't, a rank needs some heads of the blocks of one or several of the
peer's ranks: pieces that are contiguous within a layer only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve.protocol.memory_records import LayoutRecord, MemoryRegion
from splitserve.protocol.messages.handover import PeerWelcome

Rows = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class HeadSpan:
    """Heads that the peer's rank ``rank`` holds for the local rank. ``source_head`` counts in its blocks,
    ``local_head`` in the local ones."""

    rank: int
    source_head: int
    local_head: int
    num_heads: int


def heads_of(layout: LayoutRecord, rank: int) -> range:
    """Return the model's KV heads in ``rank``'s blocks."""
    first = layout.first_kv_head(rank)
    return range(first, first + layout.kv_heads_per_rank)


def head_spans(ours: LayoutRecord, rank: int, theirs: LayoutRecord) -> tuple[HeadSpan, ...]:
    """Return the location of the local rank's heads in the peer's ranks, in order. If several ranks have the
    same head, the local rank's number selects one of them, so that the local ranks spread over them."""
    mine = heads_of(ours, rank)
    held = [heads_of(theirs, other) for other in range(theirs.tensor_parallel_size)]
    spans: list[HeadSpan] = []
    head = mine.start
    while head < mine.stop:
        holders = [other for other, heads in enumerate(held) if head in heads]
        other = holders[rank % len(holders)]
        stop = min(mine.stop, held[other].stop)
        spans.append(HeadSpan(other, head - held[other].start, head - mine.start, stop - head))
        head = stop
    return tuple(spans)


def is_whole(spans: Sequence[HeadSpan], ours: LayoutRecord, theirs: LayoutRecord) -> bool:
    """Return whether local blocks are whole blocks of one rank of the peer."""
    return len(spans) == 1 and spans[0].num_heads == ours.kv_heads_per_rank == theirs.kv_heads_per_rank


def num_readable_blocks(welcome: PeerWelcome) -> int:
    """Return the number of a peer's device blocks plus its host tier's slots, which are numbered after the blocks."""
    host = welcome.ranks[0].host
    return welcome.ranks[0].region.num_blocks + (0 if host is None else host.slots.num_blocks)


def layer_rows(
    layout: LayoutRecord, region: MemoryRegion, block_ids: npt.NDArray[np.int32], first_head: int, num_heads: int
) -> Rows:
    """Return rows ``[len(block_ids) * num_layers, 3]``: address, length, device of some heads of each block, layer by
    layer.

    ``region`` holds blocks of ``layout``; ``first_head`` counts in them.
    """
    layer_bytes = region.block_bytes // layout.num_layers
    head_bytes = layer_bytes // layout.kv_heads_per_rank
    layers = np.arange(layout.num_layers, dtype=np.uint64) * np.uint64(layer_bytes)
    blocks = block_ids.astype(np.uint64) * np.uint64(region.block_bytes)
    rows = np.empty((len(blocks) * layout.num_layers, 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(region.blocks_address + first_head * head_bytes) + (blocks[:, None] + layers).ravel()
    rows[:, 1] = num_heads * head_bytes
    rows[:, 2] = region.device_id
    return rows


def region_rows(region: MemoryRegion) -> Rows:
    """Return rows ``[num_blocks, 3]``: address, length, device of each block."""
    rows = np.empty((region.num_blocks, 3), dtype=np.uint64)
    offsets = np.arange(region.num_blocks, dtype=np.uint64) * np.uint64(region.block_bytes)
    rows[:, 0] = np.uint64(region.blocks_address) + offsets
    rows[:, 1] = region.block_bytes
    rows[:, 2] = region.device_id
    return rows


def piece_rows(region: MemoryRegion, count: int, size: int) -> Rows:
    """Return rows ``[count, 3]``: address, length, device of pieces of ``size`` bytes from the region's start, none
    adjacent."""
    rows = np.empty((count, 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(region.blocks_address) + np.arange(count, dtype=np.uint64) * np.uint64(2 * size)
    rows[:, 1] = size
    rows[:, 2] = region.device_id
    return rows
