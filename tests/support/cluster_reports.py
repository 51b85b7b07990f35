"""Reports of clusters and their workers, for tests of what reads them. Not a test module."""

from typing import Any

from splitserve.benchmarks.router.instant_worker import DEFAULT_LAYOUT
from splitserve.protocol.cluster_report import ClusterReport, WorkerReport, WorkerState
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.request import Party, Role


def worker_report(name: str, role: Role, **fields: Any) -> WorkerReport:
    """Return the report of a ready worker; ``fields``: those that differ from the usual ones."""
    info = WorkerInfo(Party(name, 1), role, "tcp://127.0.0.1:1", 1, DEFAULT_LAYOUT, 200, 8, 512, 1000)
    usual = {"state": WorkerState.READY, "silent_seconds": 0.1, "num_heartbeats": 3, "load": WorkerLoad(), "links": []}
    return WorkerReport(info=info, **usual | fields)  # type: ignore[arg-type]


def cluster_report(*workers: WorkerReport, **fields: Any) -> ClusterReport:
    """Return the report of a cluster of these workers; ``fields``: those that differ from the usual ones."""
    usual: dict[str, Any] = {
        "version": "1", "machine": "m", "pid": 1, "clock_seconds": 0.0, "model": "m", "served_model_name": "m",
        "membership": "", "has_secret": False, "heartbeat_seconds": 1.0, "dead_after_seconds": 5.0,
    }  # fmt: skip
    return ClusterReport(workers=list(workers), **usual | fields)
