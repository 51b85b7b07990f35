"""Copies between a GPU's blocks and registered host memory, by the copy engines or, for small blocks, by a kernel.

Each direction and each copy method has a stream of its own. The faster method is measured at start. Loads by copy
engines copy one group of layers after another if a step may wait for them on the device
(:mod:`splitserve.kvconnector.tiers.load_gates`).
"""

import ctypes
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from splitserve.kvconnector.cuda.batch_copies import BatchCopier, BlockPieces
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.layout.numa_memory import HostMemory
from splitserve.kvconnector.layout.shape import runs
from splitserve.kvconnector.tiers.load_gates import LayerGroup, LoadGates

if TYPE_CHECKING:  # Triton may not be installed
    from splitserve.kernels.triton.row_copy import RowCopier

logger = logging.getLogger(__name__)

MAX_KERNEL_BLOCK_BYTES = 2 << 20
"""Largest blocks for which the two methods are compared. Copy engines reach full speed with larger pieces; with smaller
ones the host can't queue them fast enough, least of all in both directions at once (``tier-copies`` in
benchmarks/results)."""
KERNEL_GAIN = 1.1
"""Required speed-up of the kernel over the copy engines, because it takes multiprocessors from concurrent steps."""
PIECE_BYTES = 32 << 20
MAX_BYTES_IN_FLIGHT = 2 * PIECE_BYTES
"""Bound on queued bytes: small copies of a concurrent step wait for at most this much, and the connection stays busy.
"""
NEAR_END_BYTES = 512 << 20
"""Largest remainder of a load that a step, and the steps after it, may have to wait for."""
MEASURED_BYTES = 64 << 20
MEASURED_ROUNDS = 5


class _Pacer:
    """Bound on the bytes queued on a stream. When its ``with`` statement ends, nothing is queued, even after an error.
    Waiting sleeps instead of spinning, because the engine loop needs the core and the GIL."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pieces: deque[tuple[torch.cuda.Event, int]] = deque()
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.queued(0)  # also behind the copies that a failed piece had queued
        while self._pieces:
            self._wait_for_first()

    def make_room(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` may be queued; one piece beyond the one being copied is always allowed."""
        while len(self._pieces) > 1 and self._num_bytes + num_bytes > MAX_BYTES_IN_FLIGHT:
            self._wait_for_first()

    def queued(self, num_bytes: int) -> torch.cuda.Event:
        """Record that ``num_bytes`` were queued. Return the event behind them."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._pieces.append((event, num_bytes))
        self._num_bytes += num_bytes
        return event

    def _wait_for_first(self) -> None:
        event, num_bytes = self._pieces.popleft()
        event.synchronize()
        self._num_bytes -= num_bytes


def _address_on_device(host_address: int) -> int:
    """Return the device address of registered host memory; 0 if the driver doesn't map it."""
    address = ctypes.c_uint64(0)
    find = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2
    status = find(ctypes.byref(address), ctypes.c_void_p(host_address), ctypes.c_uint(0))
    return address.value if status == 0 else 0


