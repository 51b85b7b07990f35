"""Drains of workers, as operators ask for them. Pure."""

from splitserve.protocol.cluster_report import WorkerState
from splitserve.router.links.membership import Membership
from splitserve.router.links.worker_record import WorkerRecord
from splitserve.router.requests.operations.refusal import OperationRefusedError, RefusalReason


def worker_named(membership: Membership, engine_id: str) -> WorkerRecord:
    """Return the worker with this name. Raises :class:`OperationRefusedError` that names the known ones."""
    records = {record.info.party.engine_id: record for record in membership.records()}
    if engine_id not in records:
        known = ", ".join(sorted(records)) or "none"
        message = f"there is no worker {engine_id[:100]!r}; known: {known}"
        raise OperationRefusedError(RefusalReason.UNKNOWN_WORKER, message)
    return records[engine_id]


def check_drain(membership: Membership, record: WorkerRecord, *, force: bool, is_frozen: bool) -> None:
    """Raise :class:`OperationRefusedError` for a worker that can't drain now, or that only ``force`` drains: the last
    of its role that takes requests."""
    name, role = record.info.party.engine_id, record.info.role
    if is_frozen:
        message = f"{name} is frozen and would never finish its requests: resume first"
        raise OperationRefusedError(RefusalReason.PAUSED, message)
    if not record.is_linked:
        message = f"{name} is {record.state}, not ready: only a worker with a link can drain"
        raise OperationRefusedError(RefusalReason.NOT_READY, message)
    others = [
        each
        for each in membership.records()
        if each is not record and each.info.role is role and each.state is WorkerState.READY
    ]
    if not (others or force or record.state is WorkerState.DRAINING):
        message = f'{name} is the last {role} worker that takes requests: send "force": true to drain it all the same'
        raise OperationRefusedError(RefusalReason.LAST_WORKER, message)
