"""Processes of this machine that are known by a variable of their environment, whichever process started them."""

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, reaped or not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Return the running processes whose environment has ``variable`` with ``value``, of those that this user may look
    into."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value and not has_ended(process):
                found.append(process)
        except psutil.Error:  # gone, or another user's
            continue
    return found
