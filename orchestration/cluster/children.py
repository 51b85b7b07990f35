"""Processes of a cluster by name: the router, the workers, LMCache servers."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from splitserve.common.errors import SplitserveError
from splitserve.orchestration.cluster.host import Child
from splitserve.orchestration.cluster.launch_errors import LaunchError

STOP_GRACE_SECONDS = 3.0
KILLED_SECONDS = 10.0
"""Time in which a process that was killed has ended: on a busy machine the kernel takes a while to free its memory."""

StartError: TypeAlias = OSError | SplitserveError

_log = logging.getLogger(__name__)


class Children:
    """Running processes of a cluster. One thread starts them and notes their ends; :attr:`changed` guards state that
    other threads read.

    While ``is_start()``, a process that can't be started fails the cluster's start.
    """

    def __init__(self, is_start: Callable[[], bool]) -> None:
        self.changed = threading.Condition()
        self.by_name: dict[str, Child] = {}
        self._is_start = is_start

    def start(self, name: str, launch: Callable[[], Child]) -> StartError | None:
        """Start a process; returns the error if that fails. During the cluster's start, raises :class:`LaunchError`
        instead."""
        error = self.try_start(launch)
        if error is not None:
            if self._is_start():
                raise LaunchError(f"{name} can't be started: {error}") from error
            _log.error("%s can't be started: %s", name, error)
        return error

    def try_start(self, launch: Callable[[], Child]) -> StartError | None:
        """Start a process; returns the error if that fails: no memory, no process, no device."""
        try:
            self.add(launch())
        except (OSError, SplitserveError) as error:
            return error
        return None

    def add(self, child: Child) -> None:
        """Add a running process."""
        with self.changed:
            self.by_name[child.name] = child

    def take_leave(self, name: str, returncode: int) -> str:
        """Remove a process that has ended; returns the reason of its end in words."""
        with self.changed:
            child = self.by_name.pop(name)
        child.join(KILLED_SECONDS)
        words = child.describe_exit(returncode)
        _log.log(logging.ERROR if returncode else logging.INFO, "%s: %s", name, words)
        return words

    def pids(self) -> dict[str, int]:
        """Return process ids by name."""
        with self.changed:
            return {name: child.pid for name, child in self.by_name.items()}

    def end_all(self, extra_seconds: float) -> None:
        """End every process, by force after :data:`STOP_GRACE_SECONDS` and ``extra_seconds``; those that were killed
        have :data:`KILLED_SECONDS` and ``extra_seconds`` to be gone, all together."""
        grace_seconds = STOP_GRACE_SECONDS + extra_seconds
        for child in self.by_name.values():
            child.send_signal(signal.SIGINT)
        deadline = time.monotonic() + grace_seconds
        left = [child for child in self.by_name.values() if not child.join(max(0.0, deadline - time.monotonic()))]
        for child in left:
            if child.pid:  # else it has not begun, and ends when it does
                _log.warning("%s (pid %d) did not end within %.3g s: killed", child.name, child.pid, grace_seconds)
            child.kill()
        deadline = time.monotonic() + KILLED_SECONDS + extra_seconds
        for child in left:
            child.join(max(0.0, deadline - time.monotonic()))
