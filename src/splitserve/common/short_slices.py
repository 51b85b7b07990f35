"""Short time slices for a thread that sleeps most of the time, and must run soon after it is woken.

Where other threads keep every core busy, as the steps of workers on CPU do, Linux lets a running thread go on for its
slice of one to three milliseconds before it looks at one that was woken. From Linux 6.12 on a thread with a shorter
slice of its own comes first; it gets no more processor time by it (sched(7), sched_setattr(2)).
"""

import ctypes
import logging
import os
import platform
import struct
import sys

SLICE_SECONDS = 1e-4
"""The shortest slice that Linux gives."""

_SYSCALL_NUMBERS = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice value, priority, slice, deadline, period
_SCHED_OTHER = 0

log = logging.getLogger(__name__)


def ask_for_short_slices() -> bool:
    """Ask for short slices for the calling thread, and those that it starts later; return whether that was granted."""
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != _SCHED_OTHER:
        return False
    nice_value, nanoseconds = os.getpriority(os.PRIO_PROCESS, 0), int(1e9 * SLICE_SECONDS)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, _SCHED_OTHER, 0, nice_value, 0, nanoseconds, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, attributes, 0) == 0:
        return True
    log.debug("no short time slices: %s", os.strerror(ctypes.get_errno()))
    return False
