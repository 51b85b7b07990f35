"""Copies between KV blocks and separate contiguous memory; on a GPU, on a stream of their own."""

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from splitserve.kernels.api import GatherKV, ScatterKV
from splitserve.kernels.reference import kv_copy
from splitserve.kvconnector.layout.memory import KVMemory, words_of


class Pending(Protocol):
    """An operation in flight. ``due_at``: time by the monotonic clock before which it does not end; 0.0: it may end at
    any time."""

    due_at: float

    def is_done(self) -> bool:
        """Return whether the operation has ended. Raises its error if it failed."""


class Done:
    due_at = 0.0

    def is_done(self) -> bool:
        return True


class OnDevice:
    """Work queued on a stream. Keeps its inputs alive."""

    def __init__(self, stream: torch.cuda.Stream, *inputs: Tensor, due_at: float = 0.0) -> None:
        self._inputs = inputs
        self.due_at = due_at
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


def _kernels(device: torch.device) -> tuple[GatherKV, ScatterKV]:
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from splitserve.kernels.triton.gather import gather_kv, scatter_kv

            return gather_kv, scatter_kv
    return kv_copy.gather_kv, kv_copy.scatter_kv


class DeviceCopies:
    """Copies of heads of one KV memory's blocks, as words of bytes. Used by one thread only."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._layout = memory.layout.block_layout
        self._words = words_of(memory.bytes, self._layout)  # [num_blocks, layer, head, words]
        self._gather, self._scatter = _kernels(memory.device)
        self._stream: torch.cuda.Stream | None = None
        if memory.device.type == "cuda":
            self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]

    def compile(self, num_heads: int) -> None:
        """Compile the kernels for ``num_heads`` heads, before the first request needs them."""
        if self._stream is not None:
            blocks = torch.zeros_like(self._words[:1])
            ids = torch.zeros(1, dtype=torch.int64, device=blocks.device)
            with torch.cuda.stream(self._stream):
                self._stream.wait_stream(torch.cuda.default_stream(blocks.device))
                piece = blocks[:, :, :num_heads].contiguous()
                self._gather(blocks, ids, 0, piece)
                self._scatter(piece, ids, 0, blocks)
            self.wait()

    def gather(self, block_ids: Sequence[int], first_head: int, num_heads: int, flat: Tensor) -> Pending:
        """Copy some heads of blocks to the start of ``flat`` (bytes), block by block."""
        return self._copy(block_ids, first_head, self._pieces(flat, len(block_ids), num_heads), gathers=True)

    def scatter(self, flat: Tensor, block_ids: Sequence[int], first_head: int, num_heads: int) -> Pending:
        """Copy pieces from the start of ``flat`` (bytes) to some heads of blocks, the reverse of :meth:`gather`."""
        return self._copy(block_ids, first_head, self._pieces(flat, len(block_ids), num_heads), gathers=False)

    def scatter_part(self, blocks: Tensor, block_ids: Sequence[int], source_head: int, heads: range) -> Pending:
        """Copy ``len(heads)`` heads of whole ``blocks`` ``[n, layer, head, words]``, from ``source_head`` on, to
        ``heads`` of the local blocks."""
        part = blocks[:, :, source_head : source_head + len(heads)]
        if self._stream is None:
            targets = self._words[:, :, heads.start : heads.stop]
            for piece, block_id in zip(part, block_ids, strict=True):
                targets[block_id].copy_(piece)
            return Done()
        if part.is_contiguous():
            return self._copy(block_ids, heads.start, part, gathers=False)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            ids = self._ids(block_ids)
            self._words[:, :, heads.start : heads.stop].index_copy_(0, ids, part)
        return OnDevice(self._stream, ids)

    def wait(self) -> None:
        """Wait until all copies have ended."""
        if self._stream is not None:
            self._stream.synchronize()

    def _pieces(self, flat: Tensor, count: int, num_heads: int) -> Tensor:
        """Return the start of ``flat`` as ``[count, layer, num_heads, words]``."""
        shape = (count, self._words.shape[1], num_heads, self._words.shape[3])
        num_bytes = count * self._layout.piece_bytes(num_heads)
        return flat[:num_bytes].view(self._words.dtype).view(shape)

    def _copy(self, block_ids: Sequence[int], first_head: int, pieces: Tensor, *, gathers: bool) -> Pending:
        blocks = self._words
        if self._stream is None:
            targets = blocks[:, :, first_head : first_head + pieces.shape[2]]
            for piece, block_id in zip(pieces, block_ids, strict=True):
                if gathers:
                    piece.copy_(targets[block_id])
                else:
                    targets[block_id].copy_(piece)
            return Done()
        with torch.cuda.stream(self._stream), torch.inference_mode():
            ids = self._ids(block_ids)
            if gathers:
                self._gather(blocks, ids, first_head, pieces)
            else:
                self._scatter(pieces, ids, first_head, blocks)
        return OnDevice(self._stream, ids)

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids).pin_memory().to(self._memory.device, non_blocking=True)
