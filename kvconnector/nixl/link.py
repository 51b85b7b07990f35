"""Connection to a peer: small reads that make UCX connect and prove that the peer can be read; measurement of its cost.

The first reads of a connection are slow (UCX connects, CUDA maps the peer's memory): no request should bear that cost.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch

from splitserve.kvconnector.mapped.reads import MappedReader
from splitserve.kvconnector.nixl.gather import GatherReader, TicketWait
from splitserve.kvconnector.nixl.peer_access import PeerAccess
from splitserve.kvconnector.nixl.ucx_log import UCX_LOG, UNKNOWN
from splitserve.kvconnector.transfer.connector import Link
from splitserve.kvconnector.transfer.device_copies import Done, Pending
from splitserve.kvconnector.transfer.errors import TransferError
from splitserve.kvconnector.transfer.read_cost import CopyCost, LinkCost, ReadCost, fit, fit_blocks, fit_copies
from splitserve.kvconnector.transfer.read_plan import piece_rows
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.cache_layout import HeadSpan
from splitserve.protocol.handover.reads import ReadPath
from splitserve.protocol.memory_records import MemoryKind, MemoryRegion

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
NUM_PIECES = 32
MAX_PIECE_BYTES = 16 << 10
ROUNDS = 3
ROW_ROUNDS = 6
MAX_ROUNDS = 12
LITTLE_BETTER = 0.9  # ratio of the best large read's time to the best one's before; a smaller one may fall further
LARGE_TAKES = 2.0  # ratio of a large read's time to a small one's, at least; otherwise another thread delayed this one
MAX_GATHERED = 64
TURN_SECONDS = 0.001  # then other peers' reads are polled
SPIN_SECONDS = 0.002  # the poll interval would hide the latency of a fast link
SLOW_SECONDS = 0.05  # one round suffices for a link this slow

Timed = Generator[Pending, None, float]


class LinkProbe:
    """Probe that runs alongside the reads from other peers, polled by the thread that owns ``access``. With
    ``measures`` it determines ``link`` and ``cost``; one of a peer's readers does so."""

    def __init__(self, access: PeerAccess, settings: ReadSettings, *, measures: bool) -> None:
        self._access = access
        self._settings = settings
        self.deadline = time.monotonic() + CONNECT_SECONDS
        self._pending: Pending = Done()
        self._steps = self._run(measures=measures)
        self.link: Link | None = None
        self.cost: ReadCost | None = None

    def poll(self) -> bool:
        """Advance the probe; return whether it is complete. Raises :class:`TransferError` if the peer can't be read in
        time."""
        turn_ends = time.monotonic() + TURN_SECONDS
        while self._pending.is_done() and time.monotonic() < turn_ends:
            following = next(self._steps, None)
            if following is None:
                return True
            self._pending = following
        if time.monotonic() >= self.deadline:
            raise TransferError("a probe read of its memory did not complete in time")
        return False

    def _run(self, *, measures: bool) -> Generator[Pending, None, None]:
        yield from self._access.read_generations((0,), 0)
        source = self._access.probe_source()
        num_bytes = min(self._settings.probe_bytes, source.num_bytes)
        if not measures:
            num_bytes = min(num_bytes, MAX_PIECE_BYTES)
        with self._on_own_stream():
            buffer = self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._access.device)
        target = MemoryRegion(source.kind, buffer.device.index or 0, buffer.data_ptr(), 1, num_bytes)
        registration = self._access.agent.register(target.kind, target.blocks_address, num_bytes, target.device_id)
        yield self._access.probe(piece_rows(target, 1, num_bytes), piece_rows(source, 1, num_bytes))
        for span in range(1, len(self._access.spans)):  # no request should bear the cost of the first connection
            other, size = self._access.probe_source(span), min(num_bytes, MAX_PIECE_BYTES)
            yield self._access.probe(piece_rows(target, 1, size), piece_rows(other, 1, size), span)
        if measures:
            self.cost = yield from self._measure(target, source, num_bytes)
            self.link = self._describe(source.kind, self.cost)
        self._access.agent.deregister(registration)

    def _measure(
        self, target: MemoryRegion, source: MemoryRegion, num_bytes: int
    ) -> Generator[Pending, None, ReadCost]:
        transport = yield from self._measure_reads(partial(self._read, target, source), num_bytes)
        costs: dict[ReadPath, LinkCost] = {}
        mapped = self._access.mapped
        num_blocks = min(num_bytes // self._access.shape.local_block_bytes, source.num_blocks)
        if mapped is not None and (self._access.is_whole or num_blocks < 2):
            read = partial(mapped.probe, target.blocks_address)
            costs[ReadPath.MAPPED] = yield from self._measure_reads(read, num_bytes)
        elif mapped is not None:
            costs = yield from self._measure_rows(mapped, target.blocks_address, num_blocks)
        gather = yield from self._measure_gathers()
        copy = self._measure_copies()
        return ReadCost(transport, copy, gather, costs.get(ReadPath.MAPPED), costs.get(ReadPath.KERNEL))

    def _measure_reads(self, read: Callable[[int, int], Pending], num_bytes: int) -> Generator[Pending, None, LinkCost]:
        """Return the cost of ``read(count, size)``, which starts reading ``count`` pieces of ``size`` bytes."""
        piece_bytes = max(1, min(MAX_PIECE_BYTES, num_bytes // (2 * NUM_PIECES)))
        num_pieces = min(NUM_PIECES, num_bytes // (2 * piece_bytes))
        shapes = [(1, num_bytes), (1, piece_bytes), (num_pieces, piece_bytes)]
        best, better_at = [float("inf")] * 3, 0
        for rounds in range(1, MAX_ROUNDS + 1):
            largest = best[0]
            for index, shape in enumerate(shapes):
                seconds = yield from self._timed(partial(read, *shape))
                best[index] = min(best[index], seconds)
            if best[0] < LITTLE_BETTER * largest:
                better_at = rounds  # an idle GPU's first copies are slow
            is_telling = rounds >= better_at + ROUNDS - 1 and best[0] > LARGE_TAKES * best[1]
            if is_telling or best[0] > SLOW_SECONDS:
                break
        large, small, many = best
        return fit(small, many, num_pieces, large, num_bytes)

    def _measure_rows(
        self, mapped: MappedReader, target: int, num_blocks: int
    ) -> Generator[Pending, None, dict[ReadPath, LinkCost]]:
        """Measure reads of blocks that the two sides split differently, by copy engines and by a kernel."""
        paths = [ReadPath.MAPPED, *([ReadPath.KERNEL] if mapped.try_kernel(target) else [])]
        costs: dict[ReadPath, LinkCost] = {}
        shape = self._access.shape
        for path in paths:
            one, adjacent, apart = range(1), range(num_blocks), range(num_blocks - 1, -1, -1)
            best: dict[range, float] = {}
            for blocks in (one, adjacent, apart) * ROW_ROUNDS:
                seconds = yield from self._timed(partial(mapped.probe_blocks, target, path, blocks))
                best[blocks] = min(best.get(blocks, seconds), seconds)
            if path is ReadPath.KERNEL:  # adjacency makes no difference to it
                best[adjacent] = best[apart] = min(best[adjacent], best[apart])
            seconds_of = best[one], best[adjacent], best[apart]
            costs[path] = fit_blocks(*seconds_of, num_blocks, shape.local_block_bytes, num_spans=shape.num_spans)
        found = ", ".join(f"{path} in {cost}" for path, cost in costs.items())
        logger.info("cost of reading heads that %s splits differently: %s", self._access.agent.name, found)
        return costs

    def _read(self, target: MemoryRegion, source: MemoryRegion, count: int, size: int) -> Pending:
        return self._access.probe(piece_rows(target, count, size), piece_rows(source, count, size))

    def _measure_gathers(self) -> Generator[Pending, None, CopyCost | None]:
        """Measure gathers of one block and of as many as a slot holds; return None if the source does not respond or
        does not gather."""
        gather, shape = self._access.gather, self._access.shape
        if gather is None or not shape.blocks_per_gather:
            return None
        span, seconds = self._access.spans[0], []
        most = min(shape.blocks_per_gather, self._access.num_peer_blocks, MAX_GATHERED)
        for count in (1, 1, most):  # the first one includes the set-up
            began: list[TicketWait] = []
            seconds.append((yield from self._timed(self._ask(gather, span, count, began))))
            if began[0].slot is None:
                return None
            gather.done(span.rank, began[0].ticket)
        piece_bytes = self._access.piece_bytes(span)
        return fit_copies(seconds[1], piece_bytes, seconds[2], most * piece_bytes)

    @staticmethod
    def _ask(gather: GatherReader, span: HeadSpan, count: int, began: list[TicketWait]) -> Callable[[], Pending]:
        def ask() -> TicketWait:
            ticket = gather.request(span.rank, range(count), span.source_head, span.num_heads)
            began.append(gather.wait(span.rank, ticket))
            return began[0]

        return ask

    def _measure_copies(self) -> CopyCost:
        """Measure copies within local memory, from one half of a buffer to the other."""
        half = len(self._buffer) // 2
        small = max(1, half // 64)
        seconds = [min(self._time_copy(size) for _ in range(ROUNDS)) for size in (small, half)] if half else [0.0, 0.0]
        return fit_copies(seconds[0], small, seconds[1], max(small, half))

    def _time_copy(self, num_bytes: int) -> float:
        started = time.perf_counter()
        with self._on_own_stream():
            self._buffer[-num_bytes:].copy_(self._buffer[:num_bytes])
        return time.perf_counter() - started

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Run copies on a separate stream; they have ended when the context exits. Concurrent steps are not
        waited for."""
        if self._access.device.type != "cuda":
            yield
            return
        stream = _stream_of_probes(self._access.device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def _timed(self, begin: Callable[[], Pending]) -> Timed:
        started = time.perf_counter()
        pending = begin()
        while not pending.is_done():
            if time.perf_counter() - started > SPIN_SECONDS:
                yield pending
                break
        seconds = time.perf_counter() - started
        yield Done()  # let other reads be polled
        return seconds

    def _describe(self, kind: MemoryKind, cost: ReadCost) -> Link:
        transport = UCX_LOG.transport(self._access.agent.name, of_gpu=kind is MemoryKind.VRAM)
        access, speed, least = self._access, cost.bytes_per_second, self._settings.min_bytes_per_second
        uses_ipc = True if access.is_mapped or "cuda_ipc" in transport else None if transport == UNKNOWN else False
        why = link_problem(speed < least, uses_ipc, is_near=access.is_on_this_machine)
        wanted = f", not at {least / 1e9:.0f} or more" if speed < least else ""
        problem = f"{kind.words} is read by {transport} at {speed / 1e9:.2f} GB/s{wanted}: {why}" if why else ""
        return Link(transport, speed, problem)


@cache
def _stream_of_probes(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of all probes: PyTorch reuses freed memory only within a stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def link_problem(is_slow: bool, uses_ipc: bool | None, *, is_near: bool | None) -> str:
    """Return the problem of a connection between GPUs and the remedy; "" if there is none.

    ``is_near``: both are on one machine, where CUDA IPC is many times as fast as anything else. None: unknown.
    """
    if not is_slow and not (is_near and uses_ipc is False):
        return ""
    if is_near is False:
        return (
            "the peer is on another machine. Are network devices near the GPUs, and do they read GPUs' memory "
            "(GPUDirect RDMA; splitserve doctor reports what it finds)? Hand-overs will be slow"
        )
    if uses_ipc:
        return "CUDA IPC is used. Are the GPUs joined by NVLink (nvidia-smi topo -m)? Hand-overs will be slow"
    said = "Is CUDA IPC used?" if uses_ipc is None else "CUDA IPC isn't used."
    return (
        f"{said} Are both processes in one PID namespace (--pid=host), and are their GPUs joined by NVLink "
        "(nvidia-smi topo -m)? Hand-overs will be slow"
    )
