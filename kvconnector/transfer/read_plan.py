"""Bytes of peers' blocks as rows of addresses: of whole blocks, and of runs of bytes in them. Pure arithmetic.

:mod:`splitserve.protocol.cache_layout` says which bytes of which rank a rank needs. Where both sides split the heads
alike, a block is one contiguous read; where they don't, it is a run of bytes per layer.
"""

import numpy as np
import numpy.typing as npt

from splitserve.protocol.cache_layout import ByteRows
from splitserve.protocol.memory_records import MemoryRegion
from splitserve.protocol.messages.handover import PeerWelcome

Rows = npt.NDArray[np.uint64]


def num_readable_blocks(welcome: PeerWelcome) -> list[int]:
    """Return, by group, the number of a peer's device blocks; that of the first one plus its host tier's slots, which
    are numbered after the blocks."""
    host = welcome.ranks[0].host
    numbers = [region.num_blocks for region in welcome.ranks[0].regions]
    numbers[0] += 0 if host is None else host.slots.num_blocks
    return numbers


def rows_of_blocks(region: MemoryRegion, block_ids: npt.NDArray[np.int32], rows: ByteRows) -> Rows:
    """Return rows ``[len(block_ids) * rows.count, 3]``: address, length, device of the same runs in each block."""
    offsets = np.arange(rows.count, dtype=np.uint64) * np.uint64(rows.pitch)
    blocks = block_ids.astype(np.uint64) * np.uint64(region.block_bytes)
    described = np.empty((len(blocks) * rows.count, 3), dtype=np.uint64)
    described[:, 0] = np.uint64(region.blocks_address + rows.offset) + (blocks[:, None] + offsets).ravel()
    described[:, 1] = rows.width
    described[:, 2] = region.device_id
    return described


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
