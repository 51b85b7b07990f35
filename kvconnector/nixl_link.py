"""Connecting to a peer: small reads that make UCX connect and prove that the peer can be read; what the link is worth.

The first reads of a connection are slow (UCX connects, CUDA maps the peer's memory): no request should pay for that.
"""

import time
from collections.abc import Generator
from dataclasses import replace

import torch

from splitserve.kvconnector.connector import Link
from splitserve.kvconnector.nixl_agent import Transfer, TransferError
from splitserve.kvconnector.nixl_reader import PeerReader
from splitserve.kvconnector.read_cost import ReadCost, fit
from splitserve.kvconnector.read_plan import Rows, piece_rows
from splitserve.kvconnector.read_settings import ReadSettings
from splitserve.kvconnector.staging import Done, Pending
from splitserve.kvconnector.ucx_log import UCX_LOG, read_transport
from splitserve.messages import MemoryKind, MemoryRegion

CONNECT_SECONDS = 5.0
NUM_PIECES = 32
MAX_PIECE_BYTES = 16 << 10
ROUNDS = 3
SPIN_SECONDS = 0.002  # the poll interval would hide what a fast link takes
SLOW_SECONDS = 0.05  # one round tells enough of a link that takes so long

Timed = Generator[Pending, None, float]


class LinkProbe:
    """Runs beside the reads from other peers, polled by the thread that owns ``reader``. With ``measures`` it finds out
    ``link`` and ``cost``; one of a peer's readers does."""

    def __init__(self, reader: PeerReader, settings: ReadSettings, *, measures: bool) -> None:
        self._reader = reader
        self._settings = settings
        self._deadline = time.monotonic() + CONNECT_SECONDS
        self._pending: Pending = Done()
        self._steps = self._run(measures=measures)
        self.link: Link | None = None
        self.cost: ReadCost | None = None

    def poll(self) -> bool:
        """Whether it's over; raises :class:`TransferError` if the peer can't be read, or not in time."""
        while self._pending.is_done():
            following = next(self._steps, None)
            if following is None:
                return True
            self._pending = following
        if time.monotonic() >= self._deadline:
            raise TransferError("a probe read of its memory didn't complete")
        return False

    def abandon(self) -> None:
        """Before the reader's end. What is under way lands in memory of ours until then, so keep this object."""
        if isinstance(self._pending, Transfer):
            self._pending.abandon()

    def _run(self, *, measures: bool) -> Generator[Pending, None, None]:
        yield self._reader.read_generations((0,), 0)
        source = self._reader.probe_source()
        num_bytes = min(self._settings.probe_bytes, source.num_blocks * source.block_bytes)
        if not measures:
            num_bytes = min(num_bytes, MAX_PIECE_BYTES)
        buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._reader.device)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        place = MemoryRegion(source.kind, buffer.device.index or 0, buffer.data_ptr(), 1, num_bytes)
        registration = self._reader.agent.register(place.kind, place.blocks_address, num_bytes, place.device_id)
        yield self._reader.probe(piece_rows(place, 1, num_bytes), piece_rows(source, 1, num_bytes))
        if measures:
            self.cost = yield from self._measure(place, source, num_bytes)
            self.link = self._describe(source.kind, self.cost)
        self._reader.agent.deregister(registration)

    def _measure(self, place: MemoryRegion, source: MemoryRegion, num_bytes: int) -> Generator[Pending, None, ReadCost]:
        piece_bytes = min(MAX_PIECE_BYTES, num_bytes // (2 * NUM_PIECES))
        shapes = [(1, num_bytes)] if piece_bytes < 1 else [(1, num_bytes), (1, piece_bytes), (NUM_PIECES, piece_bytes)]
        best = [float("inf")] * 3
        for _ in range(ROUNDS):
            for index, (count, size) in enumerate(shapes):
                seconds = yield from self._timed(piece_rows(place, count, size), piece_rows(source, count, size))
                best[index] = min(best[index], seconds)
            if best[0] > SLOW_SECONDS:
                break
        large, small, many = best
        if piece_bytes < 1:
            return ReadCost(0.0, 0.0, num_bytes / large, self._reader.measure_copies())
        return replace(fit(small, many, NUM_PIECES, large, num_bytes), copy=self._reader.measure_copies())

    def _timed(self, place: Rows, source: Rows) -> Timed:
        started = time.perf_counter()
        transfer = self._reader.probe(place, source)
        while not transfer.is_done():
            if time.perf_counter() - started > SPIN_SECONDS:
                yield transfer
                break
        return time.perf_counter() - started

    def _describe(self, kind: MemoryKind, cost: ReadCost) -> Link:
        transport = read_transport(UCX_LOG.text(), self._reader.agent.name, of_gpu=kind is MemoryKind.VRAM)
        speed = cost.bytes_per_second
        problem = ""
        if speed < self._settings.min_bytes_per_second:
            problem = (
                f"{kind.words} is read by {transport} at {speed / 1e9:.2f} GB/s, "
                f"not at {self._settings.min_bytes_per_second / 1e9:.0f} or more: CUDA IPC isn't used. "
                "Are both processes in one PID namespace (--pid=host), and are their GPUs joined by NVLink "
                "(nvidia-smi topo -m)? Hand-overs will be slow"
            )
        return Link(transport, speed, problem)
