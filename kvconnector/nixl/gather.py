"""The reader's side of :mod:`splitserve.kvconnector.transfer.gather`: requests, waiting for tickets, reading slots."""

import secrets
import time
from collections.abc import Mapping, Sequence

import numpy as np

from splitserve.kvconnector.nixl.agent import Agent, Transfer
from splitserve.kvconnector.transfer.errors import TransferError
from splitserve.kvconnector.transfer.gather import GatherDone, GatherRequest, encode
from splitserve.kvconnector.transfer.read_plan import Rows, region_rows
from splitserve.protocol.memory_records import GatherMemory, MemoryKind, MemoryRegion

WAIT_SECONDS = 0.25  # then the data is read by another path


class GatherReader:
    """Reader of one peer's slots. ``memories``: by the peer's ranks; ``names``: of their agents. At most one
    :class:`TicketWait` and one :class:`TicketCheck` may be active at a time."""

    def __init__(self, agent: Agent, memories: Mapping[int, GatherMemory], names: Mapping[int, str]) -> None:
        self._agent = agent
        self._memories = memories
        self._names = names
        self._next_ticket = secrets.randbits(62) | 1  # random, to differ from other readers' tickets
        self.slot_bytes = min(memory.slots.block_bytes for memory in memories.values())
        most_slots = max(memory.slots.num_blocks for memory in memories.values())
        self.seen = np.zeros((2, most_slots), dtype=np.uint64)  # tickets as last read by the wait, by the check
        agent.register(MemoryKind.DRAM, int(self.seen.ctypes.data), self.seen.nbytes)

    def request(self, rank: int, block_ids: Sequence[int], first_head: int, num_heads: int) -> int:
        """Request blocks; return the ticket to wait for."""
        self._next_ticket += 1
        request = GatherRequest(self._next_ticket, list(block_ids), first_head, num_heads)
        self._agent.tell(self._names[rank], encode(request))
        return self._next_ticket

    def wait(self, rank: int, ticket: int) -> "TicketWait":
        return TicketWait(self, rank, ticket)

    def read(self, rank: int, slot: int, target: MemoryRegion) -> Transfer:
        """Start reading the first bytes of a slot into ``target``, one piece."""
        slots = self._memories[rank].slots
        address = slots.blocks_address + slot * slots.block_bytes
        source = MemoryRegion(slots.kind, slots.device_id, address, 1, target.block_bytes)
        return self._agent.read_rows(self._names[rank], slots.kind, region_rows(target), region_rows(source))

    def check(self, rank: int, slot: int, ticket: int) -> "TicketCheck":
        return TicketCheck(self, rank, slot, ticket)

    def done(self, rank: int, ticket: int) -> None:
        """Release the slot."""
        self._agent.tell(self._names[rank], encode(GatherDone(ticket)))

    def read_tickets(self, rank: int, row: int) -> Transfer:
        memory, num_bytes = self._memories[rank], self._memories[rank].slots.num_blocks * 8
        target: Rows = np.array([[self.seen[row].ctypes.data, num_bytes, 0]], dtype=np.uint64)
        source: Rows = np.array([[memory.tickets_address, num_bytes, 0]], dtype=np.uint64)
        return self._agent.read_rows(self._names[rank], MemoryKind.DRAM, target, source)


class TicketWait:
    """Wait for a ticket; it ends when the ticket is found, in ``slot``, or when it takes too long: then ``slot`` is
    None."""

    due_at = 0.0

    def __init__(self, reader: GatherReader, rank: int, ticket: int) -> None:
        self._reader = reader
        self._rank = rank
        self.ticket = ticket
        self._transfer: Transfer | None = None
        self._give_up_at = time.monotonic() + WAIT_SECONDS
        self.slot: int | None = None

    def is_done(self) -> bool:
        if self._transfer is None:
            self._transfer = self._reader.read_tickets(self._rank, 0)
        if not self._transfer.is_done():
            return False
        self._transfer = None
        found = np.flatnonzero(self._reader.seen[0] == np.uint64(self.ticket))
        if len(found):
            self.slot = int(found[0])
        return self.slot is not None or time.monotonic() >= self._give_up_at


class TicketCheck:
    """Check, after a slot was read, that it still holds the requested content."""

    due_at = 0.0

    def __init__(self, reader: GatherReader, rank: int, slot: int, ticket: int) -> None:
        self._reader = reader
        self._slot = slot
        self._ticket = ticket
        self._transfer = reader.read_tickets(rank, 1)

    def is_done(self) -> bool:
        if not self._transfer.is_done():
            return False
        if int(self._reader.seen[1][self._slot]) != self._ticket:
            raise TransferError("the source reused the slot while it was read")
        return True
