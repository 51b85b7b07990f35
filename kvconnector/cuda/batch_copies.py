"""Copies between many addresses in GPU memory, queued by one call of the driver.

Single copies of a few megabytes leave the connection between two GPUs idle in between; within a batch the driver
overlaps them.
"""

import ctypes
import logging
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from splitserve.kvconnector.layout.shape import Run

logger = logging.getLogger(__name__)

_UNIFIED = 4  # CUmemorytype: the address determines the location
_IN_STREAM_ORDER = 1  # CUmemcpySrcAccessOrder
_IS_POINTER = 1  # CUmemcpy3DOperandType


class CopyBatch(NamedTuple):
    """Copies of ``heights[i]`` rows from ``sources[i]`` to ``targets[i]``."""

    targets: Sequence[int]
    sources: Sequence[int]
    heights: Sequence[int]
    width: int  # bytes of a row
    target_pitch: int  # bytes from the start of one row to the start of the next
    source_pitch: int

    @property
    def is_flat(self) -> bool:
        """True if rows follow each other without gaps."""
        return self.width == self.target_pitch == self.source_pitch


class BlockPieces(NamedTuple):
    """A piece of each block on two sides: ``rows`` of ``width`` bytes, evenly spaced over the block."""

    target: int  # address of the piece of block 0
    source: int
    target_bytes: int  # bytes of a block
    source_bytes: int
    rows: int
    width: int  # bytes of a row

    def of(self, found: Sequence[Run]) -> CopyBatch:
        """Return the copies of runs of the peer's blocks, which come second, to ours, a copy for each run.

        In plain Python, which for a few blocks costs less than numpy.
        """
        targets = [self.target + into * self.target_bytes for into, _, _ in found]
        sources = [self.source + out_of * self.source_bytes for _, out_of, _ in found]
        heights = [count * self.rows for _, _, count in found]
        return CopyBatch(targets, sources, heights, self.width, *self.pitches)

    @property
    def is_flat(self) -> bool:
        """True if rows follow each other without gaps on both sides."""
        return (self.width, self.width) == self.pitches

    @property
    def pitches(self) -> tuple[int, int]:
        """Bytes from the start of one row to the start of the next: ours, the peer's."""
        return self.target_bytes // self.rows, self.source_bytes // self.rows


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes`` of cuda.h; location hints are ignored for memory that CUDA allocated."""

    _fields_ = [("order", ctypes.c_uint), ("hints", ctypes.c_uint * 4), ("flags", ctypes.c_uint)]


class _Memcpy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of cuda.h."""

    _fields_ = [
        ("src_x_in_bytes", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_memory_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x_in_bytes", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_memory_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width_in_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class BatchCopier:
    """Copier that queues many copies by one call of the driver.

    ``driver``: libcuda, or an object with its functions. A driver older than CUDA 13 has no batches; the copies are
    then queued one by one.
    """

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        driver.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        driver.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(_Memcpy2D), ctypes.c_void_p]
        self._batch = getattr(driver, "cuMemcpyBatchAsync_v2", None)
        if self._batch is not None:
            pointers, count = [ctypes.c_void_p] * 3, ctypes.c_size_t
            attributes = [ctypes.POINTER(_Attributes), ctypes.POINTER(ctypes.c_size_t), count]
            self._batch.argtypes = [*pointers, count, *attributes, ctypes.c_void_p]
        self._batch_rows = getattr(driver, "cuMemcpy3DBatchAsync_v2", None)
        if self._batch_rows is not None:
            self._batch_rows.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p]
        self._attributes = ctypes.byref(_Attributes(order=_IN_STREAM_ORDER)), ctypes.byref(ctypes.c_size_t(0)), 1

    def start(self, batches: Sequence[CopyBatch], stream: int) -> int:
        """Queue the copies on the stream with that handle, by one call if the driver can. Return CUDA's status: 0 if
        all are queued; otherwise some may be."""
        batches = [copies for copies in batches if len(copies.targets)]
        if not batches:
            return 0
        if all(copies.is_flat for copies in batches):
            return self._start_flat(batches, stream)
        return self._start_rows(batches, stream)

    def start_one(self, target: int, source: int, num_bytes: int, stream: int) -> int:
        """Queue one copy; return CUDA's status."""
        return int(self._driver.cuMemcpyAsync(target, source, num_bytes, stream))

    def start_blocks(self, pieces: BlockPieces, found: Sequence[Run], stream: int) -> int:
        """Queue the copies of runs of the peer's blocks to ours as :meth:`start` does, of flat pieces."""
        target, source, size = pieces.target, pieces.source, pieces.target_bytes
        return self._start_addresses(
            array("Q", [target + into * size for into, _, _ in found]),
            array("Q", [source + out_of * size for _, out_of, _ in found]),
            array("Q", [count * size for _, _, count in found]),
            stream,
        )

    def _start_flat(self, batches: Sequence[CopyBatch], stream: int) -> int:
        targets, sources, sizes = array("Q"), array("Q"), array("Q")
        for copies in batches:
            targets.extend(copies.targets)
            sources.extend(copies.sources)
            sizes.extend([height * copies.width for height in copies.heights])
        return self._start_addresses(targets, sources, sizes, stream)

    def _start_addresses(self, targets: "array[int]", sources: "array[int]", sizes: "array[int]", stream: int) -> int:
        if self._batch is not None:
            addresses = targets.buffer_info()[0], sources.buffer_info()[0], sizes.buffer_info()[0]
            status = self._batch(*addresses, len(sizes), *self._attributes, stream)
            if status == 0:
                return 0
            self._batch = None
            _tell_that_it_fails("cuMemcpyBatchAsync", status)
        for target, source, size in zip(targets, sources, sizes, strict=True):
            if (status := self._driver.cuMemcpyAsync(target, source, size, stream)) != 0:
                return int(status)
        return 0

    def _start_rows(self, batches: Sequence[CopyBatch], stream: int) -> int:
        if self._batch_rows is not None:
            operations = _row_operations(batches)
            count = sum(len(copies.targets) for copies in batches)
            status = self._batch_rows(count, operations.buffer_info()[0], 0, stream)
            if status == 0:
                return 0
            self._batch_rows = None
            _tell_that_it_fails("cuMemcpy3DBatchAsync", status)
        for copies in batches:
            if (status := self._start_rows_one_by_one(copies, stream)) != 0:
                return status
        return 0

    def _start_rows_one_by_one(self, copies: CopyBatch, stream: int) -> int:
        rows = _Memcpy2D(
            src_memory_type=_UNIFIED,
            src_pitch=copies.source_pitch,
            dst_memory_type=_UNIFIED,
            dst_pitch=copies.target_pitch,
            width_in_bytes=copies.width,
        )
        copy, pointer = self._driver.cuMemcpy2DAsync_v2, ctypes.byref(rows)
        for target, source, height in zip(copies.targets, copies.sources, copies.heights, strict=True):
            rows.dst_device, rows.src_device, rows.height = target, source, height
            if (status := copy(pointer, stream)) != 0:
                return int(status)
        return 0


def _row_operations(batches: Sequence[CopyBatch]) -> "array[int]":
    """Return an array of ``CUDA_MEMCPY3D_BATCH_OP`` of cuda.h, 14 words each: the operands (pointer, row pitch, no
    layers, no hint), the extent (width, height, one layer), the order."""
    words = array("Q")
    for targets, sources, heights, width, target_pitch, source_pitch in batches:
        for target, source, height in zip(targets, sources, heights, strict=True):
            words.extend((_IS_POINTER, source, source_pitch, 0, 0, _IS_POINTER, target, target_pitch, 0, 0))
            words.extend((width, height, 1, _IN_STREAM_ORDER))
    return words


def _tell_that_it_fails(name: str, status: int) -> None:
    """Log that a batch failed. Copies that it may have queued do no harm: the same bytes are copied once more."""
    logger.warning("%s failed with status %d; copies are queued one by one from now on", name, status)
