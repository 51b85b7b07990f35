"""Workers of a cluster report: their names, stale ones, and pairs of readers and sources."""

from collections.abc import Iterator

from splitserve.protocol.cluster_report import ClusterReport, WorkerReport, WorkerState
from splitserve.protocol.messages.membership import PeerLink
from splitserve.protocol.request import Role


def is_stale(worker: WorkerReport, report: ClusterReport) -> bool:
    return worker.state is WorkerState.LOST or worker.silent_seconds > report.dead_after_seconds


def pairs(report: ClusterReport) -> Iterator[tuple[WorkerReport, WorkerReport, PeerLink | None]]:
    """Yield each ready decode worker with each ready prefill worker that it may read from, and their connection."""
    ready = [worker for worker in report.workers if worker.state is WorkerState.READY and not is_stale(worker, report)]
    for sink in (worker for worker in ready if worker.info.role is Role.DECODE):
        links = {link.peer: link for link in sink.links}
        for source in (worker for worker in ready if worker.info.role is Role.PREFILL):
            yield sink, source, links.get(source.info.party.engine_id)


def name_of(worker: WorkerReport) -> str:
    return worker.info.party.engine_id
