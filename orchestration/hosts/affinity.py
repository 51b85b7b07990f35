"""Binding this process to some of the hardware threads that it may use, where the platform can."""

import logging
import os
from collections.abc import Collection

_log = logging.getLogger(__name__)


def bind_process(cpus: Collection[int]) -> bool:
    """Keep this process, and all that it starts, on ``cpus``; with none it stays as it is. False if that can't be."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return not cpus
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # the mask has changed meanwhile, or somebody forbids it
        _log.warning("can't bind this process to cores %s: %s; it stays as it is", sorted(cpus), error)
        return False
    return True
