"""Reads of a peer's GPU memory through a mapping of it: our GPU copies, and nobody on the other side does anything.

Nothing is posted to a transport, so there is no price per descriptor but that of queueing a copy, and no polling by the
source. Heads that both sides split differently are rows of one copy, a row per layer.
"""

import ctypes
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from splitserve.kvconnector.batch_copies import BatchCopier, Copies, adjacent
from splitserve.kvconnector.cuda_memory import PeerMapping
from splitserve.kvconnector.device_copies import OnDevice, Pending
from splitserve.kvconnector.layout import block_bytes
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.nixl_agent import BlockIds, TransferError
from splitserve.kvconnector.read_plan import HeadSpan
from splitserve.messages import LayoutRecord

_SURELY_BUSY = 0.9
"""Of the time that a read should take: nobody looks at it earlier."""
_FASTER = 1.1
_FIRST_BLOCKS = 4
"""They are under way while the copies of the others are made and queued, which takes the host some 3 us a block."""


class Blocks(NamedTuple):
    """``layout`` of a rank's blocks, ``address`` of the first one."""

    layout: LayoutRecord
    address: int


def block_copies(ours: Blocks, theirs: Blocks, span: HeadSpan, local: BlockIds, remote: BlockIds) -> Copies:
    """Of ``span``'s heads, of blocks ``remote`` of theirs to ``local`` of ours. Neighbours on
    both sides are one copy. Blocks of both sides have as many tokens."""
    target_pitch, source_pitch = (block_bytes(side.layout) // side.layout.num_layers for side in (ours, theirs))
    head_bytes = target_pitch // ours.layout.kv_heads_per_rank
    assert source_pitch == head_bytes * theirs.layout.kv_heads_per_rank, "blocks of different sizes"
    into, out_of, counts = adjacent(local, remote)
    into = into * np.uint64(block_bytes(ours.layout)) + np.uint64(ours.address + span.local_head * head_bytes)
    out_of = out_of * np.uint64(block_bytes(theirs.layout))
    out_of += np.uint64(theirs.address + span.source_head * head_bytes)
    heights = counts * np.uint64(ours.layout.num_layers)
    return Copies(into, out_of, heights, span.num_heads * head_bytes, target_pitch, source_pitch)


class _UnderWay(OnDevice):
    """Copies of ``reader`` since ``started``, that should take ``seconds``. Where they are seen to be over sooner, the
    link is faster than was measured; a look that comes late tells nothing."""

    def __init__(self, reader: "MappedReader", started: float, seconds: float) -> None:
        super().__init__(reader.stream, due_at=started + _SURELY_BUSY * seconds)
        self._reader = reader
        self._expected_at = started + seconds

    def is_done(self) -> bool:
        now = time.monotonic()
        if now < self.due_at or not super().is_done():
            return False
        if now < self._expected_at:
            self._reader.bytes_per_second *= _FASTER
        return True


class MappedReader:
    """Reads from one peer whose ranks' blocks are mapped: ``mappings`` by rank. Used by one thread, in whose current
    context they are; it has a stream of its own."""

    def __init__(
        self, memory: KVMemory, theirs: LayoutRecord, spans: Sequence[HeadSpan], mappings: dict[int, PeerMapping]
    ) -> None:
        self._ours = Blocks(memory.layout, memory.region().blocks_address)
        self._sources = [(span, Blocks(theirs, mappings[span.rank].address)) for span in spans]
        self.stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        self.bytes_per_second = float("inf")
        """What this link moves, once somebody has measured it."""
        self._copier = BatchCopier(ctypes.CDLL("libcuda.so.1"))

    def read(self, local: BlockIds, remote: BlockIds) -> Pending:
        """Start copying what is ours of blocks ``remote`` to blocks ``local``. Raises :class:`TransferError`, and then
        nothing is under way any more."""
        parts = (slice(0, _FIRST_BLOCKS), slice(_FIRST_BLOCKS, None))
        return self._start(
            block_copies(self._ours, theirs, span, local[part], remote[part])
            for part in parts
            for span, theirs in self._sources
            if len(local[part])
        )

    def probe(self, target: int, count: int, size: int) -> Pending:
        """Start copying ``count`` pieces of ``size`` bytes, none adjacent, of the peer's blocks to ``target`` on."""
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(2 * size)
        sources, targets = (offsets + np.uint64(address) for address in (self._sources[0][1].address, target))
        return self._start([Copies(targets, sources, np.ones(count, np.uint64), size, size, size)])

    def wait(self) -> None:
        """Until no copy is under way."""
        self.stream.synchronize()

    def _start(self, pieces: Iterable[Copies]) -> Pending:
        started, num_bytes = time.monotonic(), 0
        for copies in pieces:
            status = self._copier.start(copies, self.stream.cuda_stream)
            if status != 0:
                self.wait()
                raise TransferError(f"CUDA doesn't copy from the peer's mapped memory (status {status})")
            num_bytes += copies.num_bytes
        return _UnderWay(self, started, num_bytes / self.bytes_per_second)
