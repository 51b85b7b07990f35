"""Gathering of blocks at their source: a reader requests some heads of some blocks, and reads them in one large piece.

A block is one descriptor, or many if the two sides split the heads differently, and each descriptor costs time. So the
source can copy the requested heads into a *slot* of its own, which the reader fetches in one piece. As everywhere, no
worker writes into another worker's memory:

    reader                                source
    GatherRequest(ticket, blocks) ----->  takes a slot without a ticket; starts the copy
    (reads the tickets until its own is there)    sets the slot's ticket, when the copy has completed
    (reads the slot, then the tickets)
    GatherDone(ticket) ---------------->  frees the slot, removes its ticket

A ticket identifies one content of a slot, as a generation does of a block: if it is still there after the slot was
read, the reader has read the requested content. It is removed before anything else is written there, whatever happens
to leases and messages. As on every path, the blocks' own generations, read last, prove that the blocks held the offered
content.
"""

import logging
import math
import time
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from splitserve.kvconnector.layout.memory import KVMemory, anonymous_memory
from splitserve.kvconnector.transfer.device_copies import DeviceCopies, Pending
from splitserve.protocol.memory_records import GatherMemory, MemoryRegion

logger = logging.getLogger(__name__)

LEASE_SECONDS = 5.0  # of a slot for which no Done arrives
WANTED_SECONDS = 0.02  # after a request more requests are likely
MAX_WAITING = 256
FREE = 0  # ticket of a free slot


class GatherRequest(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    ticket: int
    block_ids: list[int]
    first_head: int
    num_heads: int


class GatherDone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    ticket: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GatherRequest | GatherDone)


def encode(message: GatherRequest | GatherDone) -> bytes:
    return _encoder.encode(message)


@dataclass(slots=True)
class _Slot:
    ticket: int = FREE
    copy: Pending | None = None  # in flight
    expires_at: float = 0.0


class GatherSource:
    """The slots of one rank, and the copies into them. Used by the thread that owns the serving agent.

    ``num_slots`` of ``slot_bytes`` each, on the device of the blocks.
    """

    def __init__(self, memory: KVMemory, num_slots: int, slot_bytes: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._layout = memory.layout.block_layout
        self._flat = torch.zeros(num_slots * slot_bytes, dtype=torch.uint8, device=memory.device)
        self._tickets: npt.NDArray[np.uint64] = np.frombuffer(
            anonymous_memory(num_slots * 8), dtype=np.uint64, count=num_slots
        )
        self._slots = [_Slot() for _ in range(num_slots)]
        self._waiting: deque[GatherRequest] = deque(maxlen=MAX_WAITING)
        self._copies = DeviceCopies(memory)
        self._heard_at = -math.inf
        self.num_refused = 0
        if memory.device.type == "cuda":
            torch.cuda.synchronize(memory.device)  # the zeros must be written before any slot is

    @property
    def memory(self) -> torch.Tensor:
        """Memory of the slots, uint8 [N]."""
        return self._flat

    def region(self) -> GatherMemory:
        """Return the location of the slots, for readers."""
        ours = self._memory.region()
        slots = MemoryRegion(ours.kind, ours.device_id, self._flat.data_ptr(), len(self._slots), self._slot_bytes)
        return GatherMemory(slots, int(self._tickets.ctypes.data))

    @property
    def is_wanted(self) -> bool:
        """True if readers sent requests just now: they wait for copies, and for the response to the next request."""
        return time.monotonic() < self._heard_at + WANTED_SECONDS

    def prepare(self) -> None:
        """Compile the kernels before the first request. Called on the thread that uses them."""
        self._copies.compile(self._layout.heads_per_rank())

    def hear(self, message: bytes) -> None:
        """Handle a reader's message. An invalid one is counted and dropped: its sender waits in vain and reads by
        another path."""
        self._heard_at = time.monotonic()
        try:
            heard = _decoder.decode(message)
        except msgspec.DecodeError:
            self.num_refused += 1
            return
        if isinstance(heard, GatherDone):
            for slot in self._slots:
                if slot.ticket == heard.ticket and slot.copy is None:
                    slot.expires_at = 0.0
        elif self._is_possible(heard):
            self._waiting.append(heard)
        else:
            self.num_refused += 1

    def poll(self) -> None:
        """Publish the tickets of completed copies, free slots that are done or expired, start waiting requests."""
        now = time.monotonic()
        for index, slot in enumerate(self._slots):
            if slot.copy is not None and slot.copy.is_done():
                slot.copy = None
                self._tickets[index] = slot.ticket
            if slot.copy is None and slot.ticket != FREE and now >= slot.expires_at:
                slot.ticket = FREE
                self._tickets[index] = FREE
        while self._waiting and (free := self._free_slot()) is not None:
            self._start(self._waiting.popleft(), free, now)

    def wait(self) -> None:
        """Wait until no copy is in flight."""
        self._copies.wait()

    def _is_possible(self, request: GatherRequest) -> bool:
        num_bytes = len(request.block_ids) * self._layout.piece_bytes(request.num_heads)
        return (
            0 < request.ticket < 2**64
            and 0 < num_bytes <= self._slot_bytes
            and 0 <= request.first_head < request.first_head + request.num_heads <= self._layout.heads_per_rank()
            and all(0 <= block_id < self._memory.num_blocks for block_id in request.block_ids)
        )

    def _free_slot(self) -> int | None:
        return next((index for index, slot in enumerate(self._slots) if slot.ticket == FREE), None)

    def _start(self, request: GatherRequest, index: int, now: float) -> None:
        """Start a copy into a slot. The slot's ticket was removed when it was freed: no reader mistakes the new bytes
        for other content."""
        assert self._tickets[index] == FREE
        slot = self._slots[index]
        slot.ticket, slot.expires_at = request.ticket, now + LEASE_SECONDS
        flat = self._flat[index * self._slot_bytes :][: self._slot_bytes]
        slot.copy = self._copies.gather(request.block_ids, request.first_head, request.num_heads, flat)


class NoGathers:
    """The source of a cache whose blocks aren't gathered: it has no slots, and drops what it is sent."""

    is_wanted = False

    def prepare(self) -> None:
        """Do nothing."""

    def hear(self, message: bytes) -> None:
        """Drop a message."""

    def poll(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Return at once."""