class CudaHostStore:
    """A :class:`splitserve.kvconnector.tiers.copies.GatedStore`.

    ``way``: the copy method, "engine" or "kernel", for both directions. ``gates``: the gates at which steps wait for
    loads; None if no step does. Raises :class:`RuntimeError` if the memory can't be registered.
    """

    def __init__(self, memory: KVMemory, host: HostMemory, gates: LoadGates | None = None) -> None:
        self._device = memory.device
        self._gates = gates
        self._rows: BatchCopier | None = None if gates is None else BatchCopier(ctypes.CDLL("libcuda.so.1"))
        self._blocks = memory.bytes
        self._host = host
        self._row_copiers: dict[bool, RowCopier] = {}
        self._slots = torch.from_numpy(host.bytes).view(-1, memory.block_bytes)
        with torch.cuda.device(self._device):
            status = torch.cuda.cudart().cudaHostRegister(host.address, len(host.bytes), 0)  # type: ignore[no-untyped-call]
            if int(status) != 0:
                raise RuntimeError(f"cudaHostRegister of {len(host.bytes)} bytes failed with {status}")
            self._slots_on_device = _address_on_device(host.address)
            self._down = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._up = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.way = self._faster_way() if memory.block_bytes <= MAX_KERNEL_BLOCK_BYTES else "engine"

    def store(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Copy blocks to slots. The blocks are complete: the step that computed them has ended."""
        del hashes
        self._copy(self._down, self.way, self._blocks, block_ids, slots, is_load=False)

    def load(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Copy slots to blocks. No step uses the blocks yet: steps that read them are launched after this returns."""
        del hashes
        self._copy(self._up, self.way, self._blocks, block_ids, slots, is_load=True)

    def load_gated(
        self, copy_id: int, block_ids: Sequence[int], slots: Sequence[int], tell_near_end: Callable[[], None]
    ) -> None:
        """Copy slots to blocks. Steps that read the blocks are launched after this returns, or wait for their
        layers."""
        if self._gates is None or self.way != "engine":
            self.load(block_ids, slots, ())
            return
        self._gates.open(copy_id)
        try:
            self._load_by_layers(self._gates, copy_id, block_ids, slots, tell_near_end)
        finally:
            self._gates.close(copy_id)

    def _load_by_layers(
        self,
        gates: LoadGates,
        copy_id: int,
        block_ids: Sequence[int],
        slots: Sequence[int],
        tell_near_end: Callable[[], None],
    ) -> None:
        """Copy one group of layers of all blocks after another; return when all copies have ended."""
        layer_bytes = self._blocks.shape[1] // gates.num_layers
        num_left, is_told = len(block_ids) * self._blocks.shape[1], False
        with torch.cuda.device(self._device), _Pacer(self._up) as pacer:
            pacer.queued(0)  # a direct call of the driver needs the device's context on this thread
            for group in gates.groups:
                size = max(1, PIECE_BYTES // (group.num_layers * layer_bytes))
                for first in range(0, len(block_ids), size):
                    piece = block_ids[first : first + size], slots[first : first + size]
                    num_bytes = len(piece[0]) * group.num_layers * layer_bytes
                    pacer.make_room(num_bytes)
                    self._queue_layers(group, *piece)
                    event = pacer.queued(num_bytes)
                    num_left -= num_bytes
                    if first + size >= len(block_ids):
                        gates.queued(copy_id, group, event)
                    # Only after the device has work, because the callee takes the GIL.
                    if num_left <= NEAR_END_BYTES and not is_told:
                        tell_near_end()
                        is_told = True

    def _queue_layers(self, group: LayerGroup, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Queue copies of these layers of the blocks; blocks adjacent on both sides are rows of one copy."""
        assert self._gates is not None
        block_bytes = self._blocks.shape[1]
        layer_bytes = block_bytes // self._gates.num_layers
        begin, width = group.first_layer * layer_bytes, group.num_layers * layer_bytes
        if self._rows is not None:
            target, source = self._blocks.data_ptr() + begin, self._slots.data_ptr() + begin
            pieces = BlockPieces(target, source, block_bytes, block_bytes, rows=1, width=width)
            status = self._rows.start([pieces.of(list(runs(block_ids, slots)))], self._up.cuda_stream)
            if status == 0:
                return
            logger.warning(
                "the driver's copy of rows failed with status %d; layers of blocks are copied one by one", status
            )
            self._rows = None
        with torch.cuda.stream(self._up):
            for block, slot in zip(block_ids, slots, strict=True):
                on_host = self._slots[slot, begin : begin + width]
                self._blocks[block, begin : begin + width].copy_(on_host, non_blocking=True)

    def clear(self) -> None:
        """Do nothing: the index no longer finds the stored blocks."""

    def close(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self._host.address)  # type: ignore[no-untyped-call]

    def _copy(
        self,
        stream: torch.cuda.Stream,
        way: str,
        blocks: Tensor,
        block_ids: Sequence[int],
        slots: Sequence[int],
        *,
        is_load: bool,
    ) -> None:
        """Copy between ``blocks`` [n, block_bytes] on the device and the slots; return when the copies have ended."""
        size = max(1, PIECE_BYTES // blocks.shape[1])
        with torch.cuda.device(self._device), torch.cuda.stream(stream), _Pacer(stream) as pacer:
            for first in range(0, len(block_ids), size):
                piece = block_ids[first : first + size], slots[first : first + size]
                num_bytes = len(piece[0]) * blocks.shape[1]
                pacer.make_room(num_bytes)
                if way == "kernel":
                    self._by_kernel(blocks, *piece, is_load=is_load)
                else:
                    self._by_engine(blocks, *piece, is_load=is_load)
                pacer.queued(num_bytes)

    def _by_engine(self, blocks: Tensor, block_ids: Sequence[int], slots: Sequence[int], *, is_load: bool) -> None:
        for block, slot, count in runs(block_ids, slots):
            on_device, on_host = blocks[block : block + count], self._slots[slot : slot + count]
            if is_load:
                on_device.copy_(on_host, non_blocking=True)
            else:
                on_host.copy_(on_device, non_blocking=True)

    def _by_kernel(self, blocks: Tensor, block_ids: Sequence[int], slots: Sequence[int], *, is_load: bool) -> None:
        size = blocks.shape[1]
        on_device = [blocks.data_ptr() + block * size for block in block_ids]
        on_host = [self._slots_on_device + slot * size for slot in slots]
        targets, sources = (on_device, on_host) if is_load else (on_host, on_device)
        self._row_copier(is_load=is_load).start(targets, sources)

    def _row_copier(self, *, is_load: bool) -> "RowCopier":
        """Return this direction's copier, created at first use. PyTorch aligns its other allocations as well as the
        blocks, so one alignment holds for all."""
        from splitserve.kernels.triton.row_copy import RowCopier, Rows

        if is_load not in self._row_copiers:
            size = self._blocks.shape[1]
            address_bits = size | self._blocks.data_ptr() | self._slots_on_device
            rows = Rows(1, size, size, size)
            self._row_copiers[is_load] = RowCopier(
                self._up if is_load else self._down, rows, address_bits & -address_bits
            )
        return self._row_copiers[is_load]

    def _faster_way(self) -> str:
        """Return the faster copy method for scattered loads into memory other than the blocks; "engine" without
        Triton."""
        count = min(MEASURED_BYTES // self._slots.shape[1], len(self._slots) // 2)
        if not self._slots_on_device:
            logger.warning(
                "blocks are copied by copy engines, because the driver doesn't map registered memory for kernels"
            )
            return "engine"
        if count < 1:
            return "engine"
        try:
            blocks = torch.empty(2 * count, self._slots.shape[1], dtype=torch.uint8, device=self._device)
            torch.cuda.current_stream(self._device).synchronize()  # earlier users of that memory have ended
            seconds = {way: self._seconds(way, blocks) for way in ("engine", "kernel")}
        except Exception as error:  # e.g. from the compiler
            logger.warning(
                "blocks are copied by copy engines, because the kernel failed: %s: %s", type(error).__name__, error
            )
            return "engine"
        way = "kernel" if seconds["kernel"] * KERNEL_GAIN < seconds["engine"] else "engine"
        rates = ", ".join(f"{name} {count * blocks.shape[1] / s / 1e9:.1f} GB/s" for name, s in seconds.items())
        logger.info("blocks of %d bytes are copied by %s: %s", blocks.shape[1], way, rates)
        return way

    def _seconds(self, way: str, blocks: Tensor) -> float:
        """Return the median time of copying every other block, in reverse order on one side."""
        block_ids, slots = range(0, len(blocks), 2), range(len(blocks) - 1, 0, -2)
        seconds = []
        for _ in range(MEASURED_ROUNDS + 1):
            started = time.perf_counter()
            self._copy(self._up, way, blocks, block_ids, slots, is_load=True)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])  # the first one compiles
