"""Reads of generations: of each group of the peer's blocks, and of its host tier's slots, whose ids follow the ids of
the first group's blocks. Those of the first group are read in place where they can be mapped."""

import logging
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from splitserve.kvconnector.layout.shared_table import PeerTable, open_table
from splitserve.kvconnector.nixl.agent import Agent, Transfer
from splitserve.kvconnector.transfer.errors import TransferError
from splitserve.kvconnector.transfer.read_plan import num_readable_blocks
from splitserve.protocol.memory_records import MemoryKind
from splitserve.protocol.messages.handover import PeerWelcome

logger = logging.getLogger(__name__)

READS_AT_ONCE = 4  # per peer; each needs a scratch row for generations, further reads wait


class GenerationReads:
    """Scratch rows in which generations of one peer land, and the reads that fill them."""

    def __init__(self, agent: Agent, welcome: PeerWelcome) -> None:
        self._agent = agent
        self._welcome = welcome
        self._num_peer_blocks = [region.num_blocks for region in welcome.ranks[0].regions]
        numbers = num_readable_blocks(welcome)
        self._offsets = list(accumulate(numbers, initial=0))  # of each group's ids in a row
        self.scratch = np.zeros((READS_AT_ONCE, sum(numbers)), dtype=np.uint64)
        self.free_rows = list(range(READS_AT_ONCE))
        self._rows = [row.data for row in self.scratch]
        self._table: PeerTable | None = None
        agent.register(MemoryKind.DRAM, int(self.scratch.ctypes.data), self.scratch.nbytes)

    def map(self) -> None:
        """Read the generations of the first group's blocks in place from now on, if they can be mapped."""
        shared = self._welcome.ranks[0].generations
        if shared is not None:
            self._table = open_table(shared, self._num_peer_blocks[0])
        way = "by NIXL" if self._table is None else "in place"
        logger.info("generations of a peer whose GPU memory is mapped are read %s", way)

    def unmap(self) -> None:
        if self._table is not None:
            self._table.close()
            self._table = None

    @property
    def are_in_place(self) -> bool:
        """Return whether those of the first group's blocks are mapped."""
        return self._table is not None

    def in_place(self, ids: Sequence[int]) -> list[int]:
        """Return the generations of blocks of the first group as they are now; any thread may ask.

        Raises :class:`TransferError` if the peer has ended or the table isn't mapped, and ValueError if the owner of
        these reads unmaps it meanwhile."""
        if (table := self._table) is None:
            raise TransferError("the peer's table isn't mapped")
        found = list(map(table.numbers.__getitem__, ids))  # the quickest way where the caches are cold
        if not table.is_current:
            raise TransferError("the peer's process has ended")
        return found

    def landed(self, ids: Sequence[int], scratch_row: int, group: int = 0) -> list[int]:
        """Return the generations: those that are mapped as they are now, others as last read into a row.

        Raises :class:`TransferError` if the peer has ended, so that the mapped table is no longer updated."""
        row, offset, table = self._rows[scratch_row], self._offsets[group], self._table
        if group or table is None:
            return [row[offset + block_id] for block_id in ids]
        numbers, num_blocks = table.numbers, self._num_peer_blocks[0]
        if max(ids, default=0) < num_blocks:
            return self.in_place(ids)
        found = [numbers[block_id] if block_id < num_blocks else row[block_id] for block_id in ids]
        if not table.is_current:
            raise TransferError("the peer's process has ended")
        return found

    def make(self, remote_name: str, ids: Sequence[int], scratch_row: int, group: int = 0) -> list[Transfer]:
        """Make reads of the spans of a group's generations that cover some blocks and slots, if they aren't mapped;
        they are not yet posted."""
        num_blocks, address = self._num_peer_blocks[group], self._welcome.generations_addresses[group]
        blocks = [block_id for block_id in ids if block_id < num_blocks]
        slots = [block_id for block_id in ids if block_id >= num_blocks]
        checks = []
        if blocks and (group or self._table is None):
            checks.append(self._make_one(remote_name, blocks, scratch_row, address, self._offsets[group]))
        host = self._welcome.ranks[0].host
        if slots and host is not None:
            address_of_0 = host.generations_address - num_blocks * 8
            checks.append(self._make_one(remote_name, slots, scratch_row, address_of_0, 0))
        return checks

    def _make_one(
        self, remote_name: str, ids: Sequence[int], scratch_row: int, address_of_0: int, offset: int
    ) -> Transfer:
        first, last = min(ids), max(ids)
        num_bytes = (last - first + 1) * 8
        target = self.scratch[scratch_row].ctypes.data + (offset + first) * 8
        local = np.array([[target, num_bytes, 0]], dtype=np.uint64)
        remote = np.array([[address_of_0 + first * 8, num_bytes, 0]], dtype=np.uint64)
        return self._agent.make_read(remote_name, MemoryKind.DRAM, local, remote)
