"""Where whole blocks of a peer's rank land when only some of their heads are ours, and the copy to their place."""

import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from splitserve.errors import HandshakeError
from splitserve.kernels import kv_copy
from splitserve.kernels.api import ScatterKV
from splitserve.kvconnector.layout import block_bytes, block_shape
from splitserve.kvconnector.memory import TORCH_DTYPES, KVMemory
from splitserve.kvconnector.read_cost import CopyCost
from splitserve.kvconnector.read_plan import HeadSpan
from splitserve.messages import LayoutRecord, MemoryRegion


class Pending(Protocol):
    """Something under way."""

    def is_done(self) -> bool:
        """Whether it is over; raises if it failed."""


class Done:
    def is_done(self) -> bool:
        return True


class _OnDevice:
    """Work that was queued on a stream. Keeps what it reads alive."""

    def __init__(self, stream: torch.cuda.Stream, *inputs: Tensor) -> None:
        self._inputs = inputs
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


def _scatter_kernel(device: torch.device) -> ScatterKV:
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from splitserve.kernels.triton_gather import scatter_kv

            return scatter_kv
    return kv_copy.scatter_kv


class Staging:
    """Slots for blocks of ``source``'s ranks, where ``memory`` is: ``[num_slots, layer, head, 2, token, head_dim]``.
    Used in two halves, so that one is filled while the other is emptied."""

    def __init__(self, memory: KVMemory, source: LayoutRecord, num_bytes: int) -> None:
        self.slot_bytes = block_bytes(source)
        self.slots_per_half = num_bytes // self.slot_bytes // 2
        if self.slots_per_half < 1:
            raise HandshakeError(f"a staging area of {num_bytes} bytes has no room for two blocks of {self.slot_bytes}")
        self._memory = memory
        device = memory.device
        self._flat = torch.zeros(self.num_slots * self.slot_bytes, dtype=torch.uint8, device=device)
        self._slots = self._flat.view(TORCH_DTYPES[source.dtype]).view(self.num_slots, *block_shape(source))
        self._stream: torch.cuda.Stream | None = None
        self._scatter = _scatter_kernel(device)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            ids, blocks = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros_like(memory.blocks[:1])
            if blocks.shape[2] >= self._slots.shape[2]:
                self._scatter(self._slots[:1], ids, 0, blocks)  # compiled before the first request needs it
            torch.cuda.synchronize(device)  # the zeros are there before anything else lands

    @property
    def num_slots(self) -> int:
        return 2 * self.slots_per_half

    def region(self) -> MemoryRegion:
        """Where the slots are, as blocks."""
        ours = self._memory.region()
        return MemoryRegion(ours.kind, ours.device_id, self._flat.data_ptr(), self.num_slots, self.slot_bytes)

    def measure(self) -> CopyCost:
        """By copies from one half to the other: of one slot, and of all. Nothing may be under way."""
        seconds = [min(self._time_copy(count) for _ in range(3)) for count in (1, self.slots_per_half)]
        more_bytes = (self.slots_per_half - 1) * self.slot_bytes
        if not more_bytes:
            return CopyCost(0.0, self.slot_bytes / seconds[0])
        rate = more_bytes / max(seconds[1] - seconds[0], 1e-9)
        return CopyCost(max(seconds[0] - self.slot_bytes / rate, 0.0), rate)

    def _time_copy(self, num_slots: int) -> float:
        started = time.perf_counter()
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            self._slots[self.slots_per_half :][:num_slots].copy_(self._slots[:num_slots])
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Until all copies are over."""
        if self._stream is not None:
            self._stream.synchronize()

    def scatter(self, half: int, local_blocks: Sequence[int], span: HeadSpan) -> Pending:
        """Copy ``span``'s heads of the first slots of a half to their place in ``local_blocks``."""
        first = half * self.slots_per_half
        end = span.source_head + span.num_heads
        slots = self._slots[first : first + len(local_blocks), :, span.source_head : end]
        places = self._memory.blocks[:, :, span.local_head : span.local_head + span.num_heads]
        if self._stream is None:
            for slot, block_id in zip(slots, local_blocks, strict=True):
                places[block_id].copy_(slot)
            return Done()
        with torch.cuda.stream(self._stream), torch.inference_mode():
            ids = torch.tensor(local_blocks).pin_memory().to(places.device, non_blocking=True)
            if slots.is_contiguous():
                self._scatter(slots, ids, span.local_head, self._memory.blocks)
            else:  # some of the slots' heads only
                places.index_copy_(0, ids, slots)
        return _OnDevice(self._stream, ids)
