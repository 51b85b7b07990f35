"""Durations of the phases of a worker's start: a line of log for each, and their sum."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)


_START_TICKS = 19  # index of the start among the fields of /proc/self/stat after the program's name: <proc(5)>


def process_age_seconds() -> float:
    """Return the time since this process was started or forked.

    On Linux both ends are times since boot: psutil counts from a boot time of whole seconds.
    """
    if sys.platform != "linux":
        return max(0.0, time.time() - psutil.Process().create_time())
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_at = int(fields[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_at)


class StartClock:
    """Runs from the process's own start; what came before this object is the phase "imports".

    Phases may overlap where threads do; the total doesn't count them twice. Thread-safe.
    """

    def __init__(self) -> None:
        age_seconds = process_age_seconds()
        self._began_at = time.monotonic() - age_seconds
        self._phases: list[tuple[str, float]] = []
        self._note("imports", age_seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as phase ``name``. A phase that fails is not logged."""
        began_at = time.monotonic()
        yield
        self._note(name, time.monotonic() - began_at)

    @property
    def total_seconds(self) -> float:
        return time.monotonic() - self._began_at

    def __str__(self) -> str:
        """Like ``21.3 s: imports 3.2, weights 4.1``."""
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._phases)
        return f"{self.total_seconds:.1f} s: {phases}"

    def _note(self, name: str, seconds: float) -> None:
        self._phases.append((name, seconds))
        logger.debug("start: %s took %.2f s", name, seconds)
