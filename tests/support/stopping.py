"""Processes that are stopped by a signal. Not a test module."""

import os
import signal
from pathlib import Path

from waiting import wait_until


def stop_process(pid: int) -> None:
    """Stop a process, and wait until all of its threads stand still: they do so a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()), "all threads stop")


def _is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
