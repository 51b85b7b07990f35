"""Ranks on CPU, forked from their worker before its first thread: they have all imports already."""

import os
import signal
import threading
import traceback
from typing import NoReturn

from splitserve.protocol.config import WorkerConfig
from splitserve.worker.machine.threads import give_way_on_cpu
from splitserve.worker.ranks.process import run_rank
from splitserve.worker.ranks.starts import Process, RankEnds, start_early


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


def fork_rank(ends: RankEnds) -> Process:
    """Fork a rank from this process, which must have no other thread."""
    pid = os.fork()
    if pid == 0:
        _be_rank(ends)
    return ForkedRank(pid)


def fork_ranks(config: WorkerConfig) -> None:
    """Fork the other ranks of a worker on CPU, before this process, its rank 0, starts a thread or an operation. Those
    that can't be forked are started as programs later."""
    if threading.active_count() == 1:  # a fork would lose other threads, and keep their locks
        start_early(config.engine, fork_rank)


def _be_rank(ends: RankEnds) -> NoReturn:
    """Be a rank, with no descriptor of the worker's: their ends must mean the end of the worker."""
    try:
        kept = sorted(ends)
        for before, after in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(before + 1, after)
        os.dup2(ends.life_line, 0)
        os.close(ends.life_line)
        give_way_on_cpu()
        run_rank(ends._replace(life_line=0))
    except BaseException:
        traceback.print_exc()
    finally:  # the worker's own frames, further up the stack, must not continue here
        os._exit(1)
