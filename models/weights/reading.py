"""Reads parts of a checkpoint's tensors: a whole model on a CPU from the mapped files, else through staging buffers.

A rank's part is less than the pages that hold it, so it goes to a CPU as to a device. :class:`StagedReader` reads ahead
on several threads, in the order of the files' bytes. Each thread has one staging buffer, so that host memory holds a
bounded piece of the model beside what is kept.
"""

import logging
import math
import mmap
import os
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from splitserve.common.errors import CheckpointError
from splitserve.kernels.fp8.weight import Fp8Weight
from splitserve.models.config import Fp8Format
from splitserve.models.layers.weight import Role, Weight
from splitserve.models.weights.checkpoint import TensorRecord
from splitserve.models.weights.fp8_scales import FP8, ScaleReader
from splitserve.models.weights.shard import Kept, Part, Parts
from splitserve.models.weights.stored_tensors import StoredTensors

logger = logging.getLogger(__name__)

STORED_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    FP8: torch.float8_e4m3fn,
    "U8": torch.uint8,
}
STAGING_BYTES = 32 << 20
MAX_THREADS = 8
_DUMMY_STD = 0.02
_DUMMY_SCALE = 121  # an exponent that makes MXFP4 numbers about as small: 2 ** (121 - 127)
_DUMMY_ONES = (Role.NORM, Role.HEAD_NORM, Role.FINAL_NORM)


class WeightReader(Protocol):
    """Gives weights on the model's device, in the dtype that it computes in; those in FP8 as they are."""

    def announce(self, weights: Sequence[Parts]) -> None:
        """Note the weights that will be read, in their order, so that they can be read ahead."""

    def read(self, parts: Parts, *, own: bool = False) -> Tensor:
        """The parts, stacked along their rows, contiguous; with ``own`` or for a vector no view of a mapped file."""

    def is_fp8(self, parts: Parts) -> bool:
        """Return whether ``parts`` are stored in FP8, so that :meth:`read_fp8` must be used."""

    def read_fp8(self, parts: Parts) -> Fp8Weight:
        """Read like :meth:`read`, with the scales."""

    def close(self) -> None:
        """Release files and memory; no read may follow."""


class MappedReader:
    """Reader for a whole model on the CPU: reads one weight at a time from the memory-mapped files."""

    def __init__(
        self, records: Mapping[str, TensorRecord], dtype: torch.dtype, scales: ScaleReader | None = None
    ) -> None:
        self._tensors = StoredTensors(records)
        self._dtype = dtype
        self._scales = scales

    def announce(self, weights: Sequence[Parts]) -> None: ...

    def read(self, parts: Parts, *, own: bool = False) -> Tensor:
        dtype = _dtype_of(parts, self._dtype)
        if len(parts) > 1:
            return _joined([_cut(self._tensors.view(part.name), part) for part in parts], dtype)
        view = _cut(self._tensors.view(parts[0].name), parts[0])
        return view.to(dtype, copy=own or view.dim() == 1).contiguous()

    def is_fp8(self, parts: Parts) -> bool:
        return self._scales is not None and self._scales.is_fp8(parts)

    def read_fp8(self, parts: Parts) -> Fp8Weight:
        assert self._scales is not None
        return self._scales.with_scales(
            _joined([_cut(self._tensors.view(part.name), part) for part in parts], torch.float8_e4m3fn), parts
        )

    def mapped(self, name: str) -> Tensor:
        """Return the whole tensor as a view of its file, in the checkpoint's own dtype; no page is resident yet."""
        self._tensors.close()
        return self._tensors.view(name)

    def close(self) -> None:
        self._tensors.close()
        if self._scales is not None:
            self._scales.close()


