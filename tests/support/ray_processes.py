"""Processes of clusters on Ray, found by the raylets above them and by their environment. Not a test module."""

import contextlib
from typing import Any

import psutil

from splitserve.common.processes import processes_with
from splitserve.orchestration.ray.names import CLUSTER_VARIABLE


def raylet_above(pid: int) -> int:
    return next(parent.pid for parent in psutil.Process(pid).parents() if parent.name().startswith("raylet"))


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def processes_of(name: str) -> list[psutil.Process]:
    return processes_with(CLUSTER_VARIABLE, name)


def keepers_of(name: str) -> dict[int, psutil.Process]:
    """Return the processes that keep the cluster's LMCache servers, by the raylets that they are under."""
    found = {}
    for process in processes_of(name):
        with contextlib.suppress(psutil.Error):  # it may be ending
            if any("lmcache.v1" in " ".join(child.cmdline()) for child in process.children()):
                found[raylet_above(process.pid)] = process
    return found
