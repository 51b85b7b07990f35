"""Reads through a mapping that the thread that commands them, the engine loop, waits for itself.

Each change of threads costs: the reading thread's core has to wake up, its caches are cold, it takes the GIL from the
threads that launch steps, and its result has to wake the loop. So the loop queues all copies itself, looks from time to
time whether they have ended, and reads the generations in place. Whatever isn't as expected is left to the reading
thread, which owns the peer's reader and can do all of it again but the copies.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from splitserve.kvconnector.mapped.reads import MappedRead
from splitserve.protocol.handover.reads import ReadCommand, ReadResult, ReadStages
from splitserve.protocol.request import Party

MOST_AWAKE_SECONDS = 0.002
"""The longest time for which a read is awaited."""
_LATE_SECONDS = 0.0005
"""Time after the expected end when a read is left to the reading thread: the link is slower than it was measured."""

Generations = Callable[[Sequence[int]], list[int]]


class _Awaited(NamedTuple):
    command: ReadCommand
    read: MappedRead
    generations: Generations
    until: float  # by the monotonic clock


class AwaitedReads:
    """The reads that the loop waits for. ``leave`` passes a read to the reading thread. Any thread may look at them: on
    ranks above 0 those do that pass events on."""

    def __init__(self, leave: Callable[[ReadCommand, MappedRead], None]) -> None:
        self._leave = leave
        self._reads: list[_Awaited] = []
        self._lock = threading.Lock()  # a read that one thread looks at is still there for others

    def add(self, command: ReadCommand, read: MappedRead, generations: Generations) -> bool:
        """Wait for a read; return False if it isn't queued as a whole, or takes too long. ``generations`` returns those
        of the peer's blocks, in place, or raises an error."""
        if not read.queued_at or read.expected_at > time.monotonic() + MOST_AWAKE_SECONDS:
            return False
        awaited = _Awaited(command, read, generations, read.expected_at + _LATE_SECONDS)
        with contextlib.suppress(Exception):  # those of the result that counts are met there
            _result(awaited)  # too early to tell anything: it brings into the caches what the end takes
        with self._lock:
            self._reads.append(awaited)
        return True

    def landed(self) -> list[ReadResult]:
        """Return the results of the reads that have ended; leave those that are late, or that fail."""
        results = []
        with self._lock:
            awaited, self._reads = self._reads, []
            for each in awaited:
                result = None
                try:
                    has_ended = each.read.has_ended()
                    if has_ended:
                        result = _result(each)
                except Exception:  # of CUDA or the table: the reading thread meets it again, and reports it
                    has_ended = True
                if result is not None:
                    results.append(result)
                elif has_ended or time.monotonic() > each.until:
                    self._leave(each.command, each.read)
                else:
                    self._reads.append(each)
        return results

    def leave(self, peer: Party | None = None) -> None:
        """Leave all reads, or those from one peer, to the reading thread."""
        with self._lock:
            awaited, self._reads = self._reads, []
            for each in awaited:
                if peer is None or each.command.peer == peer:
                    self._leave(each.command, each.read)
                else:
                    self._reads.append(each)

    def __bool__(self) -> bool:
        with self._lock:
            return bool(self._reads)


def _result(awaited: _Awaited) -> ReadResult:
    """Return the result as of now. The time from the copies' end until the loop has looked isn't the read's."""
    command, read, now = awaited.command, awaited.read, time.monotonic()
    generations = awaited.generations(command.remote_blocks)
    queued, copied = (max(0.0, at - read.started) for at in (read.queued_at, read.ended_at))
    seconds = copied + time.monotonic() - now
    return ReadResult(command.read_id, None, generations, seconds, (), read.path, ReadStages(0.0, queued, copied))
