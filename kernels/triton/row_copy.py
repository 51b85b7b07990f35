"""Copies of rows of bytes between two memories, as one Triton kernel.

The kernel's device reads the source and writes the target, whichever memory they are in: its own, a peer's mapped
memory, pinned host memory. It is for rows that are slow with copy engines: rows of tens of kilobytes between GPUs,
since a copy engine handles each row separately, and small blocks from the host, since each copy has a fixed cost. A
bounded number of programs keeps enough bytes in flight for the link, and leaves the rest of the device to concurrent
steps. Offsets are in 64 bits.

The addresses are in a table in pinned memory that the kernel reads directly: starting a copy of the table to the device
would take the host longer than the kernel takes to read it. Once compiled, the kernel is launched without Triton's
inspection of its arguments, which are the same each time. A CUDA graph would launch faster, but while one is captured,
any thread that waits for the whole device fails.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import contextlib
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK_BYTES = 16384
_MAX_PROGRAMS = 32
_NUM_WARPS = 4
_NUM_STAGES = 4
"""Pipeline stages: a program has one chunk less than that in flight, 1.5 MiB in all. Its benefit is measured by
``splitserve bench handover --tp 4:2 --one-rank --path kernel mapped``."""
_NUM_TABLES = 4
_MOST_PIECES = 1024
_UNITS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class Rows(NamedTuple):
    """Shape of a piece: ``num_rows`` rows of ``width`` bytes."""

    num_rows: int
    width: int
    target_pitch: int  # bytes from the start of one row to the start of the next
    source_pitch: int


class _Table:
    """Table of the copies of a launch, int64 [1 + 2 * _MOST_PIECES]: number of chunks in all; targets; sources."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.memory = torch.zeros(1 + 2 * _MOST_PIECES, dtype=torch.int64, pin_memory=on_gpu)
        self._numbers = self.memory.numpy().data.cast("B").cast("q")
        self._is_read = torch.cuda.Event(blocking=True) if on_gpu else None

    def fill(self, targets: Sequence[int], sources: Sequence[int], chunks_per_piece: int) -> None:
        """Fill the table, after the device has read its present content."""
        if self._is_read is not None:
            self._is_read.synchronize()
        self._numbers[0] = len(targets) * chunks_per_piece
        self._numbers[1 : 1 + len(targets)] = array("q", targets)
        self._numbers[1 + _MOST_PIECES : 1 + _MOST_PIECES + len(sources)] = array("q", sources)

    def is_read(self) -> bool:
        """Return whether the device has read its present content."""
        return self._is_read is None or self._is_read.query()

    def launched(self, stream: "torch.cuda.Stream | None") -> None:
        """Record that a kernel that reads the table was launched on the stream."""
        if self._is_read is not None:
            self._is_read.record(stream)


class RowCopier:
    """Copier of pieces of ``rows`` each, from and to multiples of ``alignment``, a power of two.

    ``stream``: a stream of the current device; None on a CPU, where the kernel is interpreted. Used by one thread at
    a time, and kept until the copies have ended: the device reads its tables.
    """

    def __init__(self, stream: "torch.cuda.Stream | None", rows: Rows, alignment: int) -> None:
        self._stream = stream
        self._launch_compiled: Callable[..., None] | None = None
        bits = alignment | rows.width | rows.target_pitch | rows.source_pitch
        self._rows = rows
        self._alignment = next(size for size in _UNITS if bits % size == 0)
        chunk_bytes = min(_CHUNK_BYTES, triton.next_power_of_2(rows.width))
        self._num_chunks = triton.cdiv(rows.width, chunk_bytes)
        unit_bytes = min(self._alignment, 8)
        self._arguments = (  # arguments of the kernel after its table
            rows.num_rows,
            self._num_chunks,
            rows.width // unit_bytes,
            rows.target_pitch // unit_bytes,
            rows.source_pitch // unit_bytes,
            _UNITS[self._alignment],
            chunk_bytes // unit_bytes,
            rows.width % chunk_bytes == 0,
            self._alignment,
            _MOST_PIECES,
            _NUM_STAGES,
        )
        self._tables = deque(_Table(on_gpu=stream is not None) for _ in range(_NUM_TABLES))

    def is_ready(self, num_pieces: int) -> bool:
        """Return whether the next copy, of so many pieces, waits neither for the compiler nor for the device."""
        is_compiled = self._stream is None or self._launch_compiled is not None
        num_tables = -(-num_pieces // _MOST_PIECES)
        tables = itertools.islice(self._tables, num_tables)
        return is_compiled and num_tables <= _NUM_TABLES and all(table.is_read() for table in tables)

    def start(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Copy from each address of ``sources`` to that of ``targets``. Waits if as many copies as there are tables are
        in flight. Raises the errors of the compiler and of CUDA."""
        assert len(targets) == len(sources)
        for low in range(0, len(targets), _MOST_PIECES):
            part = slice(low, low + _MOST_PIECES)
            table = self._tables[0]
            self._tables.rotate(-1)
            table.fill(targets[part], sources[part], self._rows.num_rows * self._num_chunks)
            self._launch(table.memory)
            table.launched(self._stream)

    def _launch(self, table: Tensor) -> None:
        if self._stream is not None and self._launch_compiled is not None:
            self._launch_compiled(table, *self._arguments, stream=self._stream.cuda_stream)
            return
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            compiled = _copy_kernel[(_MAX_PROGRAMS,)](table, *self._arguments, num_warps=_NUM_WARPS)
        if self._stream is not None:
            self._launch_compiled = compiled[(_MAX_PROGRAMS, 1, 1)]


@triton.jit
def _copy_kernel(
    table_ptr,
    num_rows,
    num_chunks,
    width,
    target_pitch,
    source_pitch,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    total = tl.load(table_ptr).to(tl.int32)
    for number in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=NUM_STAGES):
        row_of_all = number // num_chunks
        piece = row_of_all // num_rows
        row = (row_of_all % num_rows).to(tl.int64)
        unit = (number % num_chunks) * CHUNK + tl.arange(0, CHUNK)
        target = tl.load(table_ptr + 1 + piece).to(tl.pointer_type(UNIT))
        source = tl.load(table_ptr + 1 + MOST_PIECES + piece).to(tl.pointer_type(UNIT))
        target = tl.multiple_of(target, ALIGNMENT) + row * target_pitch
        source = tl.multiple_of(source, ALIGNMENT) + row * source_pitch
        if IS_EVEN:
            tl.store(target + unit, tl.load(source + unit))
        else:
            inside = unit < width
            tl.store(target + unit, tl.load(source + unit, mask=inside), mask=inside)
