"""Short time slices of a thread: granted where the kernel knows them, and harmless everywhere."""

import ctypes
import os
import struct
import sys
import threading

import pytest

from splitserve.common.short_slices import SLICE_SECONDS, ask_for_short_slices

pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="x86-64 Linux only")
_SCHED_GETATTR = 315


def slice_nanoseconds() -> int:
    attributes = ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None, use_errno=True).syscall(_SCHED_GETATTR, 0, attributes, len(attributes), 0) == 0
    return int(struct.unpack_from("=Q", attributes, 24)[0])


def test_the_thread_gets_the_slice_and_keeps_its_priority() -> None:
    found = []

    def ask() -> None:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        found.append((ask_for_short_slices(), slice_nanoseconds(), os.getpriority(os.PRIO_PROCESS, 0) == before))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    ((was_granted, nanoseconds, is_as_before),) = found
    assert is_as_before
    if was_granted and nanoseconds:  # older kernels accept the call and have no slices of threads
        assert nanoseconds == round(1e9 * SLICE_SECONDS)
