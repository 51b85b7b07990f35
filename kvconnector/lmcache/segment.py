"""LMCache's shared memory in a worker's address space."""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from splitserve.kvconnector.lmcache.chunk import Bytes
from splitserve.kvconnector.lmcache.connection import LMCacheError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the place of shared memory, not of temporary files
PIECE_BYTES = 1 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def map_segment(name: str, num_bytes: int) -> Bytes:
    """Map the shared memory with that name. Raises :class:`LMCacheError` or :class:`OSError`."""
    bare = name.removeprefix("/")
    if not bare or "/" in bare or bare.startswith("."):
        raise LMCacheError(f"its shared memory has an invalid name: {name!r}")
    file = os.open(SHARED_MEMORY / bare, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(file).st_size < num_bytes:
            raise LMCacheError(f"its shared memory has {os.fstat(file).st_size} bytes, but it announced {num_bytes}")
        return np.frombuffer(mmap.mmap(file, num_bytes), dtype=np.uint8)
    finally:
        os.close(file)


def fault_in(pool: Bytes) -> Iterator[None]:
    """Map all pages into this process's page tables, one piece per iteration, keeping their content. The first write to
    a page would otherwise do that, at several times the cost of the copy itself.

    Raises :class:`LMCacheError` if memory is lacking: a process that touched such a page would be killed.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap's own method would hold the GIL
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, len(pool), PIECE_BYTES):
        num_bytes = min(PIECE_BYTES, len(pool) - start)
        if madvise(pool.ctypes.data + start, num_bytes, _MADV_POPULATE_WRITE):
            error = ctypes.get_errno()
            if error == errno.EINVAL:
                return  # the kernel doesn't support it: pages are mapped at first touch
            raise LMCacheError(f"there is no room for its shared memory: {os.strerror(error)} at byte {start}")
        yield
