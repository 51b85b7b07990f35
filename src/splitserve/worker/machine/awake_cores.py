"""Cores that don't go to sleep while a worker has something to do, for machines that serve and do nothing else.

A core that sleeps takes a while to wake up (``splitserve bench awake-cores``), and a token passes a dozen threads and
processes that have waited for it. So a program beside the worker has a process for each of its cores, which spins
while no other thread is runnable there (SCHED_IDLE): threads of the same session, or container, get the core at once.
The processes are stopped when the worker has been idle for a while, and die with it. The worker's affinity is set to
those cores, which aren't all that the machine has: see :func:`splitserve.common.cores.awake_cpus`.

The spinning processes yield often. A thread that has had more than its share of a core may have to let others run
first, and a spinning process that doesn't yield would then run for a whole time slice.

As a program: its arguments are its parent's process id and the hardware threads.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn

from splitserve.common.cores import current_cpu_quota
from splitserve.common.errors import ConfigError
from splitserve.common.parents import ask_for_death_signal
from splitserve.engine.io.sleepy_cores import Cores, SleepyCores

logger = logging.getLogger(__name__)

REST_AFTER_SECONDS = 10.0
START_TIMEOUT_SECONDS = 30.0
END_SECONDS = 3.0
_STARTED = "awake"
_TURNS = 1000
"""The turns between two yields: yielding all the time would delay the thread that is to have the core."""


def check_cores_can_be_kept_awake() -> None:
    """Raises :class:`ConfigError` where that can't be, or would take time from the worker itself: under a CPU quota."""
    if not hasattr(os, "SCHED_IDLE"):
        raise ConfigError("cores can't be kept awake here: it takes Linux; go without --keep-cores-awake")
    quota = current_cpu_quota()
    if quota is not None:
        raise ConfigError(
            f"cores can't be kept awake under a CPU quota ({quota:g} cores): waiting would use it up; lift the "
            "quota, or go without --keep-cores-awake"
        )


class AwakeCores:
    """Keeps the hardware threads ``cpus`` awake from now on, until nothing was to do for ``REST_AFTER_SECONDS``.

    Raises :class:`ConfigError` as :func:`check_cores_can_be_kept_awake` does, and where it fails. Made and closed by
    the process's main thread: the kernel ends the program with the thread that started it.
    """

    def __init__(self, cpus: Collection[int]) -> None:
        check_cores_can_be_kept_awake()
        arguments = [sys.executable, "-m", __name__, str(os.getpid()), *map(str, sorted(cpus))]
        # In a group of its own: the kernel hangs up on a group that has lost its parent while one of it is stopped.
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, process_group=0
        )
        self._rests = False
        self._rest_at = time.monotonic() + REST_AFTER_SECONDS
        answer = self._answer()
        if answer != _STARTED:
            self.close()
            raise ConfigError(f"cores can't be kept awake here: {answer}; go without --keep-cores-awake")
        logger.info("hardware threads kept awake while there is something to do: %d", len(cpus))

    @property
    def pid(self) -> int:
        """The program's process id."""
        return self._process.pid

    def note(self, is_busy: bool, now: float) -> None:
        if is_busy:
            self._rest_at = now + REST_AFTER_SECONDS
        shall_rest = now >= self._rest_at
        if shall_rest == self._rests or self._process.returncode is not None:
            return
        self._rests = shall_rest
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGSTOP if shall_rest else signal.SIGCONT)
        else:
            logger.warning("cores aren't kept awake any more: the process for that has died")

    def close(self) -> None:
        """Let the cores sleep for good."""
        self._process.kill()  # the spinning processes end with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _answer(self) -> str:
        """Return the program's first line of output."""
        assert self._process.stdout is not None
        too_late = threading.Timer(START_TIMEOUT_SECONDS, self._process.kill)
        too_late.start()
        try:
            return self._process.stdout.readline().strip() or "the process for that has died"
        finally:
            too_late.cancel()


@contextlib.contextmanager
def kept_awake(wanted: bool, cpus: Collection[int]) -> Iterator[Cores]:
    """Yield :class:`AwakeCores` for the block if ``wanted``, else cores that may sleep."""
    if not wanted:
        yield SleepyCores()
        return
    cores = AwakeCores(cpus)
    try:
        yield cores
    finally:
        cores.close()


def _end_with(parent: int) -> None:
    """Have the kernel end this process with ``parent``. Raises OSError where it can't, or is late."""
    if not ask_for_death_signal(signal.SIGKILL) or os.getppid() != parent:
        raise OSError("it doesn't end processes with their parent")


def _spin(parent: int) -> NoReturn:
    """Spin until the parent's end; end at once if the parent has ended already."""
    try:
        _end_with(parent)
        while True:
            for _ in range(_TURNS):
                pass
            os.sched_yield()
    finally:
        os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Run processes that spin until the parent's end. The first line of output reports success or the reason of a
    failure."""
    parent, me = int(arguments[0]), os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        _end_with(parent)
        for cpu in map(int, arguments[1:]):
            pid = os.fork()
            if pid == 0:
                _spin(me)
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(pid, {cpu})
    except OSError as error:
        print(f"this platform can't ({error})", flush=True)
        return 1
    print(_STARTED, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
