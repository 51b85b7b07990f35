"""Starts of rank processes: on CPU forked from the worker before its first thread, else as programs.

A forked rank has all imports already. It is forked before its order is known, and waits for it; so a worker's process
forks as many ranks as its config asks for at once (:func:`fork_ranks`), and takes them later.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import IO, NoReturn, Protocol

from splitserve.protocol.config import WorkerConfig
from splitserve.worker.machine.threads import give_way_on_cpu
from splitserve.worker.ranks import process as rank_process
from splitserve.worker.ranks.process import RankEnds

_STEPS_PIPE_BYTES = 1 << 20


class Process(Protocol):
    """Process of a rank. One thread waits for its end; any may kill it."""

    @property
    def pid(self) -> int: ...
    def wait(self) -> int: ...
    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StartedRank:
    """Rank that waits for its order, and the worker's ends of the pipes to it. ``life_line`` carries the order."""

    process: Process
    steps: Connection
    link: Connection
    reports: IO[bytes]
    life_line: IO[bytes]


class ForkedRank:
    """Child of this process by a fork."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()  # around the use of the id, which another process may get after the end
        self._has_ended = False

    def wait(self) -> int:
        """Wait for the end; returns the exit status, as :class:`subprocess.Popen` does. Call it once."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._has_ended = True
            _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        with self._lock:
            if not self._has_ended:
                os.kill(self.pid, signal.SIGKILL)


def start_rank(start: Callable[[RankEnds], Process]) -> StartedRank:
    """Make a rank's pipes, then its process with ``start``. Raises :class:`OSError`."""
    steps_reader, steps = Pipe(duplex=False)
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # so that no step waits for a rank to read the last one
        with contextlib.suppress(OSError):  # above what the system allows
            fcntl.fcntl(steps.fileno(), fcntl.F_SETPIPE_SZ, _STEPS_PIPE_BYTES)
    link, their_link = Pipe(duplex=True)
    reports_fd, their_reports_fd = os.pipe()
    their_life_line_fd, life_line_fd = os.pipe()
    ours = steps, link, os.fdopen(reports_fd, "rb"), os.fdopen(life_line_fd, "wb")
    try:
        ends = RankEnds(their_life_line_fd, steps_reader.fileno(), their_reports_fd, their_link.fileno())
        return StartedRank(start(ends), *ours)
    except OSError:
        for our_end in ours:
            our_end.close()
        raise
    finally:
        steps_reader.close()
        their_link.close()
        os.close(their_reports_fd)
        os.close(their_life_line_fd)


def start_program(ends: RankEnds, environment: Mapping[str, str]) -> Process:
    """Start a rank that imports for itself."""
    return subprocess.Popen(
        [sys.executable, "-m", rank_process.__name__, str(ends.steps), str(ends.reports), str(ends.link)],
        stdin=ends.life_line,
        pass_fds=(ends.steps, ends.reports, ends.link),
        env=environment,
    )


def fork_rank(ends: RankEnds) -> Process:
    """Fork a rank from this process, which must have no other thread."""
    pid = os.fork()
    if pid == 0:
        _be_rank(ends)
    return ForkedRank(pid)


def fork_ranks(config: WorkerConfig) -> None:
    """Fork the other ranks of a worker on CPU, before this process, its rank 0, starts a thread or an operation. Those
    that can't be forked are started as programs later."""
    if threading.active_count() > 1:  # a fork would lose them, and keep their locks
        return
    with contextlib.suppress(OSError):
        for _ in range(config.engine.tensor_parallel_size - 1):
            _waiting.append(start_rank(fork_rank))


def forked_ranks() -> list[StartedRank]:
    """Return the ranks that :func:`fork_ranks` has forked, to their first user."""
    taken = list(_waiting)
    _waiting.clear()
    return taken


_waiting: list[StartedRank] = []


def _be_rank(ends: RankEnds) -> NoReturn:
    """Be a rank, with no descriptor of the worker's: their ends must mean the end of the worker."""
    try:
        kept = sorted(ends)
        for before, after in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(before + 1, after)
        os.dup2(ends.life_line, 0)
        os.close(ends.life_line)
        give_way_on_cpu()
        rank_process.run_rank(ends._replace(life_line=0))
    except BaseException:
        traceback.print_exc()
    finally:  # the worker's own frames, further up the stack, must not continue here
        os._exit(1)
