"""Reads of a peer's blocks: commands, results, paths."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from splitserve.protocol.request import Party


class ReadCommand(msgspec.Struct, frozen=True, tag=True):
    """Copy the peer's blocks ``remote_blocks[i]`` into our ``local_blocks[i]``, then read the remote generations.

    All of them are blocks of one group of the cache.
    """

    read_id: int
    peer: Party
    local_blocks: Sequence[int]
    remote_blocks: Sequence[int]
    group: int = 0


class ReadPath(StrEnum):
    """The path of a read's data into its local blocks."""

    DIRECT = "direct"  # whole blocks, straight into ours
    LAYERS = "layers"  # pieces of blocks, a descriptor per layer
    STAGED = "staged"  # whole blocks into a staging area, then the heads of this rank into the local blocks
    GATHERED = "gathered"  # gathered by the source, in large pieces into a staging area, then into the local blocks
    MAPPED = "mapped"  # copied straight into the local blocks by our GPU, through a mapping of the peer's memory
    KERNEL = "kernel"  # as mapped, but by a kernel of ours instead of by copy engines

    @property
    def is_through_mapping(self) -> bool:
        """Return whether our GPU copies from the peer's memory, without a transport."""
        return self in (ReadPath.MAPPED, ReadPath.KERNEL)


class Readers(StrEnum):
    """Activity of peers here, for which our transport has to make progress."""

    NONE = "none"
    CONNECTING = "connecting"  # nothing that is urgent
    READING = "reading"


class ReadStages(msgspec.Struct, frozen=True):
    """Seconds from a read's start to the end of each of its stages; 0.0: unknown."""

    woken: float = 0.0  # the thread that owns the peer's reader has begun with it
    queued: float = 0.0  # all copies through a mapping are queued
    copied: float = 0.0  # the data has landed


class ReadResult(msgspec.Struct, frozen=True, tag=True):
    """The end of a read: nothing will write to its local blocks any more.

    ``generations[i]`` is the remote block's generation, read after all data had landed. ``error`` is None on success;
    after an error the local blocks' content is undefined. ``seconds`` is the read's duration, for metrics; if its end
    was noticed late, the duration that was expected. ``digests[i]`` is the digest of the bytes that landed in the local
    block, empty unless digests are verified.
    """

    read_id: int
    error: str | None
    generations: Sequence[int] = ()
    seconds: float = 0.0
    digests: Sequence[bytes] = ()
    path: ReadPath = ReadPath.DIRECT
    stages: ReadStages = ReadStages()