class DummyReader:
    """Random weights: a function of each tensor's name and shape, so that all ranks have parts of the same model."""

    def __init__(
        self,
        weights: Mapping[str, Weight],
        dtype: torch.dtype,
        device: torch.device,
        fp8: Fp8Format | None = None,
    ) -> None:
        """``weights``: what a checkpoint would have."""
        self._weights = weights
        self._fp8 = fp8
        self._dtype = dtype
        self._device = device

    def announce(self, weights: Sequence[Parts]) -> None: ...

    def read(self, parts: Parts, *, own: bool = False) -> Tensor:  # noqa: ARG002
        cuts = [_cut(self._whole(part.name), part) for part in parts]
        if parts[0].kept is Kept.FLOAT32:
            return cuts[0].float()
        return cuts[0].contiguous() if len(cuts) == 1 else torch.cat(cuts)

    def is_fp8(self, parts: Parts) -> bool:
        return self._fp8 is not None and all(self._weights[part.name].may_be_fp8 for part in parts)

    def read_fp8(self, parts: Parts) -> Fp8Weight:
        weight = self.read(parts).to(torch.float8_e4m3fn)
        group = weight.shape[1] if self._fp8 is None or self._fp8.block is None else self._fp8.block[1]
        scales = torch.ones((weight.shape[0], -(-weight.shape[1] // group)), device=self._device)
        return Fp8Weight(weight, scales, group)

    def close(self) -> None: ...

    def _whole(self, name: str) -> Tensor:
        shape, role = self._weights[name].shape, self._weights[name].role
        if role in _DUMMY_ONES:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        if role is Role.EXPERT_SCALES:
            return torch.full(shape, _DUMMY_SCALE, dtype=torch.uint8, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        if role is Role.EXPERT_BLOCKS:
            return torch.randint(256, shape, dtype=torch.uint8, device=self._device, generator=generator)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0.0, _DUMMY_STD, generator=generator)


def _dtype_of(parts: Parts, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that ``parts`` have in memory, unless they are in FP8."""
    dtypes = {Kept.MODEL: model_dtype, Kept.FLOAT32: torch.float32, Kept.BYTES: torch.uint8}
    return dtypes[parts[0].kept]


def _joined(views: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return ``views`` stacked along their rows; nothing else of that size is made."""
    joined = torch.empty((sum(view.shape[0] for view in views), *views[0].shape[1:]), dtype=dtype)
    for view, rows in zip(views, torch.split(joined, [view.shape[0] for view in views]), strict=True):
        rows.copy_(view)
    return joined


def _cut(tensor: Tensor, part: Part) -> Tensor:
    if part.rows is not None:
        tensor = tensor[part.rows.start : part.rows.stop]
    return tensor if part.columns is None else tensor[:, part.columns.start : part.columns.stop]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one stored tensor, cut to ``columns``, that fit into a staging buffer, and where they go.

    ``columns`` and ``row_bytes`` are in bytes of the stored rows.
    """

    file: "_File"
    offset: int
    num_rows: int
    row_bytes: int
    columns: range
    dtype: torch.dtype
    target: Tensor

    @property
    def num_bytes(self) -> int:
        return self.num_rows * len(self.columns)


class StagedReader:
    """Reader for a model on a device, or for a rank's part: ``num_threads`` read ahead into staging memory, which is
    pinned for a device, and weights are copied from there.

    The device's memory is allocated by :meth:`announce`, once, in its final shape.
    """

    def __init__(
        self,
        records: Mapping[str, TensorRecord],
        dtype: torch.dtype,
        device: torch.device,
        scales: ScaleReader | None = None,
        *,
        num_threads: int = MAX_THREADS,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._records = records
        self._dtype = dtype
        self._device = device
        self._scales = scales
        # One row at least, of whatever tensor
        self._staging_bytes = max(staging_bytes, *(4 * record.shape[-1] for record in records.values() if record.shape))
        self._files: dict[Path, _File] = {}
        self._targets: dict[Parts, tuple[Tensor, list[Future[None]]]] = {}
        self._threads = threading.local()
        self._pool = ThreadPoolExecutor(num_threads, "weights", self._set_up_thread)
        self._started = time.monotonic()
        self.num_bytes = 0

    def announce(self, weights: Sequence[Parts]) -> None:
        pieces: list[tuple[_Piece, list[Future[None]]]] = []
        for parts in weights:
            dtype = torch.float8_e4m3fn if self.is_fp8(parts) else _dtype_of(parts, self._dtype)
            target = torch.empty(self._shape(parts), dtype=dtype, device=self._device)
            futures: list[Future[None]] = []
            self._targets[parts] = (target, futures)
            for part, rows in zip(parts, torch.split(target, [self._num_rows(part) for part in parts]), strict=True):
                pieces += [(piece, futures) for piece in self._pieces(part, rows)]
        for piece, futures in sorted(pieces, key=lambda entry: (entry[0].file.path, entry[0].offset)):
            self.num_bytes += piece.num_bytes
            futures.append(self._pool.submit(self._load, piece))

    def read(self, parts: Parts, *, own: bool = False) -> Tensor:  # noqa: ARG002
        target, futures = self._targets.pop(parts)
        for future in futures:
            future.result()
        return target

    def is_fp8(self, parts: Parts) -> bool:
        return self._scales is not None and self._scales.is_fp8(parts)

    def read_fp8(self, parts: Parts) -> Fp8Weight:
        assert self._scales is not None
        return self._scales.with_scales(self.read(parts), parts)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._scales is not None:
            self._scales.close()
        for file in self._files.values():
            file.close()
        seconds = time.monotonic() - self._started
        logger.info(
            "read %.2f GB of weights in %.1f s, %.1f GB/s",
            self.num_bytes / 1e9,
            seconds,
            self.num_bytes / 1e9 / seconds,
        )

    def _set_up_thread(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            self._threads.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pinned = self._device.type == "cuda"
        self._threads.staging = torch.empty(self._staging_bytes, dtype=torch.uint8, pin_memory=pinned)

    def _shape(self, parts: Parts) -> tuple[int, ...]:
        record, columns = self._records[parts[0].name], parts[0].columns
        rows = sum(self._num_rows(part) for part in parts)
        if len(record.shape) == 1:
            return (rows,)
        return rows, record.shape[1] if columns is None else len(columns)

    def _num_rows(self, part: Part) -> int:
        return self._records[part.name].shape[0] if part.rows is None else len(part.rows)

    def _pieces(self, part: Part, target: Tensor) -> list[_Piece]:
        record, shape = self._records[part.name], self._records[part.name].shape
        rows_of_part, columns_of_part = part.rows, part.columns
        if record.is_transposed:
            shape, target = shape[::-1], target.t()
            rows_of_part, columns_of_part = columns_of_part, rows_of_part
        dtype = STORED_DTYPES[record.dtype]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        columns = range(row_bytes)
        if columns_of_part is not None:
            columns = range(columns_of_part.start * dtype.itemsize, columns_of_part.stop * dtype.itemsize)
        if record.file not in self._files:
            self._files[record.file] = _File(record.file)
        file, first = self._files[record.file], 0 if rows_of_part is None else rows_of_part.start
        step = max(1, self._staging_bytes // max(1, len(columns)))
        return [
            _Piece(file, record.offset + (first + row) * row_bytes, len(rows), row_bytes, columns, dtype, rows)
            for row, rows in zip(range(0, target.shape[0], step), torch.split(target, step), strict=False)
        ]

    @torch.inference_mode()  # a mode of each thread
    def _load(self, piece: _Piece) -> None:
        staging: Tensor = self._threads.staging[: piece.num_bytes]
        piece.file.read(piece, staging.numpy())
        host = staging.view(piece.dtype).view(piece.target.shape)
        if self._device.type != "cuda":
            piece.target.copy_(host)
            return
        stream: torch.cuda.Stream = self._threads.stream
        with torch.cuda.stream(stream):
            if host.dtype != piece.target.dtype:  # a copy that also converts would convert on the host
                host = host.to(self._device, non_blocking=True)
            piece.target.copy_(host, non_blocking=True)
        stream.synchronize()


class _File:
    """One weight file, open for reading. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._map = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)

    def read(self, piece: _Piece, into: "np.typing.NDArray[np.uint8]") -> None:
        """``into``: uint8 [piece.num_bytes]. The interpreter is free for the other threads meanwhile."""
        if len(piece.columns) == piece.row_bytes:
            self._read_range(piece.offset, into.data)
        else:
            self._read_columns(piece, into.reshape(piece.num_rows, len(piece.columns)))

    def _read_range(self, offset: int, into: memoryview) -> None:
        while into:
            try:
                count = os.preadv(self._fd, [into], offset)
            except OSError as error:
                raise CheckpointError(f"{self.path} can't be read: {error}") from error
            if not count:
                raise CheckpointError(f"{self.path} ends too early: download it again")
            offset, into = offset + count, into[count:]

    def _read_columns(self, piece: _Piece, into: "np.typing.NDArray[np.uint8]") -> None:
        """Read columns from the mapped file, since one call can't read many short pieces; release its pages at once."""

        num_bytes = piece.num_rows * piece.row_bytes
        first_page = piece.offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = piece.offset + num_bytes - first_page
        self._map.madvise(mmap.MADV_RANDOM, first_page, length)  # no more than what is asked for is read
        for begin in range(piece.offset + piece.columns.start, piece.offset + num_bytes, piece.row_bytes):
            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, page, begin + len(piece.columns) - page)
        rows = np.frombuffer(self._map, np.uint8, num_bytes, piece.offset).reshape(piece.num_rows, piece.row_bytes)
        np.copyto(into, rows[:, piece.columns.start : piece.columns.stop])
        self._map.madvise(mmap.MADV_DONTNEED, first_page, length)
