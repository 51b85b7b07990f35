"""LMCache's shared memory in a worker's address space."""

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from splitserve.kvconnector.lmcache_connection import LMCacheError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the place of shared memory, not of temporary files
PIECE_BYTES = 1 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def map_segment(name: str, num_bytes: int) -> mmap.mmap:
    """Shared memory of that name. Raises :class:`LMCacheError`, or :class:`OSError`."""
    bare = name.removeprefix("/")
    if not bare or "/" in bare or bare.startswith("."):
        raise LMCacheError(f"its shared memory is called {name!r}, which is no name")
    file = os.open(SHARED_MEMORY / bare, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(file).st_size < num_bytes:
            raise LMCacheError(f"its shared memory has {os.fstat(file).st_size} bytes, less than its {num_bytes}")
        return mmap.mmap(file, num_bytes)
    finally:
        os.close(file)


def fault_in(memory: mmap.mmap) -> Iterator[None]:
    """Get all pages into this process's page tables, a piece each time; contents stay as they are. The first write to a
    page would do that, at several times the price of the copy itself.

    Raises :class:`LMCacheError` where there is no memory: whoever touched it would be killed.
    """
    for start in range(0, len(memory), PIECE_BYTES):
        try:
            memory.madvise(_MADV_POPULATE_WRITE, start, min(PIECE_BYTES, len(memory) - start))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return  # the kernel doesn't know how: pages come as they are touched
            raise LMCacheError(f"there is no room for its shared memory: {error.strerror} at byte {start}") from error
        yield
