"""Reads from one peer through NIXL: an agent, descriptor lists, posting, polling. Used by one thread only.

A read is a generator of things to wait for: its data, copies to their place, and last the generations. Paths of data:

    direct   whole blocks of one rank straight into our blocks; the only path where both sides split heads alike
    layers   pieces of blocks straight into place, a descriptor per layer
    staged   whole blocks of a rank into a staging area, and from there the heads that are ours to their place
    gathered what is ours of many blocks, put together by the source, into a staging area, and from there to its place
    mapped   what is ours of blocks, copied straight into place by our GPU, through a mapping of the peer's memory
    kernel   the same, but by a kernel instead of by copy engines

Slots of the peer's host tier have ids after those of its blocks. They are read whole: into our blocks where those are
in host memory as well, else into pinned memory of ours, and from there to the device.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from splitserve.errors import HandshakeError
from splitserve.handover import ReadCommand, ReadPath, ReadResult
from splitserve.kvconnector.cuda_memory import PeerMapping, own_machine
from splitserve.kvconnector.device_copies import Done, Pending
from splitserve.kvconnector.digest import DigestBlocks
from splitserve.kvconnector.layout import block_bytes
from splitserve.kvconnector.mapped_reads import MappedReader
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.nixl_agent import HERE, Agent, BlockIds, PreparedList, Transfer, TransferError
from splitserve.kvconnector.nixl_gather import GatherReader
from splitserve.kvconnector.nixl_slots import HostSlotReader
from splitserve.kvconnector.read_choice import ReadShape
from splitserve.kvconnector.read_plan import (
    HeadSpan,
    Rows,
    head_spans,
    is_whole,
    layer_rows,
    num_readable_blocks,
    region_rows,
)
from splitserve.kvconnector.read_settings import ReadSettings
from splitserve.kvconnector.staging import Staging
from splitserve.kvconnector.welcome_check import check_welcome
from splitserve.memory_records import MemoryKind, MemoryRegion, RankMemory
from splitserve.messages import PeerWelcome

logger = logging.getLogger(__name__)

_STAGING = (ReadPath.STAGED, ReadPath.GATHERED)
READS_AT_ONCE = 4  # per peer; each needs a scratch row for the generations, further ones wait
_PRACTICE_SECONDS = 0.0002  # before data is due: time enough to read generations for practice


@dataclass(frozen=True, slots=True)
class LocalSide:
    """What a worker's reads have in common: our memory, whose rank's it is, how to read."""

    memory: KVMemory
    rank: int
    settings: ReadSettings
    digest_blocks: DigestBlocks


@dataclass(slots=True, eq=False)
class Read:
    """A read under way; ``pending`` is what it waits for."""

    command: ReadCommand
    first_path: ReadPath  # as it began
    path: ReadPath
    started_at: float
    pending: Pending
    scratch_row: int
    steps: Generator[Pending, None, None] = field(init=False)

    @property
    def uses_staging(self) -> bool:
        return self.first_path in _STAGING


class PeerReader:
    """Everything for reading from one peer. Raises :class:`HandshakeError` where that can't work."""

    def __init__(self, name: str, local: LocalSide, welcome: PeerWelcome) -> None:
        memory, theirs = local.memory, welcome.layout
        check_welcome(welcome, memory.kind)
        self._local = local
        self._welcome = welcome
        self.num_peer_blocks = welcome.ranks[0].region.num_blocks
        num_readable = num_readable_blocks(welcome)
        self.spans = head_spans(memory.layout, local.rank, theirs)
        self.is_whole = is_whole(self.spans, memory.layout, theirs)
        self._scratch = np.zeros((READS_AT_ONCE, num_readable), dtype=np.uint64)
        self._generations = [row.data for row in self._scratch]
        self._free_rows = list(range(READS_AT_ONCE))
        self._staging: Staging | None = None
        self._staging_is_free = True
        self.agent = Agent(name)
        self._register(memory.region())
        self.agent.register(MemoryKind.DRAM, int(self._scratch.ctypes.data), self._scratch.nbytes)
        self._remote_names = {rank: self._add_remote(rank) for rank in {0, *(span.rank for span in self.spans)}}
        self._remote_blocks = {span.rank: self._prepare_remote(span.rank) for span in self.spans}
        self._local_blocks: PreparedList | None = None
        self._slots: PreparedList | None = None
        self._host_slots = self._make_host_slots()
        if self.is_whole:
            self._local_blocks = self.agent.prepare(HERE, memory.kind, region_rows(memory.region()))
        self.gather = self._make_gather()
        self._mappings = {span.rank: self._map(welcome.ranks[span.rank]) for span in self.spans}
        try:
            self.mapped = self._make_mapped()
            if self.mapped is None and not self.is_whole:
                self._prepare_staging()
        except Exception:
            self._unmap()
            raise
        self.active: list[Read] = []
        self.waiting: deque[tuple[ReadCommand, ReadPath]] = deque()

    # ---- preparing ----

    def _register(self, region: MemoryRegion) -> None:
        self.agent.register(region.kind, region.blocks_address, region.num_bytes, region.device_id)

    def _add_remote(self, rank: int) -> str:
        name = self.agent.add_remote(self._welcome.ranks[rank].metadata)
        if not name:
            raise HandshakeError("NIXL didn't accept the peer's metadata")
        return name

    def _prepare_remote(self, rank: int) -> PreparedList:
        region = self._welcome.ranks[rank].region
        try:
            return self.agent.prepare(self._remote_names[rank], region.kind, region_rows(region))
        except Exception as error:
            raise HandshakeError(f"the peer's blocks aren't in the memory that it registered: {error}") from error

    @property
    def _staging_half_bytes(self) -> int:
        return max(self._local.settings.staging_bytes // 2, block_bytes(self._welcome.layout))

    def _prepare_staging(self) -> Staging:
        """Memory that nothing else has then: made at once only for who will surely read by it."""
        memory, source = self._local.memory, self._welcome.layout
        staging = self._staging = Staging(memory, source, self._staging_half_bytes)
        self._register(staging.region())
        self._slots = self.agent.prepare(HERE, memory.kind, region_rows(staging.region()))
        return staging

    def _make_host_slots(self) -> HostSlotReader | None:
        """None unless the peer has a host tier, and its blocks are as large as ours."""
        host = self._welcome.ranks[0].host
        if host is None or not self.is_whole:
            return None
        try:
            lands_first = self._local.settings.lands_first
            return HostSlotReader(self.agent, self._local.memory, host, self._remote_names[0], lands_first)
        except Exception as error:
            raise HandshakeError(f"the peer's host tier isn't in the memory that it registered: {error}") from error

    @staticmethod
    def _map(rank: RankMemory) -> list[PeerMapping]:
        """What of a rank's memory is a GPU's: its blocks, its slots."""
        sizes = [rank.region.num_bytes, 0 if rank.gather is None else rank.gather.slots.num_bytes]
        return [PeerMapping(memory, size) for memory, size in zip(rank.mappable, sizes, strict=False)]

    def _make_mapped(self) -> MappedReader | None:
        """None unless the blocks of each rank that we read from are mapped, and that is wanted."""
        settings = self._local.settings
        if not settings.maps and not (settings.path is not None and settings.path.is_through_mapping):
            return None
        blocks = {rank: mappings[0] for rank, mappings in self._mappings.items() if mappings and mappings[0].address}
        if len(blocks) < len(self._mappings):
            return None
        return MappedReader(self._local.memory, self._welcome.layout, self.spans, blocks)

    def _make_gather(self) -> GatherReader | None:
        """None unless each rank that we read from puts blocks together, a piece of a block at least."""
        memories = {}
        for span in self.spans:
            memory = self._welcome.ranks[span.rank].gather
            if memory is None or memory.slots.block_bytes < self.piece_bytes(span):
                return None
            memories[span.rank] = memory
        return GatherReader(self.agent, memories, self._remote_names)

    def piece_bytes(self, span: HeadSpan) -> int:
        """Of what one rank of the peer has for us of a block."""
        layout = self._welcome.layout
        return block_bytes(layout) // layout.kv_heads_per_rank * span.num_heads

    @property
    def device(self) -> torch.device:
        return self._local.memory.device

    @property
    def is_on_this_machine(self) -> bool | None:
        """Whether the peer's GPU is; None for host memory, and where it can't be told."""
        machines = {memory.machine for span in self.spans for memory in self._welcome.ranks[span.rank].mappable}
        ours = own_machine()
        return machines == {ours} if ours and machines and "" not in machines else None

    @property
    def is_mapped(self) -> bool:
        """Whether CUDA IPC maps all that we read from."""
        return all(mappings and mappings[0].address for mappings in self._mappings.values())

    def probe_source(self, span: int = 0) -> MemoryRegion:
        """Memory of the peer's that may be read at any time, for what it takes only: of the rank that has that span."""
        return self._welcome.ranks[self.spans[span].rank].region

    def probe(self, local: Rows, remote: Rows, span: int = 0) -> Transfer:
        """Start reading ``remote`` of :meth:`probe_source` into registered memory of ours."""
        return self.agent.read_rows(self._remote_names[self.spans[span].rank], self._local.memory.kind, local, remote)

    @property
    def shape(self) -> ReadShape:
        layout = self._local.memory.layout
        return ReadShape(
            is_whole=self.is_whole,
            num_spans=len(self.spans),
            num_layers=layout.num_layers,
            local_block_bytes=block_bytes(layout),
            source_block_bytes=block_bytes(self._welcome.layout),
            slots_per_half=self._staging_half_bytes // block_bytes(self._welcome.layout),
            blocks_per_gather=0 if self.gather is None else self._blocks_per_gather(self.gather),
            is_mapped=self.mapped is not None,
        )

    def _blocks_per_gather(self, gather: GatherReader) -> int:
        return min(gather.slot_bytes, self._staging_half_bytes) // max(self.piece_bytes(span) for span in self.spans)

    # ---- reading ----

    @property
    def is_busy(self) -> bool:
        return bool(self.active or self.waiting)

    @property
    def due_at(self) -> float:
        """When to look at what is under way, by the monotonic clock; 0.0: at any time."""
        return 0.0 if self.waiting else min((read.pending.due_at for read in self.active), default=0.0)

    def read(self, command: ReadCommand, path: ReadPath) -> None:
        """To be posted by the next :meth:`poll`, or when there is room."""
        self.waiting.append((command, path))

    @property
    def _other_path(self) -> ReadPath:
        """Without the source's help."""
        return ReadPath.DIRECT if self.is_whole else ReadPath.STAGED

    def _can_not(self, path: ReadPath) -> bool:
        if path.is_through_mapping:
            return self.mapped is None
        return path is ReadPath.GATHERED and self.gather is None

    def _start_waiting(self) -> None:
        while self.waiting and self._free_rows and (self._staging_is_free or self.waiting[0][1] not in _STAGING):
            command, path = self.waiting.popleft()
            if self._can_not(path):
                path = self._other_path
            read = Read(command, path, path, time.monotonic(), Done(), self._free_rows.pop())
            read.steps = self._steps(read)
            self._staging_is_free = self._staging_is_free and path not in _STAGING
            self.active.append(read)

    def poll(self) -> list[ReadResult]:
        """Post, and make progress; returns reads that are over."""
        self._start_waiting()
        results: list[ReadResult] = []
        for read in list(self.active):
            try:
                result = self._advance(read)
            except Exception as error:
                message = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
                result = self._finish(read, message)
            if result is not None:
                self.active.remove(read)
                results.append(result)
        return results

    def destroy(self) -> list[ReadResult]:
        """Stop everything: nothing is written to local blocks after this returns."""
        over = [ReadResult(read.command.read_id, "disconnected") for read in self.active]
        over += [ReadResult(command.read_id, "disconnected") for command, _ in self.waiting]
        self.agent.destroy()
        for read in self.active:
            read.steps.close()
        self.active.clear()
        self.waiting.clear()
        if self._staging is not None:
            self._staging.wait()  # copies from it are ours, not the agent's
        if self._host_slots is not None:
            self._host_slots.wait()
        if self.mapped is not None:
            self.mapped.wait()
        self._unmap()
        return over

    def _unmap(self) -> None:
        for mapping in itertools.chain(*self._mappings.values()):
            mapping.close()

    def _advance(self, read: Read) -> ReadResult | None:
        while read.pending.is_done():
            following = next(read.steps, None)
            if following is None:
                return self._finish(read, None)
            read.pending = following
        return None

    def _finish(self, read: Read, error: str | None) -> ReadResult:
        if isinstance(read.pending, Transfer):
            read.pending.release()
        read.steps.close()
        command = read.command
        self._staging_is_free = self._staging_is_free or read.uses_staging
        generations: Sequence[int] = ()
        digests: Sequence[bytes] = ()
        if error is None:
            if self.is_whole:  # a block that is put together has other bytes than those that it's made of
                digests = self._local.digest_blocks(command.local_blocks)
            landed = self._generations[read.scratch_row]
            generations = [landed[block_id] for block_id in command.remote_blocks]
        self._free_rows.append(read.scratch_row)
        seconds = time.monotonic() - read.started_at
        return ReadResult(command.read_id, error, generations, seconds, digests, read.path)

    # ---- what a read consists of ----

    def _steps(self, read: Read) -> Generator[Pending, None, None]:
        command = read.command
        local, remote = command.local_blocks, command.remote_blocks
        if max(remote, default=0) >= self.num_peer_blocks:
            yield from self._read_slots(local, remote)
            on_device = [pair for pair in zip(local, remote, strict=True) if pair[1] < self.num_peer_blocks]
            local, remote = [pair[0] for pair in on_device], [pair[1] for pair in on_device]
        checks: list[Transfer] = []
        try:
            for pending in self._read_blocks(read, local, remote) if remote else ():
                if not checks:  # made while the data is on its way, posted when it is there
                    checks = self._make_checks(command.remote_blocks, read.scratch_row)
                yield pending
            for check in checks or self._make_checks(command.remote_blocks, read.scratch_row):
                yield check.post()
        finally:
            for check in checks:
                check.release()

    def _read_slots(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Iterator[Pending]:
        """What of them is in the peer's host tier."""
        if self._host_slots is None or self._local_blocks is None:
            raise TransferError("the peer's host tier can't be read with other numbers of ranks")
        local, remote = (np.asarray(ids, dtype=np.int32) for ids in (local_blocks, remote_blocks))
        is_slot = remote >= self.num_peer_blocks
        yield from self._host_slots.read(self._local_blocks, local[is_slot], remote[is_slot] - self.num_peer_blocks)

    def _read_blocks(self, read: Read, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Iterator[Pending]:
        """Of the peer's device."""
        if read.path.is_through_mapping:
            assert self.mapped is not None
            data = self.mapped.read(local_blocks, remote_blocks, read.path)
            if data.due_at > time.monotonic() + _PRACTICE_SECONDS:
                # Too early to count. But by now there is time, and the next time, when it counts, takes half as long.
                # It's copied while it's posted; where it isn't (over TCP), a slow source is waited for twice.
                yield from self.read_generations(remote_blocks, read.scratch_row)
            yield data
            return
        local, remote = (np.asarray(ids, dtype=np.int32) for ids in (local_blocks, remote_blocks))
        if read.path is ReadPath.GATHERED and not (yield from self._read_gathered(local_blocks, remote)):
            read.path = self._other_path
        if read.path is ReadPath.DIRECT:
            assert self._local_blocks is not None
            yield self.agent.read_prepared(self._local_blocks, local, self._remote_blocks[self.spans[0].rank], remote)
        elif read.path is ReadPath.LAYERS:
            yield from self._read_layers(local, remote)
        elif read.path is ReadPath.STAGED:
            yield from self._read_staged(local_blocks, remote)

    def _read_gathered(self, local_blocks: Sequence[int], remote: BlockIds) -> Generator[Pending, None, bool]:
        """False if the source doesn't do its part in time: then it isn't asked again. The next slot is asked for before
        the last one is read."""
        gather, staging = self.gather, self._staging or self._prepare_staging()
        assert gather is not None
        size = self._blocks_per_gather(gather)
        work = [(span, slice(low, low + size)) for span in self.spans for low in range(0, len(remote), size)]
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
                logger.warning("%s: the source doesn't put blocks together; going on without", self.agent.name)
                self.gather = None
                yield from copies
                return False
            place = staging.half(index % 2, len(remote[part]) * self.piece_bytes(span))
            yield gather.read(span.rank, wait.slot, place)
            yield gather.check(span.rank, wait.slot, tickets[index])
            gather.done(span.rank, tickets[index])
            copies[index % 2] = staging.scatter_pieces(index % 2, local_blocks[part], span)
        yield from copies
        return True

    def _read_layers(self, local: BlockIds, remote: BlockIds) -> Iterator[Pending]:
        memory, theirs = self._local.memory, self._welcome.layout
        ours = memory.region()
        posted = []
        for span in self.spans:
            region = self._welcome.ranks[span.rank].region
            places = layer_rows(memory.layout, ours, local, span.local_head, span.num_heads)
            pieces = layer_rows(theirs, region, remote, span.source_head, span.num_heads)
            posted.append(self.agent.read_rows(self._remote_names[span.rank], region.kind, places, pieces))
        yield from posted

    def _read_staged(self, local_blocks: Sequence[int], remote: BlockIds) -> Iterator[Pending]:
        """While one half's heads are copied to their place, the other half is read."""
        staging = self._staging or self._prepare_staging()
        assert self._slots is not None
        size = staging.slots_per_half
        copies: list[Pending] = [Done(), Done()]
        half = 0
        for span, first in itertools.product(self.spans, range(0, len(remote), size)):
            yield copies[half]
            ids = remote[first : first + size]
            slots = np.arange(half * size, half * size + len(ids), dtype=np.int32)
            yield self.agent.read_prepared(self._slots, slots, self._remote_blocks[span.rank], ids)
            copies[half] = staging.scatter_blocks(half, local_blocks[first : first + size], span)
            half = 1 - half
        yield from copies

    def read_generations(self, ids: Sequence[int], scratch_row: int) -> Iterator[Pending]:
        """For themselves, without data."""
        for check in self._make_checks(ids, scratch_row):
            yield check.post()

    def _make_checks(self, ids: Sequence[int], scratch_row: int) -> list[Transfer]:
        """Reads of the spans of generations that cover some of the peer's blocks, and some slots of its host tier; not
        yet posted."""
        blocks = [block_id for block_id in ids if block_id < self.num_peer_blocks]
        slots = [block_id for block_id in ids if block_id >= self.num_peer_blocks]
        checks = []
        if blocks:
            checks.append(self._make_check(blocks, scratch_row, self._welcome.generations_address))
        host = self._welcome.ranks[0].host
        if slots and host is not None:
            address_of_0 = host.generations_address - self.num_peer_blocks * 8
            checks.append(self._make_check(slots, scratch_row, address_of_0))
        return checks

    def _make_check(self, ids: Sequence[int], scratch_row: int, address_of_0: int) -> Transfer:
        first, last = min(ids), max(ids)
        num_bytes = (last - first + 1) * 8
        local = np.array([[self._scratch[scratch_row].ctypes.data + first * 8, num_bytes, 0]], dtype=np.uint64)
        remote = np.array([[address_of_0 + first * 8, num_bytes, 0]], dtype=np.uint64)
        return self.agent.make_read(self._remote_names[0], MemoryKind.DRAM, local, remote)
