"""The end of a process with its parent, however that one ends. Linux only."""

import ctypes
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def ask_for_death_signal(signal_number: int) -> bool:
    """Ask the kernel to send this process a signal when the *thread* of the parent ends that started it. Return whether
    it will."""
    if sys.platform != "linux":
        return False
    status: int = ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    return status == 0
