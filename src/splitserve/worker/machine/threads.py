"""Affinity and priority of a worker's threads, according to its config.

Threads are identified by their names. The model's threads are moved before their first step: they create the threads
of the OpenMP pool in that step, and these inherit their affinity.
"""

import logging
import os
import threading

import torch

from splitserve.common.cores import usable_cpus
from splitserve.kvconnector.layout.numa_memory import cpus_of_node, node_of_gpu
from splitserve.protocol.config import CoreAffinity

logger = logging.getLogger(__name__)

NICE_LEVELS_ON_CPU = 2
"""Steps below the router: with them the router, which runs for a tenth of a millisecond at a time, need not wait until
a step's threads have had their slice; without the router's and others' load the worker loses nothing."""
_MODEL = ("model",)
_TRANSFER = ("nixl-", "read-", "digest-", "loads-", "stores-", "transfers")


def give_way(device: torch.device) -> None:
    """Lower this process's priority a little if it computes on the CPU, where its threads keep the cores busy."""
    if device.type == "cpu":
        give_way_on_cpu()


def give_way_on_cpu() -> None:
    os.nice(NICE_LEVELS_ON_CPU)


def pin_threads(affinity: CoreAffinity) -> dict[str, tuple[int, ...]]:
    """Move the model's and the transfer threads of this process to their cores; return the new affinity by thread.

    Does nothing without an affinity, or on a platform that can't. A thread that can't be moved stays where it is.
    """
    moved: dict[str, tuple[int, ...]] = {}
    usable = usable_cpus()  # fewer than planned where only some cores are kept awake
    for thread in threading.enumerate():
        cpus = tuple(cpu for cpu in cpus_of_thread(thread.name, affinity) if cpu in usable)
        if cpus and thread.native_id is not None and _set_affinity(thread.native_id, cpus):
            moved[thread.name] = cpus
    return moved


def keep_near(device: torch.device, affinity: CoreAffinity) -> None:
    """Keep this process on its GPU's NUMA node, of those that the worker is kept on: ranks may have GPUs of several."""
    node = node_of_gpu(device) if affinity.cpus and device.type == "cuda" else None
    if node is not None and (near := usable_cpus() & cpus_of_node(node)):
        _set_affinity(0, tuple(near))


def cpus_of_thread(name: str, affinity: CoreAffinity) -> tuple[int, ...]:
    """Return the hardware threads on which the thread called ``name`` may run; () for any."""
    if name.startswith(_MODEL):
        return affinity.model_cpus
    return affinity.transfer_cpus if name.startswith(_TRANSFER) else ()


def _set_affinity(thread_id: int, cpus: tuple[int, ...]) -> bool:
    if not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(thread_id, cpus)
    except OSError as error:
        logger.warning("thread %d can't be moved to cores %s: %s", thread_id, cpus, error)
        return False
    return True
