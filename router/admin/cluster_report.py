"""The answer to GET /admin/workers, made of the router's own records."""

import os
import socket
import time

from splitserve import __version__
from splitserve.protocol.cluster_report import ClusterReport, RequestRates, WorkerReport
from splitserve.protocol.config import RouterConfig
from splitserve.router.links.fleet import Fleet
from splitserve.router.links.worker_record import WorkerRecord


def cluster_report(config: RouterConfig, fleet: Fleet, rates: RequestRates, now: float) -> ClusterReport:
    """Return the report; ``now`` is the event loop's time, whose clock the records use."""
    return ClusterReport(
        version=__version__,
        machine=socket.gethostname(),
        pid=os.getpid(),
        clock_seconds=time.time(),
        model=config.model,
        served_model_name=config.served_model_name,
        membership=fleet.endpoint,
        has_secret=bool(config.secret),
        heartbeat_seconds=config.protocol.heartbeat_seconds,
        dead_after_seconds=config.protocol.dead_after_seconds,
        workers=[_worker_report(record, now) for record in fleet.membership.records()],
        refused=fleet.rejected_attempts.refused(now),
        strangers=fleet.rejected_attempts.strangers(now),
        rates=rates,
    )


def _worker_report(record: WorkerRecord, now: float) -> WorkerReport:
    return WorkerReport(
        info=record.info,
        state=record.state,
        silent_seconds=now - record.last_heard,
        num_heartbeats=record.num_heartbeats,
        load=record.load,
        links=list(record.links),
        clock_offset_seconds=record.clock_offset_seconds,
        step_model=record.own_model,
    )
