"""Reads of a peer's GPU memory through a mapping of it: the local GPU copies, without any action on the other side.

Nothing is posted to a transport: a descriptor costs no more than queueing a copy, and the source need not poll. Heads
that the two sides split differently are rows, one per layer. Copy engines are slow with rows, so a kernel may copy them
instead.
"""

import ctypes
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from splitserve.kvconnector.cuda.batch_copies import BatchCopier, BlockPieces, CopyBatch
from splitserve.kvconnector.cuda.memory import CurrentContext, PeerMapping
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.agent import TransferError
from splitserve.kvconnector.transfer.device_copies import OnDevice, Pending
from splitserve.kvconnector.transfer.read_cost import ReadCost
from splitserve.protocol.cache_layout import BlockLayout, HeadSpan
from splitserve.protocol.handover.reads import ReadPath

if TYPE_CHECKING:  # Triton may not be installed
    from splitserve.kernels.triton.row_copy import RowCopier

logger = logging.getLogger(__name__)

_SURELY_BUSY = 0.9
"""Share of a read's expected time before which it is not polled."""
_WAKE_UP_SECONDS = 0.0001
"""Time by which a sleeping thread may wake up too late: it wakes up so much earlier, and waits awake."""
_FASTER = 1.1
_FIRST_BLOCKS = 4
_GROWTH = 4
"""Growth of the parts of a read: while some blocks are in flight, copies of this many times as many are built and
queued."""
_NUM_FIRST_PARTS = 2
"""Parts that the commanding thread queues: they take longer than the other thread's wake-up and its own first part."""


class Blocks(NamedTuple):
    """Blocks of a rank: their ``layout`` and the ``address`` of the first."""

    layout: BlockLayout
    address: int


def span_pieces(ours: Blocks, theirs: Blocks, span: HeadSpan) -> BlockPieces:
    """Return ``span``'s heads as pieces of blocks, a row per layer. Blocks of both sides have equally many tokens."""
    target = ours.layout.rows(span.local_head, span.num_heads, span.field)
    source = theirs.layout.rows(span.source_head, span.num_heads, span.field)
    target_bytes, source_bytes = ours.layout.block_bytes, theirs.layout.block_bytes
    assert (target.count, target.width) == (source.count, source.width), "blocks of different sizes"
    assert target.count * target.pitch == target_bytes, "rows that don't lie evenly over the block"
    return BlockPieces(
        ours.address + target.offset,
        theirs.address + source.offset,
        target_bytes,
        source_bytes,
        target.count,
        target.width,
    )


def _rows_of(span: BlockPieces) -> tuple[int, int, int, int]:
    """Return the number of rows, their width, and their pitches: local, remote."""
    return span.rows, span.width, span.target_pitch, span.source_pitch


def growing_parts(count: int) -> Iterator[slice]:
    """Split ``count`` blocks into slices: a few that are soon in flight, then ever larger ones."""
    low, size = 0, _FIRST_BLOCKS
    while low < count:
        yield slice(low, low + size)
        low, size = low + size, size * _GROWTH


class FirstCopies(NamedTuple):
    """Copies of a read's first blocks, queued by the thread that commands it while the one that owns the peer's reader
    wakes up."""

    num_blocks: int
    num_bytes: int
    started: float


class _StepInFlight(OnDevice):
    """Copies of ``num_bytes`` in flight by ``path`` since ``started``. If they end sooner than expected, the link is
    faster than measured; a late poll gives no information."""

    def __init__(self, reader: "MappedReader", path: ReadPath, started: float, num_bytes: int) -> None:
        seconds = num_bytes / reader.bytes_per_second[path]
        until_due = min(_SURELY_BUSY * seconds, max(0.0, seconds - _WAKE_UP_SECONDS))
        super().__init__(reader.stream, due_at=started + until_due)
        self._reader = reader
        self._path = path
        self._expected_at = started + seconds

    def is_done(self) -> bool:
        """Return whether the copies have ended; wait for their end, without the GIL, once it is due."""
        now = time.monotonic()
        if now < self.due_at:
            return False
        was_over = super().is_done()
        if not was_over:
            self._event.synchronize()
            now = time.monotonic()
        if now < self._expected_at:
            self._reader.bytes_per_second[self._path] *= _FASTER
        return True


