"""A table of numbers that processes on the same machine read in place, such as the generations of KV blocks.

The owner keeps it in a file without a name. A reader opens the file through the owner's descriptors in ``/proc``, which
requires the same user and the same namespace of processes; where that fails, it reads the table in another way. The
file is sealed, since access to a mapping of a file that has shrunk would end the reader.
"""

import errno
import fcntl
import logging
import mmap
import os
import secrets
import select
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from splitserve.protocol.memory_records import SharedTable

logger = logging.getLogger(__name__)

_NAME = "splitserve-table"
_TOKEN_BYTES = 16
_NUMBERS_AT = 64  # bytes from the file's start
# Of <linux/fcntl.h> and <linux/memfd.h>: a Python that was built for an older system lacks their names.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4  # no more seals, no shrinking, no growing
_CLOSE_ON_EXEC, _ALLOW_SEALING = 0x1, 0x2
_NEVER_EXECUTED = 0x8  # MFD_NOEXEC_SEAL, since Linux 6.3; where vm.memfd_noexec is 2, files without it are refused


class OwnTable:
    """A table that others may read. ``numbers``: uint64 ``[count]``, zeros at first."""

    def __init__(self, count: int) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._file = -1
        num_bytes = _NUMBERS_AT + 8 * count
        try:
            self._file = _new_file()
            os.ftruncate(self._file, num_bytes)
            fcntl.fcntl(self._file, _ADD_SEALS, _SEALS)
            memory = mmap.mmap(self._file, num_bytes)
        except OSError as error:
            logger.info("a table can't be shared with other processes: %s", error)
            self._close()
            memory = mmap.mmap(-1, num_bytes)
        memory[:_TOKEN_BYTES] = self._token
        self.numbers: npt.NDArray[np.uint64] = np.frombuffer(memory, np.uint64, count, _NUMBERS_AT)

    def __del__(self) -> None:
        self._close()

    def record(self) -> SharedTable | None:
        """Return how others find the table while this process lives; None if it can't be shared."""
        return None if self._file < 0 else SharedTable(os.getpid(), self._file, self._token)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _new_file() -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("this Python can't make files without names")
    flags = _CLOSE_ON_EXEC | _ALLOW_SEALING
    try:
        return os.memfd_create(_NAME, flags | _NEVER_EXECUTED)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(_NAME, flags)  # the kernel doesn't know that flag


class PeerTable:
    """Another process's table: its ``numbers`` as they are now. Use :func:`open_table`."""

    def __init__(self, numbers: memoryview, owner: int) -> None:
        self.numbers = numbers
        self._owner = owner  # a descriptor of its process
        self._end = select.poll()
        self._end.register(owner, select.POLLIN)
        self._is_closed = False
        self._lock = threading.Lock()  # of the poll, which raises if two threads are at it, and of the descriptor

    @property
    def is_current(self) -> bool:
        """False once the owner has ended, since the numbers then stay as they were, and once the table is closed. Any
        thread may ask."""
        with self._lock:
            return not self._is_closed and not self._end.poll(0)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self.numbers.release()
            os.close(self._owner)


def open_table(table: SharedTable, count: int) -> PeerTable | None:
    """Return a peer's table of ``count`` numbers, or None if it can't be mapped here."""
    if not hasattr(os, "pidfd_open"):
        return None
    owner = -1
    try:
        owner = os.pidfd_open(table.pid)  # before the token is read, so that it can't be a successor's
        _check_namespace(owner, table.pid)
        numbers = _mapped(table, count)
    except (OSError, ValueError) as error:
        logger.debug("the table of process %d can't be mapped: %s", table.pid, error)
        if owner >= 0:
            os.close(owner)
        return None
    return PeerTable(numbers, owner)


def _check_namespace(owner: int, pid: int) -> None:
    """Raise ValueError unless ``/proc`` numbers processes as this process does: with another namespace's, the table and
    its owner would be of different processes."""
    fields = Path(f"/proc/self/fdinfo/{owner}").read_text().splitlines()
    if f"Pid:\t{pid}" not in fields:
        raise ValueError("/proc is of another namespace of processes")


def _mapped(table: SharedTable, count: int) -> memoryview:
    """Map the file. Raises OSError, or ValueError for a file that isn't such a table."""
    path = f"/proc/{table.pid}/fd/{table.descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # opening anything else could block or have effects
        raise ValueError(f"{path} is no table")
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = os.fstat(file).st_size
        if size < _NUMBERS_AT + 8 * count:
            raise ValueError(f"{path} has {size} bytes; {count} numbers need {_NUMBERS_AT + 8 * count}")
        if fcntl.fcntl(file, _GET_SEALS) & _SEALS != _SEALS:
            raise ValueError(f"{path} isn't sealed, so it could shrink")
        memory = mmap.mmap(file, size, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    if memory[:_TOKEN_BYTES] != table.token:
        raise ValueError(f"{path} has another token")
    return memoryview(memory)[_NUMBERS_AT : _NUMBERS_AT + 8 * count].cast("Q")
