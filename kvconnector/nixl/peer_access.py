"""Access to one peer's memory through NIXL: an agent, lists of descriptors, mappings. Used by one thread only."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from splitserve.common.errors import HandshakeError
from splitserve.kvconnector.blocks.digest import DigestBlocks
from splitserve.kvconnector.cuda.memory import PeerMapping, own_machine
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.mapped.reads import MappedReader
from splitserve.kvconnector.nixl.agent import HERE, Agent, PreparedList, Transfer
from splitserve.kvconnector.nixl.gather import GatherReader
from splitserve.kvconnector.nixl.generation_reads import GenerationReads
from splitserve.kvconnector.nixl.group_access import GroupAccess
from splitserve.kvconnector.nixl.slots import HostSlotReader
from splitserve.kvconnector.transfer.device_copies import Pending
from splitserve.kvconnector.transfer.read_choice import ReadShape
from splitserve.kvconnector.transfer.read_plan import Rows, region_rows
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.kvconnector.transfer.staging import Staging
from splitserve.kvconnector.transfer.welcome_check import check_welcome
from splitserve.protocol.cache_layout import HeadSpan
from splitserve.protocol.handover.reads import ReadPath
from splitserve.protocol.memory_records import MemoryRegion, RankMemory
from splitserve.protocol.messages.handover import PeerWelcome


@dataclass(frozen=True, slots=True)
class LocalSide:
    """The local side of all reads of one rank: its memory, its number, its settings."""

    memory: KVMemory
    rank: int
    settings: ReadSettings
    digest_blocks: DigestBlocks


class PeerAccess:
    """Prepared access to the ranks of a peer that this rank reads from. Raises :class:`HandshakeError` if preparation
    fails."""

    def __init__(self, name: str, local: LocalSide, welcome: PeerWelcome) -> None:
        memory = local.memory
        check_welcome(welcome, memory.kind)
        self.ours, self.theirs = memory.layout.block_layout, welcome.layout.block_layout
        self.local = local
        self.welcome = welcome
        self.num_peer_blocks = welcome.ranks[0].region.num_blocks
        self.spans = self.ours.spans(local.rank, self.theirs)
        self.is_whole = self.ours.whole_source(local.rank, self.theirs) is not None
        self._staging: Staging | None = None
        self.agent = Agent(name)
        self._register(memory.region())
        self.generations = GenerationReads(self.agent, welcome)
        self.is_simple = memory.layout.cache.is_simple
        groups = range(1, len(memory.groups))
        self.others = [GroupAccess(self.agent, memory, local.rank, welcome, group) for group in groups]
        ranks = {0, *(span.rank for span in self.spans), *itertools.chain(*(other.ranks for other in self.others))}
        self.remote_names = {rank: self._add_remote(rank) for rank in ranks}
        for other in self.others:
            other.prepare(self.remote_names)
        self.remote_blocks = {span.rank: self._prepare_remote(span.rank) for span in self.spans}
        self.local_blocks: PreparedList | None = None  # None: heads are split differently
        self.slots: PreparedList | None = None  # of the staging area
        self.host_slots = self._make_host_slots()
        if self.is_whole:
            self.local_blocks = self.agent.prepare(HERE, memory.kind, region_rows(memory.region()))
        self.gather = self._make_gather()
        self._mappings = {span.rank: self._map(welcome.ranks[span.rank]) for span in self.spans}
        try:
            self.mapped = self._make_mapped()
            if self.mapped is not None:
                self.generations.map()
            if self.mapped is None and not self.is_whole and self.is_simple:
                self._prepare_staging()
        except Exception:
            self._unmap()
            raise

    def holds_alike(self, group: int) -> bool:
        """Return whether both sides hold whole blocks of a group alike."""
        return self.others[group - 1].is_whole if group else self.is_whole

    def only_path(self, group: int) -> ReadPath | None:
        """Return the path of a group's reads where there is no choice."""
        if self.is_simple:
            return None
        return ReadPath.DIRECT if self.holds_alike(group) else ReadPath.LAYERS

    # ---- preparing ----

    def _register(self, region: MemoryRegion) -> None:
        self.agent.register(region.kind, region.blocks_address, region.num_bytes, region.device_id)

    def _add_remote(self, rank: int) -> str:
        name = self.agent.add_remote(self.welcome.ranks[rank].metadata)
        if not name:
            raise HandshakeError("NIXL rejected the peer's metadata")
        return name

    def _prepare_remote(self, rank: int) -> PreparedList:
        region = self.welcome.ranks[rank].region
        try:
            return self.agent.prepare(self.remote_names[rank], region.kind, region_rows(region))
        except Exception as error:
            raise HandshakeError(f"the peer's blocks aren't in the memory that it registered: {error}") from error

    @property
    def _staging_half_bytes(self) -> int:
        return max(self.local.settings.staging_bytes // 2, self.theirs.block_bytes)

    def _prepare_staging(self) -> Staging:
        memory = self.local.memory
        staging = self._staging = Staging(memory, self.theirs, self._staging_half_bytes)
        self._register(staging.region())
        self.slots = self.agent.prepare(HERE, memory.kind, region_rows(staging.region()))
        return staging

    @property
    def staging(self) -> Staging:
        """The staging area, allocated at once only if a read will surely use it, otherwise at first use."""
        return self._staging or self._prepare_staging()

    def _make_host_slots(self) -> HostSlotReader | None:
        """Return None unless the peer has a host tier and its blocks are as large as the local ones."""
        host = self.welcome.ranks[0].host
        if host is None or not self.is_whole:
            return None
        try:
            lands_first = self.local.settings.lands_first
            return HostSlotReader(self.agent, self.local.memory, host, self.remote_names[0], lands_first)
        except Exception as error:
            raise HandshakeError(f"the peer's host tier isn't in the memory that it registered: {error}") from error

    @staticmethod
    def _map(rank: RankMemory) -> list[PeerMapping]:
        """Map a rank's GPU memory: its blocks and its slots."""
        sizes = [rank.region.num_bytes, 0 if rank.gather is None else rank.gather.slots.num_bytes]
        return [PeerMapping(memory, size) for memory, size in zip(rank.mappable, sizes, strict=False)]

    def _make_mapped(self) -> MappedReader | None:
        """Return None unless the blocks of each rank read from are mapped and reads through mappings are enabled."""
        settings = self.local.settings
        if not settings.maps and not (settings.path is not None and settings.path.is_through_mapping):
            return None
        blocks = {rank: mappings[0] for rank, mappings in self._mappings.items() if mappings and mappings[0].address}
        if len(blocks) < len(self._mappings):
            return None
        return MappedReader(
            self.local.memory,
            self.theirs,
            self.spans,
            blocks,
            num_peer_blocks=self.num_peer_blocks,
            num_streams=settings.copy_streams,
        )

    def _make_gather(self) -> GatherReader | None:
        """Return None unless each rank read from gathers blocks and its slots hold at least one block's piece."""
        memories = {}
        for span in self.spans:
            memory = self.welcome.ranks[span.rank].gather
            if memory is None or memory.slots.block_bytes < self.piece_bytes(span):
                return None
            memories[span.rank] = memory
        return GatherReader(self.agent, memories, self.remote_names)

    def piece_bytes(self, span: HeadSpan) -> int:
        """Return the bytes that one rank of the peer holds for this rank in a block."""
        return self.theirs.piece_bytes(span.num_heads, span.field)

    @property
    def device(self) -> torch.device:
        return self.local.memory.device

    @property
    def is_on_this_machine(self) -> bool | None:
        """True if the peer's GPU is on this machine; None for host memory, or if unknown."""
        machines = {memory.machine for span in self.spans for memory in self.welcome.ranks[span.rank].mappable}
        ours = own_machine()
        return machines == {ours} if ours and machines and "" not in machines else None

    @property
    def is_mapped(self) -> bool:
        """True if CUDA IPC maps all memory that is read from."""
        return all(mappings and mappings[0].address for mappings in self._mappings.values())

    def probe_source(self, span: int = 0) -> MemoryRegion:
        """Return memory of a span's rank that may be read at any time, for measurements."""
        return self.welcome.ranks[self.spans[span].rank].region

    def probe(self, local: Rows, remote: Rows, span: int = 0) -> Transfer:
        """Start reading ``remote`` of :meth:`probe_source` into registered local memory."""
        return self.agent.read_rows(self.remote_names[self.spans[span].rank], self.local.memory.kind, local, remote)

    @property
    def shape(self) -> ReadShape:
        return ReadShape(
            is_whole=self.is_whole,
            num_spans=len(self.spans),
            num_layers=self.ours.num_layers,
            local_block_bytes=self.ours.block_bytes,
            source_block_bytes=self.theirs.block_bytes,
            slots_per_half=self._staging_half_bytes // self.theirs.block_bytes,
            blocks_per_gather=0 if self.gather is None else self.blocks_per_gather(self.gather),
            is_mapped=self.mapped is not None,
        )

    def blocks_per_gather(self, gather: GatherReader) -> int:
        return min(gather.slot_bytes, self._staging_half_bytes) // max(self.piece_bytes(span) for span in self.spans)

    # ---- generations ----

    def read_generations(self, ids: Sequence[int], scratch_row: int) -> Iterator[Pending]:
        """Read only generations of blocks and slots, without data."""
        for check in self.make_checks(ids, scratch_row):
            yield check.post()

    def make_checks(self, ids: Sequence[int], scratch_row: int, group: int = 0) -> list[Transfer]:
        """Make reads of generations of a group's blocks and slots, not yet posted."""
        return self.generations.make(self.remote_names[0], ids, scratch_row, group)

    # ---- the end ----

    def destroy(self) -> None:
        """Stop the agent's reads: none of them writes to local memory after this returns."""
        self.agent.destroy()

    def wait(self) -> None:
        """Wait for local copies, which the agent's end does not stop, and unmap the peer's memory."""
        if self._staging is not None:
            self._staging.wait()
        if self.host_slots is not None:
            self.host_slots.wait()
        if self.mapped is not None:
            self.mapped.close()
        self._unmap()

    def _unmap(self) -> None:
        self.generations.unmap()
        for mapping in itertools.chain(*self._mappings.values()):
            mapping.close()
