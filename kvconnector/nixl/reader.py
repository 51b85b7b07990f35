"""Reads from one peer through NIXL: an agent, descriptor lists, posting, polling. Used by one thread only.

A read is a generator of pending operations to wait for: its data, copies to their location, and last the generations.
Paths of data:

    direct    whole blocks of one rank straight into local blocks; only if both sides split heads alike
    layers    pieces of blocks straight to their location, a descriptor per layer
    staged    whole blocks of a rank into a staging area, from there the needed heads to their location
    gathered  needed heads of many blocks, gathered by the source, into a staging area, from there to their location
    mapped    needed heads of blocks, copied straight to their location by the local GPU, through a mapping
    kernel    the same, by a kernel instead of copy engines

Slots of the peer's host tier have ids after those of its blocks. They are read whole: into local blocks if those are in
host memory as well, otherwise into pinned memory and from there to the device.
"""

import time
from collections import deque
from collections.abc import Generator, Sequence

from splitserve.kvconnector.mapped.reads import MappedRead
from splitserve.kvconnector.nixl.agent import Transfer
from splitserve.kvconnector.nixl.block_reads import STAGING, BlockReads, Read
from splitserve.kvconnector.nixl.peer_access import LocalSide, PeerAccess
from splitserve.kvconnector.transfer.device_copies import Done, Pending
from splitserve.kvconnector.transfer.errors import TransferError
from splitserve.protocol.handover.reads import ReadCommand, ReadPath, ReadResult
from splitserve.protocol.messages.handover import PeerWelcome

_REHEARSAL_SECONDS = 0.00004  # takes a read of generations for which nothing is in the caches


class PeerReader:
    """Reader of one peer. Raises :class:`HandshakeError` if the peer can't be read."""

    def __init__(self, name: str, local: LocalSide, welcome: PeerWelcome) -> None:
        self.access = PeerAccess(name, local, welcome)
        self._data = BlockReads(self.access)
        self._staging_is_free = True
        self.active: list[Read] = []
        self.waiting: deque[tuple[ReadCommand, ReadPath, MappedRead | None]] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self.active or self.waiting)

    @property
    def due_at(self) -> float:
        """Time, by the monotonic clock, before which no read in flight completes; 0.0: a read may complete at any
        time."""
        return 0.0 if self.waiting else min((read.pending.due_at for read in self.active), default=0.0)

    def read(self, command: ReadCommand, path: ReadPath, first: MappedRead | None = None) -> None:
        """Queue a read, to be posted by the next :meth:`poll` with enough room. ``first``: the read, if some of its
        copies are in flight already."""
        self.waiting.append((command, self.access.only_path(command.group) or path, first))

    def _can_not(self, path: ReadPath) -> bool:
        if path.is_through_mapping:
            return self.access.mapped is None
        return path is ReadPath.GATHERED and self.access.gather is None

    def _start_waiting(self) -> None:
        while (
            self.waiting
            and self.access.generations.free_rows
            and (self._staging_is_free or self.waiting[0][1] not in STAGING)
        ):
            command, path, first = self.waiting.popleft()
            if self._can_not(path):
                path = self._data.other_path
            now, scratch_row = time.monotonic(), self.access.generations.free_rows.pop()
            read = Read(command, path, path, first.started if first else now, now, Done(), scratch_row, first)
            read.steps = self._steps(read)
            self._staging_is_free = self._staging_is_free and path not in STAGING
            self.active.append(read)

    def poll(self) -> list[ReadResult]:
        """Post and advance reads; return the results of those that ended."""
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
        """Stop all reads: no local block is written after this returns."""
        over = [ReadResult(read.command.read_id, "disconnected") for read in self.active]
        over += [ReadResult(command.read_id, "disconnected") for command, *_ in self.waiting]
        self.access.destroy()
        for read in self.active:
            read.steps.close()
        self.active.clear()
        self.waiting.clear()
        self.access.wait()
        return over

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
            if self.access.holds_alike(command.group):  # a block assembled from several has other bytes than they have
                digests = self.access.local.digest_blocks(command.local_blocks, command.group)
            generations = self.access.generations.landed(command.remote_blocks, read.scratch_row, command.group)
        self.access.generations.free_rows.append(read.scratch_row)
        seconds = time.monotonic() - read.started_at
        return ReadResult(command.read_id, error, generations, seconds, digests, read.path, read.stages())

    # ---- steps of a read ----

    def _steps(self, read: Read) -> Generator[Pending, None, None]:
        command = read.command
        local, remote = command.local_blocks, command.remote_blocks
        if not command.group and max(remote, default=0) >= self.access.num_peer_blocks:
            yield from self._data.read_slots(local, remote)
            on_device = [pair for pair in zip(local, remote, strict=True) if pair[1] < self.access.num_peer_blocks]
            local, remote = [pair[0] for pair in on_device], [pair[1] for pair in on_device]
        checks: list[Transfer] = []
        try:
            for pending in self._data.read(read, local, remote) if remote else ():
                if not checks:  # created while the data is in flight, posted when it has landed
                    checks = self.access.make_checks(command.remote_blocks, read.scratch_row, command.group)
                    if read.mapped is not None and read.mapped.expected_at > time.monotonic() + _REHEARSAL_SECONDS:
                        # Too early to validate anything, but there is time now, and the read that counts then takes
                        # half as long. Posting it also completes it; over TCP, where it does not, a slow source is
                        # waited for twice.
                        yield from [check.rehearse() for check in checks]
                yield pending
            read.copied_at = time.monotonic()
            checks = checks or self.access.make_checks(command.remote_blocks, read.scratch_row, command.group)
            for check in checks:
                yield check.post()
        finally:
            for check in checks:
                check.release()
