"""Settings of a worker's reads from its peers: numbers that depend on the kind of its KV memory."""

from dataclasses import dataclass, replace

from splitserve.protocol.handover.reads import ReadPath
from splitserve.protocol.memory_records import MemoryKind

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Numbers that control a worker's reads from its peers."""

    num_threads: int  # threads that read concurrently, each with an agent of its own per peer
    split_bytes: int  # a larger read that is posted to a transport is split between the threads
    poll_seconds: float  # between polls of reads in flight
    # Between polls for peers' reads and requests; once connected, peers read without our help, except over TCP.
    serve_poll_seconds: float
    probe_bytes: int  # read when connecting, to measure the link
    min_bytes_per_second: float  # a slower link is logged as an error; 0: any speed is accepted
    staging_bytes: int  # per thread and peer, for blocks that both sides split differently; allocated only if needed
    gather_slots: int  # slots in which a rank gathers blocks for its readers
    gather_slot_bytes: int  # of each
    copy_streams: int = 2  # of copy engines' reads of heads that both sides split differently
    path: ReadPath | None = None  # for measurements: overrides the choice by cost
    maps: bool = False  # a mapping of a peer's GPU memory may be read through if that costs less
    lands_first: bool | None = None  # for tests: slots of a peer's host tier land on the host; None: only if needed

    @classmethod
    def of(cls, kind: MemoryKind, **changes: float | ReadPath | bool | None) -> "ReadSettings":
        """Return the settings for KV in this kind of memory, with ``changes``; a value of 0 changes nothing."""
        return replace(_DEFAULTS[kind], **{name: value for name, value in changes.items() if value})  # type: ignore[arg-type]


_DEFAULTS = {
    # Copies of one thread do not fill the memory bus; more than two threads do not copy faster.
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
    # UCX copies on one stream per agent: two threads fill the link, more delay each other. The slowest NVLink is
    # several times faster than copies over the host.
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
