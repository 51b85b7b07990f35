"""Affinity of this process: binds it to hardware threads, if the platform supports that."""

import logging
import os
from collections.abc import Collection

_log = logging.getLogger(__name__)


def bind_process(cpus: Collection[int]) -> bool:
    """Bind this process and its later children to ``cpus``, if there are any; returns False if the platform refuses."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return not cpus
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # the mask has changed meanwhile, or binding isn't permitted
        _log.warning("can't bind this process to cores %s: %s; it stays as it is", sorted(cpus), error)
        return False
    return True
