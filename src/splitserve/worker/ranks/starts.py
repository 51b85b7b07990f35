"""Starts of rank processes: as programs, or on CPU by :mod:`.forks`.

A rank is started before its order is known, and waits for it: a program imports meanwhile. So a worker's process starts
as many ranks as its config asks for at once (:func:`start_programs`), and takes them later. Importing this module is
quick.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import IO, NamedTuple, Protocol

from splitserve.common.cores import usable_cpus
from splitserve.protocol.config import EngineConfig

_MAIN = "splitserve.worker.ranks.process"
_STEPS_PIPE_BYTES = 1 << 20


class RankEnds(NamedTuple):
    """Descriptors of a rank's ends of its pipes. ``life_line``: standard input of a program."""

    life_line: int
    steps: int
    reports: int
    link: int


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


def start_program(ends: RankEnds, threads: int) -> Process:
    """Start a rank that imports for itself, for ``threads`` threads."""
    return subprocess.Popen(
        [sys.executable, "-m", _MAIN, str(ends.steps), str(ends.reports), str(ends.link)],
        stdin=ends.life_line,
        pass_fds=(ends.steps, ends.reports, ends.link),
        env={**os.environ, **thread_variables(threads)},
    )


def thread_variables(threads: int) -> dict[str, str]:
    """Return the variables of a rank's environment that count its threads."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


def threads_per_rank(engine: EngineConfig) -> int:
    """Return the threads of each rank: its share of the worker's, or of the cores that it may use."""
    return max(1, (engine.threads or len(usable_cpus())) // engine.tensor_parallel_size)


def start_programs(engine: EngineConfig) -> None:
    """Start the other ranks of a worker as programs. Those that can't be started now are started later."""
    start_early(engine, lambda ends: start_program(ends, threads_per_rank(engine)))


def start_early(engine: EngineConfig, start: Callable[[RankEnds], Process]) -> None:
    """Start the other ranks of a worker with ``start``, for :func:`waiting_ranks`."""
    with contextlib.suppress(OSError):
        for _ in range(engine.tensor_parallel_size - 1):
            _waiting.append(start_rank(start))


def waiting_ranks() -> list[StartedRank]:
    """Return the ranks that were started early, to their first user."""
    taken = list(_waiting)
    _waiting.clear()
    return taken


_waiting: list[StartedRank] = []
