"""Reads of a peer's GPU memory through a mapping of it: our GPU copies, and nobody on the other side does anything.

Nothing is posted to a transport, so there is no price per descriptor but that of queueing a copy, and no polling by the
source. Heads that both sides split differently are rows of one copy, a row per layer.
"""

import ctypes
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from splitserve.kvconnector.batch_copies import BatchCopier, BlockPieces, Copies
from splitserve.kvconnector.cuda_memory import PeerMapping
from splitserve.kvconnector.device_copies import OnDevice, Pending
from splitserve.kvconnector.layout import block_bytes
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.nixl_agent import TransferError
from splitserve.kvconnector.read_plan import HeadSpan
from splitserve.messages import LayoutRecord

_SURELY_BUSY = 0.9
"""Of the time that a read should take: nobody looks at it earlier."""
_FASTER = 1.1
_FIRST_BLOCKS = 4
_GROWTH = 4
"""While some blocks are under way, the copies of so many times as many are made and queued: some 3 us a block."""


class Blocks(NamedTuple):
    """``layout`` of a rank's blocks, ``address`` of the first one."""

    layout: LayoutRecord
    address: int


def span_pieces(ours: Blocks, theirs: Blocks, span: HeadSpan) -> BlockPieces:
    """``span``'s heads, a row per layer. Blocks of both sides have as many tokens."""
    num_layers = ours.layout.num_layers
    target_bytes, source_bytes = block_bytes(ours.layout), block_bytes(theirs.layout)
    head_bytes = target_bytes // num_layers // ours.layout.kv_heads_per_rank
    source_heads = theirs.layout.kv_heads_per_rank
    assert source_bytes == num_layers * head_bytes * source_heads, "blocks of different sizes"
    target = ours.address + span.local_head * head_bytes
    source = theirs.address + span.source_head * head_bytes
    return BlockPieces(target, source, target_bytes, source_bytes, num_layers, span.num_heads * head_bytes)


def growing_parts(count: int) -> Iterator[slice]:
    """Of ``count`` blocks: a few that are soon under way, then more and more at once."""
    low, size = 0, _FIRST_BLOCKS
    while low < count:
        yield slice(low, low + size)
        low, size = low + size, size * _GROWTH


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
        ours = Blocks(memory.layout, memory.region().blocks_address)
        self._probed_address = mappings[spans[0].rank].address
        self._spans = [span_pieces(ours, Blocks(theirs, mappings[span.rank].address), span) for span in spans]
        self.stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        self.bytes_per_second = float("inf")
        """What this link moves, once somebody has measured it."""
        self._copier = BatchCopier(ctypes.CDLL("libcuda.so.1"))

    def read(self, local: Sequence[int], remote: Sequence[int]) -> Pending:
        """Start copying what is ours of blocks ``remote`` to blocks ``local``. Raises :class:`TransferError`, and then
        nothing is under way any more."""
        parts = ((local[part], remote[part]) for part in growing_parts(len(local)))
        return self._start(span.of(*part) for part in parts for span in self._spans)

    def probe(self, target: int, count: int, size: int) -> Pending:
        """Start copying ``count`` pieces of ``size`` bytes, none adjacent, of the peer's blocks to ``target`` on."""
        targets, sources = (range(at, at + 2 * size * count, 2 * size) for at in (target, self._probed_address))
        return self._start([Copies(targets, sources, [1] * count, size, size, size)])

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
