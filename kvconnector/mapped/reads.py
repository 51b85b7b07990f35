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
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from splitserve.kvconnector.cuda.batch_copies import BatchCopier, BlockPieces, CopyBatch
from splitserve.kvconnector.cuda.memory import CurrentContext, PeerMapping
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.shape import Run, runs
from splitserve.kvconnector.mapped.pieces import Blocks, by_shape, growing_parts, launches, span_pieces
from splitserve.kvconnector.transfer.errors import TransferError
from splitserve.kvconnector.transfer.read_cost import ReadCost
from splitserve.protocol.cache_layout import BlockLayout, HeadSpan
from splitserve.protocol.handover.reads import ReadPath

if TYPE_CHECKING:  # Triton may not be installed
    from splitserve.kernels.triton.row_copy import RowCopier

logger = logging.getLogger(__name__)

_SURELY_BUSY = 0.9
"""Share of a read's expected time before which it is not polled."""
_PERHAPS_BUSY = 0.5
"""The same while no read was found in flight then: the link may be faster than it seemed."""
_WAKE_UP_SECONDS = 0.0003
"""Time by which a sleeping thread may wake up too late: it wakes up so much earlier, and waits awake. Of several ranks
that read at once, the last one counts."""
_NUM_FIRST_PARTS = 2
"""Parts that the commanding thread queues: they take longer than the other thread's wake-up and its own first part."""
_NUM_QUICK_RUNS = 4
"""Runs of whole blocks that are queued before all else: they are in flight for longer than all else takes."""
_NUM_QUICK_RUNS_OF_ROWS = 12
"""The same where both sides split the heads differently: the kernel's launch takes longer."""
_MOST_FIRST_PIECES = 256
"""Pieces of blocks for which the commanding thread launches the kernel; addresses of more take it too long."""


class MappedRead:
    """A read by ``path`` since ``started`` of ``num_blocks`` blocks in runs ``found``: queued in parts, the first of
    them by the thread that commands it while the owner of the peer's reader wakes up. Once all are queued, it is the
    copies' end to wait for: by one thread at a time."""

    def __init__(
        self, reader: "MappedReader", found: Iterable[Run], num_blocks: int, path: ReadPath, started: float
    ) -> None:
        self.path = path
        self.num_blocks = num_blocks
        self.num_queued = 0  # blocks
        self.found = found
        self.parts = growing_parts(found)  # that aren't queued yet
        self.started = started
        self.queued_at = 0.0  # by the monotonic clock: all copies were queued
        self.due_at = self.expected_at = self.ended_at = 0.0
        self._reader = reader
        self._ends: list[torch.cuda.Event] = []

    def all_queued(self, num_bytes: int) -> None:
        """Record that all copies are queued, ``num_bytes`` in all."""
        self._num_bytes = num_bytes
        self._ends = [self._reader.recorded(stream) for stream in self._reader.streams]
        self.queued_at = self.ended_at = time.monotonic()
        seconds = num_bytes / self._reader.bytes_per_second[self.path]
        self.expected_at = self.started + seconds
        share = _SURELY_BUSY if self.path in self._reader.paths_known else _PERHAPS_BUSY
        self.due_at = self.started + min(share * seconds, max(0.0, seconds - _WAKE_UP_SECONDS))

    def is_done(self) -> bool:
        """Return whether the copies have ended; wait for their end, without the GIL, once it is due."""
        if time.monotonic() < self.due_at:
            return False
        for end in self._ends:
            if not end.query():  # type: ignore[no-untyped-call]
                self._reader.paths_known.add(self.path)
                end.synchronize()
        self._note_end()
        return True

    def has_ended(self) -> bool:
        """Return whether the copies have ended; wait for nothing. If they have, :attr:`ended_at` is when they probably
        did: as expected, unless they were seen in flight after that."""
        now = time.monotonic()
        if not all(end.query() for end in self._ends):  # type: ignore[no-untyped-call]
            self.ended_at = now
            if now >= self.due_at:
                self._reader.paths_known.add(self.path)
            return False
        self.ended_at = min(now, max(self.ended_at, self.expected_at))
        self._note_end()
        return True

    def _note_end(self) -> None:
        if self._ends:
            self._reader.learn(self.path, self._num_bytes, time.monotonic() - self.started)
            self._reader.unused_events += self._ends
            self._ends = []


