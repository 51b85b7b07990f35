"""Cores that don't go to sleep while a worker has something to do, for machines that serve and do nothing else.

A core that sleeps takes a while to wake up, in a virtual machine tens of microseconds, and a token passes a dozen
threads and processes that have waited for it. So a process of the worker's own has a thread for each of its cores,
which spins where nobody else has anything to run (SCHED_IDLE): others of the same session, or container, get the core
at once. It's stopped when the worker has been idle for a while, and dies with it. The worker is kept on those cores,
which aren't all that there are: see :func:`splitserve.cores.awake_cpus`.

As a program: that process. Its arguments are its parent's process id and the hardware threads.
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from splitserve.cores import current_cpu_quota
from splitserve.errors import ConfigError

logger = logging.getLogger(__name__)

REST_AFTER_SECONDS = 10.0
START_TIMEOUT_SECONDS = 30.0
END_SECONDS = 3.0
_STARTED = "awake"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Cores(Protocol):
    """What hears whether a worker has something to do."""

    def note(self, is_busy: bool, now: float) -> None:
        """Called each second or so, and as soon as there is something. ``now`` of the monotonic clock."""


class SleepyCores:
    """They sleep as the platform lets them."""

    def note(self, is_busy: bool, now: float) -> None:
        pass


class AwakeCores:
    """Keeps the hardware threads ``cpus`` awake from now on, until nothing was to do for ``REST_AFTER_SECONDS``.

    Raises :class:`ConfigError` where that can't be, or would take time from the worker itself: under a CPU quota. Made
    and closed by the process's main thread: the kernel ends the other process with the thread that started it.
    """

    def __init__(self, cpus: Collection[int]) -> None:
        quota = current_cpu_quota()
        if quota is not None:
            raise ConfigError(
                f"cores can't be kept awake under a CPU quota ({quota:g} cores): waiting would use it up; lift the "
                "quota, or go without --keep-cores-awake"
            )
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
        """Of the process that spins."""
        return self._process.pid

    def note(self, is_busy: bool, now: float) -> None:
        if is_busy:
            self._rest_at = now + REST_AFTER_SECONDS
        shall_rest = now >= self._rest_at
        if shall_rest == self._rests or self._process.returncode is not None:
            return
        self._rests = shall_rest
        self._process.send_signal(signal.SIGSTOP if shall_rest else signal.SIGCONT)
        if self._process.returncode is not None:  # somebody has killed it
            logger.warning("cores aren't kept awake any more: the process for that has died")

    def close(self) -> None:
        """Let the cores sleep for good."""
        self._process.kill()
        self._process.wait(END_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _answer(self) -> str:
        """Its first line."""
        assert self._process.stdout is not None
        too_late = threading.Timer(START_TIMEOUT_SECONDS, self._process.kill)
        too_late.start()
        try:
            return self._process.stdout.readline().strip() or "the process for that has died"
        finally:
            too_late.cancel()


@contextlib.contextmanager
def kept_awake(wanted: bool, cpus: Collection[int]) -> Iterator[Cores]:
    """:class:`AwakeCores` within the block if ``wanted``, else cores that may sleep."""
    if not wanted:
        yield SleepyCores()
        return
    cores = AwakeCores(cpus)
    try:
        yield cores
    finally:
        cores.close()


def _spin(lock: ctypes.c_int, cpu: int) -> None:
    """Wait for a lock that is never released, as the C library does: without a system call, without our interpreter's
    lock, and with the processor's own instruction for that."""
    try:
        os.sched_setaffinity(0, {cpu})
    except OSError as error:  # it was taken offline, or from us, meanwhile
        print(f"core {cpu} isn't kept awake: {error}", file=sys.stderr, flush=True)
        return
    ctypes.CDLL(None).pthread_spin_lock(ctypes.byref(lock))


def main(arguments: Sequence[str]) -> int:
    """Spin until the parent's end. Its first line of output says that it does, or why not."""
    parent, cpus = int(arguments[0]), [int(text) for text in arguments[1:]]
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # threads that are started inherit it
        library = ctypes.CDLL(None)
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        lock = ctypes.c_int()
        library.pthread_spin_init(ctypes.byref(lock), 0)
        library.pthread_spin_lock(ctypes.byref(lock))
    except (AttributeError, OSError) as error:
        print(f"this platform can't ({error})", flush=True)
        return 1
    if os.getppid() != parent:  # died before it could be said what then
        return 0
    for cpu in cpus:
        threading.Thread(target=_spin, args=(lock, cpu), daemon=True).start()
    print(_STARTED, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
