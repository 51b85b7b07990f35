"""The garbage collector of a process whose pauses its users feel.

Python frees most objects when the last reference to them goes; the collector is for cycles, of which errors and closed
connections leave some. Its passes look at all objects that were made since the last one and live: ten milliseconds for
twenty thousand of them, and every so often at all that there are. Here, a pass looks at a thousand objects, and sets
aside what it finds alive. Cycles among these are found by a full pass, which waits until nobody feels it, or until
memory has doubled.
"""

import gc
import sys
from collections.abc import Mapping
from typing import Any

YOUNG_OBJECTS = 1000
"""Objects of a pass, which takes half a millisecond."""
MIN_GROWTH_BLOCKS = 1 << 21
"""Growth that is no reason for a full pass while the process is busy: 200 MB or so."""
IDLE_GROWTH_BLOCKS = 1 << 15


class Collector:
    """The collector's passes from :meth:`start` to :meth:`stop`: of one process, whose collector is one."""

    def __init__(self) -> None:
        self._num_blocks = 0  # of memory after the last full pass
        self._thresholds = gc.get_threshold()
        self._had_set_aside = False

    def start(self) -> None:
        """Set aside all objects so far, which mostly live as long as the process."""
        self._thresholds = gc.get_threshold()
        self._had_set_aside = gc.get_freeze_count() > 0  # by this process, once all was imported
        self._collect()
        gc.set_threshold(YOUNG_OBJECTS)
        gc.callbacks.append(_set_aside)

    def look(self, *, is_idle: bool) -> bool:
        """Make a full pass if it is due, and return whether it was. To be called every few seconds; ``is_idle``:
        nobody would feel it."""
        growth = sys.getallocatedblocks() - self._num_blocks
        least = IDLE_GROWTH_BLOCKS if is_idle else max(MIN_GROWTH_BLOCKS, self._num_blocks)
        if growth < least:
            return False
        gc.unfreeze()
        self._collect()
        return True

    def stop(self) -> None:
        """Give the collector back as it was. Stopping twice is harmless."""
        if _set_aside in gc.callbacks:
            gc.callbacks.remove(_set_aside)
            gc.set_threshold(*self._thresholds)
            if not self._had_set_aside:
                gc.unfreeze()

    def _collect(self) -> None:
        gc.collect()
        gc.freeze()
        self._num_blocks = sys.getallocatedblocks()


def _set_aside(phase: str, _info: Mapping[str, Any]) -> None:
    if phase == "stop":
        gc.freeze()
