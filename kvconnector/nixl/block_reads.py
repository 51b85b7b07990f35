"""Data of one read, block by block, on each of the paths that :mod:`.reader` names."""

import itertools
import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from splitserve.kvconnector.mapped.reads import MappedRead
from splitserve.kvconnector.nixl.agent import BlockIds
from splitserve.kvconnector.nixl.peer_access import PeerAccess
from splitserve.kvconnector.transfer.device_copies import Done, Pending
from splitserve.kvconnector.transfer.errors import TransferError
from splitserve.kvconnector.transfer.read_plan import rows_of_blocks
from splitserve.protocol.handover.reads import ReadCommand, ReadPath, ReadStages

logger = logging.getLogger(__name__)

STAGING = (ReadPath.STAGED, ReadPath.GATHERED)


@dataclass(slots=True, eq=False)
class Read:
    """A read in flight; ``pending`` is what it waits for."""

    command: ReadCommand
    first_path: ReadPath  # the path at the start
    path: ReadPath
    started_at: float
    woken_at: float
    pending: Pending
    scratch_row: int
    mapped: MappedRead | None = None  # through a mapping; its first copies may have been in flight before
    copied_at: float = 0.0  # the data has landed
    steps: Generator[Pending, None, None] = field(init=False)

    @property
    def uses_staging(self) -> bool:
        return self.first_path in STAGING

    def stages(self) -> ReadStages:
        """Return the stages so far."""
        queued_at = 0.0 if self.mapped is None else self.mapped.queued_at
        woken, queued, copied = (max(0.0, at - self.started_at) for at in (self.woken_at, queued_at, self.copied_at))
        return ReadStages(woken, queued, copied)


class BlockReads:
    """Reads of blocks from one peer: generators of pending operations to wait for."""

    def __init__(self, access: PeerAccess) -> None:
        self._access = access

    @property
    def other_path(self) -> ReadPath:
        """The path that requires nothing from the source."""
        return ReadPath.DIRECT if self._access.is_whole else ReadPath.STAGED

    def read_slots(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Iterator[Pending]:
        """Read those of the blocks that are in the peer's host tier."""
        if self._access.host_slots is None or self._access.local_blocks is None:
            raise TransferError("the peer's host tier can be read only with the same number of ranks on both sides")
        local, remote = (np.asarray(ids, dtype=np.int32) for ids in (local_blocks, remote_blocks))
        is_slot = remote >= self._access.num_peer_blocks
        yield from self._access.host_slots.read(
            self._access.local_blocks, local[is_slot], remote[is_slot] - self._access.num_peer_blocks
        )

    def read(self, read: Read, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Iterator[Pending]:
        """Read blocks of the peer's device."""
        if read.command.group:
            yield from self._access.others[read.command.group - 1].read(local_blocks, remote_blocks)
            return
        if read.path.is_through_mapping:
            assert self._access.mapped is not None
            read.mapped = self._access.mapped.read(local_blocks, remote_blocks, read.path, read.mapped)
            yield read.mapped
            return
        local, remote = (np.asarray(ids, dtype=np.int32) for ids in (local_blocks, remote_blocks))
        if read.path is ReadPath.GATHERED and not (yield from self._read_gathered(local_blocks, remote)):
            read.path = self.other_path
        if read.path is ReadPath.DIRECT:
            assert self._access.local_blocks is not None
            yield self._access.agent.read_prepared(
                self._access.local_blocks, local, self._access.remote_blocks[self._access.spans[0].rank], remote
            )
        elif read.path is ReadPath.LAYERS:
            yield from self._read_layers(local, remote)
        elif read.path is ReadPath.STAGED:
            yield from self._read_staged(local_blocks, remote)

    def _read_gathered(self, local_blocks: Sequence[int], remote: BlockIds) -> Generator[Pending, None, bool]:
        """Read through the source's slots; return False if the source doesn't fill them in time, and never ask it
        again. Each slot is requested before the slot preceding it is read."""
        gather, staging = self._access.gather, self._access.staging
        assert gather is not None
        size = self._access.blocks_per_gather(gather)
        work = [(span, slice(low, low + size)) for span in self._access.spans for low in range(0, len(remote), size)]
        tickets: list[int] = []
        copies: list[Pending] = [Done(), Done()]
        for index, (span, part) in enumerate(work):
            for wanted, blocks in work[len(tickets) : index + 2]:
                tickets.append(
                    gather.request(wanted.rank, remote[blocks].tolist(), wanted.source_head, wanted.num_heads)
                )
            wait = gather.wait(span.rank, tickets[index])
            yield wait
            yield copies[index % 2]
            if wait.slot is None:
                logger.warning(
                    "%s: the source did not gather blocks in time; continuing without gathering",
                    self._access.agent.name,
                )
                self._access.gather = None
                yield from copies
                return False
            target = staging.half(index % 2, len(remote[part]) * self._access.piece_bytes(span))
            yield gather.read(span.rank, wait.slot, target)
            yield gather.check(span.rank, wait.slot, tickets[index])
            gather.done(span.rank, tickets[index])
            copies[index % 2] = staging.scatter_pieces(index % 2, local_blocks[part], span)
        yield from copies
        return True

    def _read_layers(self, local: BlockIds, remote: BlockIds) -> Iterator[Pending]:
        ours, theirs = self._access.ours, self._access.theirs
        local_region = self._access.local.memory.region()
        posted = []
        for span in self._access.spans:
            region = self._access.welcome.ranks[span.rank].region
            targets = rows_of_blocks(local_region, local, ours.rows(span.local_head, span.num_heads, span.field))
            pieces = rows_of_blocks(region, remote, theirs.rows(span.source_head, span.num_heads, span.field))
            posted.append(
                self._access.agent.read_rows(self._access.remote_names[span.rank], region.kind, targets, pieces)
            )
        yield from posted

    def _read_staged(self, local_blocks: Sequence[int], remote: BlockIds) -> Iterator[Pending]:
        """Copy one half's heads to their location while the other half is read."""
        staging = self._access.staging
        assert self._access.slots is not None
        size = staging.slots_per_half
        copies: list[Pending] = [Done(), Done()]
        half = 0
        for span, first in itertools.product(self._access.spans, range(0, len(remote), size)):
            yield copies[half]
            ids = remote[first : first + size]
            slots = np.arange(half * size, half * size + len(ids), dtype=np.int32)
            yield self._access.agent.read_prepared(
                self._access.slots, slots, self._access.remote_blocks[span.rank], ids
            )
            copies[half] = staging.scatter_blocks(half, local_blocks[first : first + size], span)
            half = 1 - half
        yield from copies
