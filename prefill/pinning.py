"""Which cores a worker's threads run on, as its config says; and where its host memory came to lie.

Threads are told apart by their names. The model's threads are moved before their first step: the workers of its OpenMP
pool are made by them then, and inherit where they may run.
"""

import logging
import os
import threading
from collections.abc import Mapping

from splitserve.config import CorePlacement

logger = logging.getLogger(__name__)

_MODEL = ("model",)
_TRANSFER = ("nixl-", "read-", "digest-", "loads-", "stores-", "transfers")


def pin_threads(placement: CorePlacement) -> dict[str, tuple[int, ...]]:
    """Move the model's and the transfer threads of this process to their cores; returns who went where.

    Does nothing without a placement, or on a platform that can't. A thread that can't be moved stays where it is.
    """
    moved: dict[str, tuple[int, ...]] = {}
    for thread in threading.enumerate():
        cpus = cpus_of_thread(thread.name, placement)
        if cpus and thread.native_id is not None and _set_affinity(thread.native_id, cpus):
            moved[thread.name] = cpus
    return moved


def cpus_of_thread(name: str, placement: CorePlacement) -> tuple[int, ...]:
    """Where the thread called ``name`` belongs; () for anywhere."""
    if name.startswith(_MODEL):
        return placement.model_cpus
    return placement.transfer_cpus if name.startswith(_TRANSFER) else ()


def remote_bytes(pages: Mapping[int, int], num_bytes: int, node: int | None) -> int:
    """How many of ``num_bytes`` lie on other NUMA nodes than ``node``, from ``pages`` by node (all, or a sample)."""
    total = sum(pages.values())
    if node is None or not total:
        return 0
    return round(num_bytes * (total - pages.get(node, 0)) / total)


def _set_affinity(thread_id: int, cpus: tuple[int, ...]) -> bool:
    if not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(thread_id, cpus)
    except OSError as error:
        logger.warning("thread %d can't be moved to cores %s: %s", thread_id, cpus, error)
        return False
    return True
