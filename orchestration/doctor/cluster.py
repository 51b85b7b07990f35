"""Report of a running cluster, read again until states that pass by themselves have passed."""

import time
from http import HTTPStatus

import msgspec

from splitserve import __version__
from splitserve.common.errors import ConfigError
from splitserve.common.security import SocketSecurity
from splitserve.orchestration.doctor.http import Endpoint
from splitserve.orchestration.doctor.worker_checks import MAX_CLOCK_OFFSET_SECONDS
from splitserve.orchestration.doctor.workers import is_stale, pairs
from splitserve.protocol.cluster_report import ClusterReport, WorkerReport, WorkerState

POLL_SECONDS = 0.2
MARGIN_SECONDS = 1.0
HANDSHAKE_SECONDS = 3.0


def read_report(endpoint: Endpoint) -> ClusterReport:
    """Read the cluster's report. Raises :class:`ConfigError` if the endpoint isn't Splitserve's, or has another
    version."""
    answer = endpoint.get("/admin/workers")
    if answer.status != HTTPStatus.OK:
        said = endpoint.get("/version").json()
        if isinstance(said, dict) and "version" in said:
            raise ConfigError(
                f"{endpoint.url} is of version {said['version']}, which this version ({__version__}) can't read"
            )
        raise ConfigError(f"{endpoint.url} is no endpoint of Splitserve: GET /admin/workers gave {answer.status}")
    return endpoint.decoded(answer, ClusterReport)


def settled_report(endpoint: Endpoint) -> ClusterReport:
    """Return a report once every worker has sent a new heartbeat and is connected, or the last one at the deadline.

    Clocks are compared by heartbeats, and a late heartbeat looks like a clock that is behind: of several heartbeats,
    the one with the shortest delay counts.
    """
    first = read_report(endpoint)
    heartbeats = {_identity(worker): worker.num_heartbeats for worker in first.workers}
    deadline = time.monotonic() + first.dead_after_seconds + MARGIN_SECONDS
    best: dict[str, float] = {}
    while True:
        report = _with_offsets(read_report(endpoint), best)
        is_heard = all(
            worker.num_heartbeats > heartbeats.setdefault(_identity(worker), 0) or is_stale(worker, report)
            for worker in report.workers
        )
        if (is_heard and not _may_pass(report)) or time.monotonic() > deadline:
            return report
        time.sleep(POLL_SECONDS)


def shows_right_secret(membership: str, secret: str) -> bool | None:
    """Return whether ``secret`` opens a connection to ``membership``; None if no router answers there."""
    import zmq

    context = zmq.Context()
    security = SocketSecurity(context, secret)
    dialled = context.socket(zmq.DEALER)
    security.protect_connecting(dialled)
    failures = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    failures |= zmq.EVENT_HANDSHAKE_FAILED_AUTH
    monitor = dialled.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | failures)
    try:
        dialled.setsockopt(zmq.IPV6, 1)
        dialled.connect(membership)
        if not monitor.poll(int(1000 * HANDSHAKE_SECONDS)):
            return None
        return int.from_bytes(monitor.recv_multipart()[0][:2], "little") == zmq.EVENT_HANDSHAKE_SUCCEEDED
    finally:
        dialled.disable_monitor()
        monitor.close(linger=0)
        dialled.close(linger=0)
        security.close()
        context.term()


def _identity(worker: WorkerReport) -> str:
    return str(worker.info.party)


def _with_offsets(report: ClusterReport, best: dict[str, float]) -> ClusterReport:
    workers = []
    for worker in report.workers:
        if worker.clock_offset_seconds is not None:
            known = best.get(_identity(worker), worker.clock_offset_seconds)
            best[_identity(worker)] = max(known, worker.clock_offset_seconds)
        workers.append(msgspec.structs.replace(worker, clock_offset_seconds=best.get(_identity(worker))))
    return msgspec.structs.replace(report, workers=workers)


def _may_pass(report: ClusterReport) -> bool:
    """Return whether the report shows a problem that may pass by itself."""
    return (
        not report.workers
        or any(worker.state is WorkerState.CONNECTING for worker in report.workers)
        or any(link is None or not link.transport for _, _, link in pairs(report))
        or any(abs(worker.clock_offset_seconds or 0.0) > MAX_CLOCK_OFFSET_SECONDS for worker in report.workers)
    )
