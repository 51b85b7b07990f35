"""Copies between a GPU's blocks and registered host memory: by the copy engines, or by a kernel where blocks are small.

Each direction has a stream of its own, and so do both ways of copying. Which way is used is measured at start. Loads by
copy engines go group of layers by group of layers where a step may wait for them on the device
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

if TYPE_CHECKING:  # there may be no Triton
    from splitserve.kernels.triton.row_copy import RowCopier

logger = logging.getLogger(__name__)

MAX_KERNEL_BLOCK_BYTES = 2 << 20
"""Copy engines are at their full speed with larger pieces: nothing is measured then. With smaller ones the host can't
post them as fast, least of all in both directions at once (``tier-copies`` in benchmarks/results)."""
KERNEL_GAIN = 1.1
"""A kernel takes multiprocessors from the steps beside it: it has to be faster by that much."""
PIECE_BYTES = 32 << 20
MAX_BYTES_UNDER_WAY = 2 * PIECE_BYTES
"""The few numbers that a step beside copies moves wait for no more than that; and the link never rests."""
NEAR_END_BYTES = 512 << 20
"""The longest rest of a load that a step, and whatever follows it, may have to wait for."""
MEASURED_BYTES = 64 << 20
MEASURED_ROUNDS = 5


class _Pacer:
    """Bounds what is queued on a stream; at the end of its ``with`` statement nothing is, whether or not it failed. Its
    waits sleep rather than spin: the engine loop needs the core, and the GIL."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pieces: deque[tuple[torch.cuda.Event, int]] = deque()
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.queued(0)  # behind what was queued for a piece that failed, too
        while self._pieces:
            self._wait_for_first()

    def make_room(self, num_bytes: int) -> None:
        """Wait until so many may be queued; one piece more than the one that is being copied always may."""
        while len(self._pieces) > 1 and self._num_bytes + num_bytes > MAX_BYTES_UNDER_WAY:
            self._wait_for_first()

    def queued(self, num_bytes: int) -> torch.cuda.Event:
        """So many are queued now. Returns the event behind them."""
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
    """Where a kernel finds registered memory; 0 if the driver doesn't map it."""
    address = ctypes.c_uint64(0)
    find = ctypes.CDLL("libcuda.so.1").cuMemHostGetDevicePointer_v2
    status = find(ctypes.byref(address), ctypes.c_void_p(host_address), ctypes.c_uint(0))
    return address.value if status == 0 else 0


class CudaHostStore:
    """A :class:`splitserve.kvconnector.tiers.copies.GatedStore`.

    ``way``: "engine" or "kernel", for both directions. ``gates``: who waits for loads, None for nobody. Raises
    :class:`RuntimeError` where the memory can't be registered.
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
        """The blocks are complete: the step that computed them is over."""
        del hashes
        self._copy(self._down, self.way, self._blocks, block_ids, slots, is_load=False)

    def load(self, block_ids: Sequence[int], slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        """No step touches the blocks yet: those that read them are launched once this has returned."""
        del hashes
        self._copy(self._up, self.way, self._blocks, block_ids, slots, is_load=True)

    def load_gated(
        self, copy_id: int, block_ids: Sequence[int], slots: Sequence[int], tell_near_end: Callable[[], None]
    ) -> None:
        """Steps that read the blocks are launched once this has returned, or wait for their layers."""
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
        """A group of layers of all blocks, then the next one; returns when it's over."""
        layer_bytes = self._blocks.shape[1] // gates.num_layers
        num_left, is_told = len(block_ids) * self._blocks.shape[1], False
        with torch.cuda.device(self._device), _Pacer(self._up) as pacer:
            pacer.queued(0)  # before the driver is called directly, this thread needs the device's context
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
                    if num_left <= NEAR_END_BYTES and not is_told:  # once the device is busy: who hears takes the GIL
                        tell_near_end()
                        is_told = True

    def _queue_layers(self, group: LayerGroup, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copies of these layers of the blocks: neighbours on both sides are rows of one."""
        assert self._gates is not None
        block_bytes = self._blocks.shape[1]
        layer_bytes = block_bytes // self._gates.num_layers
        begin, width = group.first_layer * layer_bytes, group.num_layers * layer_bytes
        if self._rows is not None:
            target, source = self._blocks.data_ptr() + begin, self._slots.data_ptr() + begin
            pieces = BlockPieces(target, source, block_bytes, block_bytes, rows=1, width=width)
            status = self._rows.start(pieces.of(block_ids, slots), self._up.cuda_stream)
            if status == 0:
                return
            logger.warning("layers of blocks are copied one by one: the driver's copy of rows fails with %d", status)
            self._rows = None
        with torch.cuda.stream(self._up):
            for block, slot in zip(block_ids, slots, strict=True):
                on_host = self._slots[slot, begin : begin + width]
                self._blocks[block, begin : begin + width].copy_(on_host, non_blocking=True)

    def clear(self) -> None:
        """What was stored isn't found any more."""

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
        """Between ``blocks`` [n, block_bytes] of the device and the slots; returns when it's over."""
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
        """Of this direction's thread; made where it's first needed. PyTorch aligns whatever else it allocates as well
        as it does the blocks."""
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
        """By the time of scattered loads into memory beside the blocks. The copy engines, where there is no Triton."""
        count = min(MEASURED_BYTES // self._slots.shape[1], len(self._slots) // 2)
        if not self._slots_on_device:
            logger.warning("blocks are copied by copy engines: the driver doesn't map registered memory for kernels")
            return "engine"
        if count < 1:
            return "engine"
        try:
            blocks = torch.empty(2 * count, self._slots.shape[1], dtype=torch.uint8, device=self._device)
            torch.cuda.current_stream(self._device).synchronize()  # whoever had that memory before is through with it
            seconds = {way: self._seconds(way, blocks) for way in ("engine", "kernel")}
        except Exception as error:  # of a compiler
            logger.warning("blocks are copied by copy engines; the kernel fails: %s: %s", type(error).__name__, error)
            return "engine"
        way = "kernel" if seconds["kernel"] * KERNEL_GAIN < seconds["engine"] else "engine"
        rates = ", ".join(f"{name} {count * blocks.shape[1] / s / 1e9:.1f} GB/s" for name, s in seconds.items())
        logger.info("blocks of %d bytes are copied by %s: %s", blocks.shape[1], way, rates)
        return way

    def _seconds(self, way: str, blocks: Tensor) -> float:
        """Of every other block, backwards on one side."""
        block_ids, slots = range(0, len(blocks), 2), range(len(blocks) - 1, 0, -2)
        seconds = []
        for _ in range(MEASURED_ROUNDS + 1):
            started = time.perf_counter()
            self._copy(self._up, way, blocks, block_ids, slots, is_load=True)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])  # the first one compiles
