"""Check whether a process runs. Not a test module."""

import psutil


def is_running(process: psutil.Process | int) -> bool:
    """Return whether a process, or one of this id, runs: not once it has ended, even if nobody has waited for it."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
