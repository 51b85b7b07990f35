"""Folders for the shared memory of children, so that segments that UCX leaves behind can be found and removed.

UCX unlinks each segment right after its creation, but a process that is killed in between leaves it behind, under a
random name. So each child has a folder of its own under ``/dev/shm``. The child and its parent hold a lock on it while
they live: a folder whose lock is free is abandoned, whatever process ids mean in another container.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the place of shared memory, not of temporary files
_PREFIX = "splitserve-"
_YOUNG_SECONDS = 5.0  # time between the creation of a folder and its lock


class SharedMemoryFolder:
    """Child's folder as its parent sees it; ``path`` is "" if the platform has no ``/dev/shm``."""

    def __init__(self, name: str) -> None:
        self.path = ""
        self._lock_fd = -1
        if SHARED_MEMORY.is_dir():
            self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-{name}-", dir=SHARED_MEMORY)
            self._lock_fd = hold_folder(self.path)

    def remove(self) -> None:
        """Remove the folder after the child's end. Harmless if it is gone already."""
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def hold_folder(path: str) -> int:
    """Lock the folder as used by a living process, until the returned descriptor is closed; -1 if it's gone."""
    try:
        lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    fcntl.flock(lock_fd, fcntl.LOCK_SH)
    return lock_fd


def remove_abandoned(root: Path = SHARED_MEMORY) -> list[str]:
    """Remove folders of ours that no living process uses; returns their names."""
    removed = []
    for folder in abandoned(root):
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder.name)
    return removed


def abandoned(root: Path = SHARED_MEMORY) -> Iterator[Path]:
    """Yield folders of ours that no living process uses. Each is locked meanwhile, so that no other process yields
    it."""
    for folder in root.glob(f"{_PREFIX}*") if root.is_dir() else ():
        try:
            is_ours = folder.stat().st_uid == os.getuid() and time.time() - folder.stat().st_mtime > _YOUNG_SECONDS
            lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_ours:
                yield folder
        except OSError:
            continue  # in use
        finally:
            os.close(lock_fd)
