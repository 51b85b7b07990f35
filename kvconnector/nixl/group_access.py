"""Access to a peer's blocks of one group of the cache, other than the first: descriptor lists, and reads by them.

A block that both sides hold alike is one descriptor; otherwise it is one for each field, layer and rank of the peer.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from splitserve.common.errors import HandshakeError
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.agent import HERE, Agent, PreparedList
from splitserve.kvconnector.transfer.device_copies import Pending
from splitserve.kvconnector.transfer.read_plan import region_rows, rows_of_blocks
from splitserve.protocol.handover.reads import ReadPath
from splitserve.protocol.messages.handover import PeerWelcome


class GroupAccess:
    """Prepared access to one group's blocks on the ranks of a peer that this rank reads from; ``names`` are those of
    the peer's ranks. Raises :class:`HandshakeError` if the peer has not registered them."""

    def __init__(self, agent: Agent, memory: KVMemory, rank: int, welcome: PeerWelcome, group: int) -> None:
        self._agent = agent
        self._group = group
        self._welcome = welcome
        self._ours, self._theirs = memory.layout.cache.blocks(group), welcome.layout.cache.blocks(group)
        self._spans = self._ours.spans(rank, self._theirs)
        self.is_whole = self._ours.whole_source(rank, self._theirs) is not None
        self.ranks = {span.rank for span in self._spans}
        self._region = region = memory.groups[group].region()
        agent.register(region.kind, region.blocks_address, region.num_bytes, region.device_id)
        self._names: dict[int, str] = {}
        self._local: PreparedList | None = None
        self._remote: PreparedList | None = None

    def prepare(self, names: dict[int, str]) -> None:
        """Prepare the lists of whole blocks; ``names`` are those of the peer's ranks."""
        self._names = names
        if not self.is_whole:
            return
        rank = self._spans[0].rank
        region = self._welcome.ranks[rank].regions[self._group]
        try:
            self._remote = self._agent.prepare(names[rank], region.kind, region_rows(region))
        except Exception as error:
            raise HandshakeError(f"the peer's blocks aren't in the memory that it registered: {error}") from error
        self._local = self._agent.prepare(HERE, self._region.kind, region_rows(self._region))

    @property
    def path(self) -> ReadPath:
        return ReadPath.DIRECT if self.is_whole else ReadPath.LAYERS

    def read(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Iterator[Pending]:
        """Read blocks into ours; yields operations to wait for."""
        local, remote = (np.asarray(ids, dtype=np.int32) for ids in (local_blocks, remote_blocks))
        if self.is_whole:
            assert self._local is not None and self._remote is not None
            yield self._agent.read_prepared(self._local, local, self._remote, remote)
            return
        posted = []
        for span in self._spans:
            region = self._welcome.ranks[span.rank].regions[self._group]
            ours = self._ours.rows(span.local_head, span.num_heads, span.field)
            theirs = self._theirs.rows(span.source_head, span.num_heads, span.field)
            targets = rows_of_blocks(self._region, local, ours)
            pieces = rows_of_blocks(region, remote, theirs)
            posted.append(self._agent.read_rows(self._names[span.rank], region.kind, targets, pieces))
        yield from posted