class MappedReader:
    """Reader of one peer whose ranks' blocks are mapped: ``mappings`` by rank. It has a stream of its own. Used by one
    thread, in whose current context the mappings are; only :meth:`start` may be called from another one."""

    def __init__(
        self,
        memory: KVMemory,
        theirs: BlockLayout,
        spans: Sequence[HeadSpan],
        mappings: dict[int, PeerMapping],
        *,
        num_peer_blocks: int,
    ) -> None:
        self._device = memory.device
        self._address = memory.region().blocks_address
        self._num_peer_blocks = num_peer_blocks
        self._probed_address = mappings[spans[0].rank].address
        ours = Blocks(memory.layout.block_layout, self._address)
        self._spans = [span_pieces(ours, Blocks(theirs, mappings[span.rank].address), span) for span in spans]
        self.stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        self.bytes_per_second = {ReadPath.MAPPED: float("inf"), ReadPath.KERNEL: float("inf")}
        """Speed of this link, by path, once it is measured."""
        driver = ctypes.CDLL("libcuda.so.1")
        self._copier = BatchCopier(driver)
        self._context = CurrentContext(driver)
        self._lock = threading.Lock()  # of the copier, and of the mappings' end
        self._is_closed = False
        self._row_copiers: dict[tuple[int, ...], RowCopier] = {}

    def expect(self, cost: ReadCost) -> None:
        """Set the measured speed of this link."""
        for path, link in ((ReadPath.MAPPED, cost.mapped), (ReadPath.KERNEL, cost.kernel)):
            if link is not None:
                self.bytes_per_second[path] = link.bytes_per_second

    def start(self, local: Sequence[int], remote: Sequence[int]) -> FirstCopies | None:
        """Queue copies of the first blocks of a read by copy engines, for :meth:`read` to go on with. None if some of
        them are slots of the peer's host tier, if the reader is closed, or if CUDA refuses, which :meth:`read` will
        report."""
        if max(remote, default=0) >= self._num_peer_blocks:
            return None
        parts = list(itertools.islice(growing_parts(len(local)), _NUM_FIRST_PARTS))
        with self._lock:
            if self._is_closed:
                return None
            self._context.enter()
            started, num_bytes = time.monotonic(), 0
            for part, span in itertools.product(parts, self._spans):
                copies = span.of(local[part], remote[part])
                if self._copier.start(copies, self.stream.cuda_stream) != 0:
                    return None
                num_bytes += copies.num_bytes
        return FirstCopies(min(len(local), parts[-1].stop) if parts else 0, num_bytes, started)

    def read(
        self,
        local: Sequence[int],
        remote: Sequence[int],
        path: ReadPath = ReadPath.MAPPED,
        first: FirstCopies | None = None,
    ) -> Pending:
        """Start copying this rank's part of blocks ``remote`` to blocks ``local``, but for those of ``first``, whose
        end the result includes. Raises :class:`TransferError`; then no copy is in flight."""
        return self._read(self._spans, local, remote, path, first)

    def probe(self, target: int, count: int, size: int) -> Pending:
        """Start copying ``count`` pieces of ``size`` bytes, none adjacent, of the peer's blocks to address
        ``target``."""
        targets, sources = (range(at, at + 2 * size * count, 2 * size) for at in (target, self._probed_address))
        return self._by_engines([CopyBatch(targets, sources, [1] * count, size, size, size)])

    def probe_blocks(self, target: int, path: ReadPath, remote: Sequence[int]) -> Pending:
        """Start copying blocks ``remote`` like :meth:`read`, but to address ``target``."""
        spans = [span._replace(target=span.target - self._address + target) for span in self._spans]
        return self._read(spans, range(len(remote)), remote, path)

    def try_kernel(self, target: int) -> bool:
        """Compile the reading kernel and try it with one block, to address ``target``; return whether there is one.
        Raises CUDA's error if the kernel read inaccessible memory: the context is then lost."""
        try:
            self.probe_blocks(target, ReadPath.KERNEL, [0])
        except TransferError as error:
            logger.warning("peers' memory is read by copy engines only: %s", error)
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait until no copy is in flight."""
        self.stream.synchronize()

    def close(self) -> None:
        """Start no more copies, and wait until none is in flight."""
        with self._lock:
            self._is_closed = True
        self.wait()

    def _read(
        self,
        spans: Sequence[BlockPieces],
        local: Sequence[int],
        remote: Sequence[int],
        path: ReadPath,
        first: FirstCopies | None = None,
    ) -> Pending:
        if path is ReadPath.KERNEL:
            return self._by_kernel(spans, local, remote)
        num_queued = 0 if first is None else first.num_blocks
        parts = (part for part in growing_parts(len(local)) if part.start >= num_queued)
        return self._by_engines((span.of(local[part], remote[part]) for part in parts for span in spans), first)

    def _by_kernel(self, spans: Sequence[BlockPieces], local: Sequence[int], remote: Sequence[int]) -> Pending:
        started, num_bytes = time.monotonic(), 0
        try:
            for rows, alike in itertools.groupby(spans, _rows_of):  # nearly always all of them
                targets, sources, address_bits = [], [], 0
                for target, source, target_bytes, source_bytes, *_ in alike:
                    targets += [target + block * target_bytes for block in local]
                    sources += [source + block * source_bytes for block in remote]
                    address_bits |= target | source | target_bytes | source_bytes
                alignment = min(address_bits & -address_bits, 16)
                self._row_copier(rows, alignment).start(targets, sources)
                num_bytes += len(targets) * rows[0] * rows[1]
        except Exception as error:  # from the compiler, or from CUDA
            self.wait()
            raise TransferError(
                f"the kernel that reads a peer's memory failed: {type(error).__name__}: {error}"
            ) from error
        return _StepInFlight(self, ReadPath.KERNEL, started, num_bytes)

    def _row_copier(self, rows: tuple[int, int, int, int], alignment: int) -> "RowCopier":
        """Return the copier for such rows, created at first use."""
        from splitserve.kernels.triton.row_copy import RowCopier, Rows

        key = *rows, alignment
        if key not in self._row_copiers:
            stream = self.stream if self._device.type == "cuda" else None
            self._row_copiers[key] = RowCopier(stream, Rows(*rows), alignment)
        return self._row_copiers[key]

    def _by_engines(self, pieces: Iterable[CopyBatch], first: FirstCopies | None = None) -> Pending:
        started, num_bytes = (time.monotonic(), 0) if first is None else (first.started, first.num_bytes)
        for copies in pieces:
            with self._lock:
                status = self._copier.start(copies, self.stream.cuda_stream)
            if status != 0:
                self.wait()
                raise TransferError(f"CUDA can't copy from the peer's mapped memory (status {status})")
            num_bytes += copies.num_bytes
        return _StepInFlight(self, ReadPath.MAPPED, started, num_bytes)