class MappedReader:
    """Reader of one peer whose ranks' blocks are mapped: ``mappings`` by rank. It has streams of its own. Used by one
    thread, in whose current context the mappings are. Another one may call :meth:`has_blocks`, :meth:`begin` and
    :meth:`start`, and wait for the read that :meth:`start` returns, until it passes that to the first one."""

    def __init__(
        self,
        memory: KVMemory,
        theirs: BlockLayout,
        spans: Sequence[HeadSpan],
        mappings: dict[int, PeerMapping],
        *,
        num_peer_blocks: int,
        num_streams: int = 1,
    ) -> None:
        self._device = memory.device
        self._address = memory.region().blocks_address
        self._num_peer_blocks = num_peer_blocks
        self._probed_address = mappings[spans[0].rank].address
        ours = Blocks(memory.layout.block_layout, self._address)
        self._spans = [span_pieces(ours, Blocks(theirs, mappings[span.rank].address), span) for span in spans]
        self._shapes = by_shape(self._spans)
        self._block_bytes = sum(span.rows * span.width for span in self._spans)
        is_flat = all(span.is_flat for span in self._spans)
        self._is_whole = is_flat and len(self._spans) == 1  # blocks of one rank, copied as they are
        # The driver overlaps copies without gaps itself; those of rows, of one stream, it makes one after the other.
        num_streams = 1 if is_flat else num_streams
        self.streams = [torch.cuda.Stream(memory.device) for _ in range(num_streams)]  # type: ignore[no-untyped-call]
        self.bytes_per_second = {ReadPath.MAPPED: float("inf"), ReadPath.KERNEL: float("inf")}
        """Speed of this link, by path, once it is measured."""
        driver = ctypes.CDLL("libcuda.so.1")
        self._copier = BatchCopier(driver)
        self._context = CurrentContext(driver)
        self._lock = threading.Lock()  # of the copiers, and of the mappings' end
        self._is_closed = False
        self._row_copiers: dict[tuple[int, ...], RowCopier] = {}
        self.unused_events: list[torch.cuda.Event] = []
        self.paths_known: set[ReadPath] = set()  # of which a read was found in flight when it was due

    def expect(self, cost: ReadCost) -> None:
        """Set the measured speed of this link."""
        for path, link in ((ReadPath.MAPPED, cost.mapped), (ReadPath.KERNEL, cost.kernel)):
            if link is not None:
                self.bytes_per_second[path] = link.bytes_per_second

    def recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event on the stream. Events are used again, since it takes time to create them; they are made
        without timing, which delays copies."""
        try:
            event = self.unused_events.pop()
        except IndexError:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def learn(self, path: ReadPath, num_bytes: int, seconds: float) -> None:
        """Raise the speed of this link to that of a read, if the read was faster; one noticed late lowers nothing."""
        if seconds > 0.0:
            self.bytes_per_second[path] = max(self.bytes_per_second[path], num_bytes / seconds)

    def expected_seconds(self, num_blocks: int, path: ReadPath) -> float:
        """Return the time that a read of so many blocks takes on this link, as far as known."""
        return num_blocks * self._block_bytes / self.bytes_per_second[path]

    def has_blocks(self, remote: Sequence[int]) -> bool:
        """Return whether these are blocks of the peer's device, none a slot of its host tier."""
        return max(remote, default=0) < self._num_peer_blocks

    def begin(self, local: Sequence[int], remote: Sequence[int]) -> int:
        """Queue copies of the first runs of blocks by copy engines, for :meth:`start` to go on with; return the number
        of blocks. Where the caches are cold, all else takes longer than these are in flight."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            if self._is_closed:
                return 0
            self._context.enter()
            return self._begin_blocks(local, remote) if self._is_whole else self._begin_rows(local, remote)
        finally:
            self._lock.release()

    def _begin_blocks(self, local: Sequence[int], remote: Sequence[int]) -> int:
        num_blocks = 0
        target, source, size = self._spans[0][:3]
        for into, out_of, count in itertools.islice(runs(local, remote), _NUM_QUICK_RUNS):
            if out_of + count > self._num_peer_blocks:
                break
            if self._copier.start_one(target + into * size, source + out_of * size, count * size, self._first):
                break  # it is reported when the same is tried again
            num_blocks += count
        return num_blocks

    def _begin_rows(self, local: Sequence[int], remote: Sequence[int]) -> int:
        """Begin on the last stream, beside which a kernel on the first one copies the other runs, if there are any."""
        found = list(itertools.islice(runs(local, remote), _NUM_QUICK_RUNS_OF_ROWS))
        num_blocks = sum(count for _, _, count in found)
        if not self.has_blocks(remote[:num_blocks]):
            return 0
        if num_blocks == len(local):
            status = self._queue_rows(self._spans, found)
        else:
            status = self._copier.start([span.of(found) for span in self._spans], self.streams[-1].cuda_stream)
        return 0 if status else num_blocks

    def start(
        self,
        found: Iterable[Run],
        num_blocks: int,
        path: ReadPath,
        started: float,
        *,
        whole: bool = False,
        num_queued: int = 0,
    ) -> MappedRead | None:
        """Queue the first copies of a read, or all of them if ``whole``, for :meth:`read` to go on with; waits for
        nothing. None if the reader is closed or busy, if a kernel isn't ready to be launched, or if CUDA refuses, which
        :meth:`read` will report.

        ``found``: runs of ``num_blocks`` blocks of the peer's device, but for ``num_queued`` that have begun; those of
        copy engines may be found while the first ones are in flight."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            read = MappedRead(self, found, num_blocks, path, started)
            read.num_queued = num_queued
            return None if self._is_closed else self._start(read, whole=whole)
        except Exception:  # the owner of the reader meets it again, and reports it
            return None
        finally:
            self._lock.release()

    def read(
        self,
        local: Sequence[int],
        remote: Sequence[int],
        path: ReadPath = ReadPath.MAPPED,
        first: MappedRead | None = None,
    ) -> MappedRead:
        """Start copying this rank's part of blocks ``remote`` to blocks ``local``, but for the copies of ``first`` that
        are queued, and return the read. Raises :class:`TransferError`; then no copy is in flight."""
        return self._read(self._spans, first or self._new_read(local, remote, path))

    def probe(self, target: int, count: int, size: int) -> MappedRead:
        """Start copying ``count`` pieces of ``size`` bytes, none adjacent, of the peer's blocks to address
        ``target``."""
        targets, sources = (range(at, at + 2 * size * count, 2 * size) for at in (target, self._probed_address))
        read = MappedRead(self, [], 0, ReadPath.MAPPED, time.monotonic())
        with self._lock:
            status = self._copier.start([CopyBatch(targets, sources, [1] * count, size, size, size)], self._first)
        self._check(status)
        read.all_queued(count * size)
        return read

    def probe_blocks(self, target: int, path: ReadPath, remote: Sequence[int]) -> MappedRead:
        """Start copying blocks ``remote`` like :meth:`read`, but to address ``target``."""
        spans = [span._replace(target=span.target - self._address + target) for span in self._spans]
        return self._read(spans, self._new_read(range(len(remote)), remote, path))

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
        for stream in self.streams:
            stream.synchronize()

    def close(self) -> None:
        """Start no more copies, and wait until none is in flight."""
        with self._lock:
            self._is_closed = True
        self.wait()

    @property
    def _first(self) -> int:
        return int(self.streams[0].cuda_stream)

    def _num_bytes(self, read: MappedRead) -> int:
        return read.num_blocks * self._block_bytes

    def _new_read(self, local: Sequence[int], remote: Sequence[int], path: ReadPath) -> MappedRead:
        return MappedRead(self, list(runs(local, remote)), len(remote), path, time.monotonic())

    def _start(self, read: MappedRead, *, whole: bool) -> MappedRead | None:
        self._context.enter()
        if read.path is ReadPath.KERNEL:
            has_time = whole or read.num_blocks * len(self._spans) <= _MOST_FIRST_PIECES
            return read if has_time and self._launch_if_ready(read) else None
        for part in read.parts if whole else itertools.islice(read.parts, _NUM_FIRST_PARTS):
            if self._queue(self._spans, read, part) != 0:
                return None
        if read.num_queued == read.num_blocks:
            read.all_queued(self._num_bytes(read))
        return read

    def _read(self, spans: Sequence[BlockPieces], read: MappedRead) -> MappedRead:
        """Queue what is left of a read."""
        if read.queued_at:
            return read
        if read.path is ReadPath.KERNEL:
            self._launch(spans, read)
        else:
            for part in read.parts:
                with self._lock:
                    status = self._queue(spans, read, part)
                self._check(status)
        read.all_queued(self._num_bytes(read))
        return read

    def _queue(self, spans: Sequence[BlockPieces], read: MappedRead, found: Sequence[Run]) -> int:
        """Queue copies of some runs by copy engines, evenly over the streams: spans, which are of different ranks, or
        the runs of the only one. Return CUDA's status."""
        if self._is_whole:
            status = self._copier.start_blocks(spans[0], found, self._first)
        else:
            status = self._queue_rows(spans, found)
        if status == 0:
            read.num_queued += sum(count for _, _, count in found)
        return status

    def _queue_rows(self, spans: Sequence[BlockPieces], found: Sequence[Run]) -> int:
        step = len(self.streams)
        for number, stream in enumerate(self.streams):
            if len(spans) > 1:
                copies = [span.of(found) for span in spans[number::step]]
            else:
                copies = [spans[0].of(found[number::step])]
            status = self._copier.start(copies, stream.cuda_stream)
            if status != 0:
                return status
        return 0

    def _check(self, status: int) -> None:
        if status != 0:
            self.wait()
            raise TransferError(f"CUDA can't copy from the peer's mapped memory (status {status})")

    def _launch_if_ready(self, read: MappedRead) -> bool:
        """Launch the kernel for a whole read, unless it isn't ready: return whether it was launched."""
        wanted = list(launches(self._shapes, read.found))
        begun = [(self._row_copiers.get(launch.key), launch) for launch in wanted]
        if not all(copier is not None and copier.is_ready(len(launch.targets)) for copier, launch in begun):
            return False
        for copier, launch in begun:
            assert copier is not None
            copier.start(launch.targets, launch.sources)
        read.all_queued(self._num_bytes(read))
        return True

    def _launch(self, spans: Sequence[BlockPieces], read: MappedRead) -> None:
        try:
            for launch in launches(self._shapes if spans is self._spans else by_shape(spans), read.found):
                copier = self._row_copier(launch.key)
                with self._lock:
                    copier.start(launch.targets, launch.sources)
        except Exception as error:  # from the compiler, or from CUDA
            self.wait()
            raise TransferError(
                f"the kernel that reads a peer's memory failed: {type(error).__name__}: {error}"
            ) from error

    def _row_copier(self, key: tuple[int, ...]) -> "RowCopier":
        """Return the copier for such rows, created at first use."""
        from splitserve.kernels.triton.row_copy import RowCopier, Rows

        if key not in self._row_copiers:
            stream = self.streams[0] if self._device.type == "cuda" else None
            self._row_copiers[key] = RowCopier(stream, Rows(*key[:4]), key[4])
        return self._row_copiers[key]
