"""Rate at which a client reads its answer, by what its kernel has taken.

The own kernel may hold megabytes, and takes more from the process only when a third of them are gone: what the process
has still to write says little about the client. The client's kernel, too, reports in steps what its process has read:
of up to 128 KiB while buffers have their first size.
"""

import asyncio
import fcntl
import termios
from array import array

MIN_SECONDS = 8.0
"""Least time over which the rate is measured: at the least rate a step takes less."""
MIN_BYTES_PER_SECOND = 1 << 14
STEP_BYTES = 1 << 17


def measured_seconds(keep_alive_seconds: float) -> float:
    """Return the time over which a client's rate is measured, where connections may be idle for so long."""
    return max(keep_alive_seconds, MIN_SECONDS)


class Progress:
    """A client's reading of ``num_unread`` bytes, since ``began_at``; nothing is written meanwhile."""

    def __init__(self, num_unread: int, began_at: float) -> None:
        self._num_unread = self._num_left = num_unread
        self._began_at = began_at

    def is_too_slow(self, num_left: int, now: float) -> bool:
        """Return whether the client, which has so many bytes left, has read nothing since the last call, or too little
        since the begin. One step may be missing there."""
        has_stopped, self._num_left = num_left >= self._num_left, num_left
        num_wanted = MIN_BYTES_PER_SECOND * (now - self._began_at) - STEP_BYTES
        return has_stopped or self._num_unread - num_left < num_wanted


def unread_bytes(transport: asyncio.Transport) -> int:
    """Return the number of bytes of answers that the client's kernel hasn't taken."""
    return _num_bytes(transport, termios.TIOCOUTQ) + transport.get_write_buffer_size()


def arrived_bytes(transport: asyncio.Transport) -> int:
    """Return the number of bytes that a client sent and nothing has read."""
    return _num_bytes(transport, termios.FIONREAD)


def _num_bytes(transport: asyncio.Transport, queue: int) -> int:
    count = array("i", [0])
    fcntl.ioctl(transport.get_extra_info("socket").fileno(), queue, count)
    return count[0]
