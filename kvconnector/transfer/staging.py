"""Staging area for data that must be taken apart: two halves, one filled while the other is emptied. It belongs to one
thread's reads from one peer."""

from collections.abc import Sequence

import torch

from splitserve.kvconnector.layout.memory import KVMemory, words_of
from splitserve.kvconnector.transfer.device_copies import DeviceCopies, Pending
from splitserve.protocol.cache_layout import BlockLayout, HeadSpan
from splitserve.protocol.memory_records import MemoryKind, MemoryRegion


class Staging:
    """Two halves of ``half_bytes`` on the device of ``memory``, or ``on_host``: pinned, if ``memory`` is a GPU's.

    They hold whole blocks of ``source``'s ranks, in slots, or pieces with the needed heads only.
    """

    def __init__(self, memory: KVMemory, source: BlockLayout, half_bytes: int, *, on_host: bool = False) -> None:
        self._source = source
        self.slot_bytes = source.block_bytes
        self.slots_per_half = half_bytes // self.slot_bytes
        self.half_bytes = self.slots_per_half * self.slot_bytes
        assert self.slots_per_half > 0, "a half has no room for a block"
        device, is_pinned = ("cpu", memory.device.type == "cuda") if on_host else (memory.device, False)
        self._flat = torch.zeros(2 * self.half_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)
        self._copies = DeviceCopies(memory)
        self._kind = MemoryKind.DRAM if on_host else memory.kind
        if memory.device.type == "cuda":
            self._copies.compile(min(memory.layout.block_layout.heads_per_rank(), source.heads_per_rank()))
            torch.cuda.synchronize(memory.device)  # the zeros must be written before any data lands

    def region(self) -> MemoryRegion:
        """Return the location of the slots, as blocks."""
        device_id = self._flat.device.index or 0
        return MemoryRegion(self._kind, device_id, self._flat.data_ptr(), 2 * self.slots_per_half, self.slot_bytes)

    def half(self, half: int, num_bytes: int) -> MemoryRegion:
        """Return the location of the start of a half, as one piece."""
        address = self._flat.data_ptr() + half * self.half_bytes
        return MemoryRegion(self._kind, self._flat.device.index or 0, address, 1, num_bytes)

    def scatter_blocks(self, half: int, local_blocks: Sequence[int], span: HeadSpan) -> Pending:
        """Copy ``span``'s heads of the blocks in a half's first slots to their location in ``local_blocks``."""
        flat = self._flat[half * self.half_bytes :][: len(local_blocks) * self.slot_bytes]
        blocks = words_of(flat.view(len(local_blocks), self.slot_bytes), self._source)
        heads = range(span.local_head, span.local_head + span.num_heads)
        return self._copies.scatter_part(blocks, local_blocks, span.source_head, heads)

    def scatter_pieces(self, half: int, local_blocks: Sequence[int], span: HeadSpan) -> Pending:
        """Copy pieces, one per block, each with ``span``'s heads only, to their location."""
        flat = self._flat[half * self.half_bytes :][: self.half_bytes]
        return self._copies.scatter(flat, local_blocks, span.local_head, span.num_heads)

    def wait(self) -> None:
        """Wait until all copies have ended."""
        self._copies.wait()
