"""``splitserve`` commands that benches run as a user does, and the end of the clusters that these commands start.

A cluster that ``splitserve up`` has started outlives that command, and would outlive the bench. Each bench has a state
folder of its own (``$SPLITSERVE_STATE_DIR``), which every process of its clusters inherits; :func:`ended_on_failure`
ends them by it if the bench fails, is interrupted or killed. As a program this module is the guard that does so: once
its standard input ends, it ends the clusters of the state folder that is its argument.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from splitserve.common.errors import SplitserveError
from splitserve.common.processes import processes_with

COMMAND_SECONDS = 180.0
STOP_SECONDS = 150.0
"""Longest time for an interrupted command to end, and its cluster with it: longer than ``splitserve down`` waits."""
ORPHAN_SECONDS = 5.0  # within which processes that have lost their parent end by themselves
END_SECONDS = 20.0  # after a signal
POLL_SECONDS = 0.1
_STATE_VARIABLE = "SPLITSERVE_STATE_DIR"


def run_command(state: str, *arguments: str) -> str:
    """Run ``splitserve`` in a process of its own; returns its output. Raises :class:`SplitserveError` if it fails."""
    with _running(state, arguments, stderr=subprocess.PIPE) as process:
        try:
            output, errors = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            message = f"splitserve {' '.join(arguments)}: it took longer than {COMMAND_SECONDS:g} s"
            raise SplitserveError(message) from None
    if process.returncode:
        raise SplitserveError(f"splitserve {' '.join(arguments)}: {output[-1000:]} {errors[-2000:]}")
    return output


def follow_command(state: str, *arguments: str, on_line: Callable[[str], None]) -> None:
    """Run ``splitserve``, however long it takes, and call ``on_line`` with each line of its output as it comes. Raises
    :class:`SplitserveError` if it fails."""
    lines = []
    with _running(state, arguments, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            on_line(line)
    if process.returncode:
        raise SplitserveError(f"splitserve {' '.join(arguments)}: {''.join(lines)[-2000:]}")


@contextlib.contextmanager
def _running(state: str, arguments: tuple[str, ...], stderr: int) -> Iterator["subprocess.Popen[str]"]:
    """Run a command beside the block. If the block fails or is interrupted, the command is ended in order, which ends
    what it was starting.

    The command has a session of its own: Ctrl-C reaches the bench alone.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "splitserve.orchestration.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, _STATE_VARIABLE: state, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    ) as process:
        try:
            yield process
        except BaseException:
            with _undisturbed():
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            raise


@contextlib.contextmanager
def ended_on_failure(state: str) -> Iterator[None]:
    """End all processes of the clusters of this state folder if the block fails or is interrupted, or if this process
    is killed. Raises :class:`SplitserveError` if the guard can't be started.

    A guard ends them, a program with a session of its own; if it was lost, this process does. Signals are ignored
    until they have ended. Processes that can't be ended are named on standard error.
    """
    with subprocess.Popen(
        [sys.executable, "-m", __name__, state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as guard:
        assert guard.stdin is not None and guard.stdout is not None
        if not guard.stdout.readline():  # what follows is measured: not beside the guard's start
            raise SplitserveError(
                f"the guard of the bench ended with exit status {guard.wait()} before the bench began"
            )
        try:
            yield
        except BaseException:
            with _undisturbed():
                guard.stdin.close()
                if status := guard.wait():
                    _say(f"the guard of the bench ended with exit status {status}: the bench ends its cluster itself")
                    _end_or_name(state)
            raise
        guard.kill()


def _guard(state: str) -> None:
    """End the clusters of this state folder once standard input ends."""
    print(flush=True)
    sys.stdin.read()
    _end_or_name(state)


def _end_or_name(state: str) -> None:
    """End the clusters of this state folder; name processes that can't be ended."""
    for process in end_clusters(state):
        _say(f"process {describe(process)} could not be ended")


def end_clusters(state: str) -> list[psutil.Process]:
    """End all processes of the clusters of this state folder, and wait for their end: by ``splitserve down``, by
    SIGTERM if that fails, at last by SIGKILL. Returns those that still run."""
    left = processes_of(state)
    if left or any(Path(state).glob("*/cluster.json")):  # on a Ray that was there before, processes have another state
        _say("ending the cluster")
        try:
            run_command(state, "down")
        except SplitserveError as error:
            _say(str(error))
        left = _left_after(state, ORPHAN_SECONDS)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            _say(f"process {describe(process)} was left over: {end.__name__}")
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
        left = left and _left_after(state, END_SECONDS)
    return left


def _left_after(state: str, seconds: float) -> list[psutil.Process]:
    """Wait so long for the end of all processes of this state folder; returns those that still run."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(state)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return left


def processes_of(state: str) -> list[psutil.Process]:
    """Return running processes of this state folder's clusters, this process excepted."""
    return [process for process in processes_with(_STATE_VARIABLE, state) if process.pid != os.getpid()]


def describe(process: psutil.Process) -> str:
    """Return a process's id and the begin of its command line."""
    try:
        return f"{process.pid} ({' '.join(process.cmdline())[:100]})"
    except psutil.Error:
        return str(process.pid)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Do nothing on SIGINT and SIGTERM during the block. For the main thread.

    They aren't ignored: the commands that are run meanwhile would inherit that.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more; the clusters are to be ended all the same
        print(f"splitserve bench: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    _guard(sys.argv[1])
