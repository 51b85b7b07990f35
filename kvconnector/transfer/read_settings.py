"""How a worker reads from its peers: numbers that depend on where its KV is."""

from dataclasses import dataclass, replace

from splitserve.protocol.handover.reads import ReadPath
from splitserve.protocol.memory_records import MemoryKind

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """``num_threads`` read at once, each with an agent of its own per peer, and share a read of more than
    ``split_bytes`` that is posted to a transport. ``poll_seconds`` is the time between looks at what is under way,
    ``serve_poll_seconds`` at what peers may read or ask for: once connected, they read without our help, unless it goes
    by TCP.

    ``probe_bytes`` are read when connecting, to learn the link's speed, which is a problem to be shouted about below
    ``min_bytes_per_second`` (0: any speed is fine). ``staging_bytes`` per thread and peer are there for blocks that
    have to be taken apart, if any have. ``gather_slots`` of ``gather_slot_bytes`` are where a rank puts blocks together
    for its readers.
    """

    num_threads: int
    split_bytes: int
    poll_seconds: float
    serve_poll_seconds: float
    probe_bytes: int
    min_bytes_per_second: float
    staging_bytes: int
    gather_slots: int
    gather_slot_bytes: int
    path: ReadPath | None = None  # for measuring: not by cost
    maps: bool = False  # whether a mapping of a peer's GPU memory may be read through, where that costs less
    lands_first: bool | None = None  # for tests: what is in a peer's host tier, in memory beside ours; None: if it must

    @classmethod
    def of(cls, kind: MemoryKind, **changes: float | ReadPath | bool | None) -> "ReadSettings":
        """Those for KV in this kind of memory, with ``changes``; one that is 0 is no change."""
        return replace(_DEFAULTS[kind], **{name: value for name, value in changes.items() if value})  # type: ignore[arg-type]


_DEFAULTS = {
    # One thread's copies don't fill the memory bus; more than two don't add to it.
    MemoryKind.DRAM: ReadSettings(
        num_threads=2,
        split_bytes=4 * MIB,
        poll_seconds=0.0003,
        serve_poll_seconds=0.0003,
        probe_bytes=2 * MIB,
        min_bytes_per_second=0.0,
        staging_bytes=4 * MIB,
        gather_slots=4,
        gather_slot_bytes=2 * MIB,
    ),
    # UCX copies on one stream per agent: two threads fill the link, more get into each other's way. The slowest NVLink
    # is several times faster than copies over the host.
    MemoryKind.VRAM: ReadSettings(
        num_threads=2,
        split_bytes=16 * MIB,
        poll_seconds=0.00001,
        serve_poll_seconds=0.0005,
        probe_bytes=64 * MIB,
        min_bytes_per_second=15e9,
        staging_bytes=256 * MIB,
        gather_slots=4,
        gather_slot_bytes=128 * MIB,
    ),
}
