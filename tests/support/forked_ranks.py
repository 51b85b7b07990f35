"""Ranks of a tensor-parallel worker for tests that are rank 0 themselves, forked from a server. Not a test module."""

import os
from multiprocessing.connection import Connection, wait
from typing import Any

from forked_processes import fork_context
from splitserve.worker.ranks.process import run_rank
from splitserve.worker.ranks.starts import RankEnds, StartedRank, start_rank


def start_ranks(count: int) -> list[StartedRank]:
    """Return ranks that wait for their orders."""
    return [start_rank(_ForkedRank) for _ in range(count)]


class _ForkedRank:
    """Process of a rank, a child of the fork server."""

    def __init__(self, ends: RankEnds) -> None:
        pipes = [Connection(os.dup(end)) for end in ends]
        self._process: Any = fork_context().Process(target=_be_rank, args=(pipes,))
        self._process.start()
        self.pid: int = self._process.pid
        for pipe in pipes:
            pipe.close()

    def wait(self) -> int:
        wait([self._process.sentinel])
        self._process.join()
        status: int = self._process.exitcode
        return status

    def kill(self) -> None:
        self._process.kill()


def _be_rank(pipes: list[Connection]) -> None:
    run_rank(RankEnds(*(pipe.fileno() for pipe in pipes)))
