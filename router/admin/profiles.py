"""Profiles of the workers, on request: sends the request to all workers and collects their reports."""

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.messages.requests import Profile, Profiled
from splitserve.protocol.request import Party
from splitserve.router.http.api_error import ApiError
from splitserve.router.links.fleet import Fleet
from splitserve.router.requests.operations.drains import worker_named

MAX_STEPS = 100_000
MAX_SECONDS = 600.0
MAX_PROFILE_BODY_BYTES = 4096
REPORT_SECONDS = 60.0
"""Time that a worker may take to write and read its trace."""


class ProfileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /admin/profile."""

    num_steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] = 100
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = 60.0
    worker: str = ""  # its name; "": all ready workers


def parse_profile_request(body: bytes) -> ProfileRequest:
    """Parse the body; raises :class:`ApiError` 400 that names the fault."""
    try:
        return msgspec.json.decode(body or b"{}", type=ProfileRequest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"body: {error}") from error


@dataclass(slots=True)
class _Run:
    """One request for profiles."""

    missing: set[Party]  # workers that have yet to report
    reports: dict[Party, Profiled] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Profiles:
    """Requests for profiles in flight. For use on the event loop. Late and unrequested reports are dropped."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._runs: dict[str, _Run] = {}

    async def take(self, num_steps: int, timeout_seconds: float, worker: str = "") -> dict[str, Any]:
        """Let every ready worker, or one of them, record its next ``num_steps`` steps, for at most ``timeout_seconds``.

        Returns a report for each worker, by engine id: the recording, or ``{"error": ...}``. Raises
        :class:`OperationRefusedError` for a worker that isn't known.
        """
        profile_id = secrets.token_hex(8)
        membership = self._fleet.membership
        records = [worker_named(membership, worker)] if worker else membership.records()
        workers = [record.info.party for record in records if record.state is WorkerState.READY]
        body = Profile(profile_id, num_steps, timeout_seconds)
        run = self._runs[profile_id] = _Run({worker for worker in workers if self._fleet.send(worker, body)})
        try:
            if run.missing:
                async with asyncio.timeout(timeout_seconds + REPORT_SECONDS):
                    await run.done.wait()
        except TimeoutError:
            pass  # the missing workers' reports become errors
        finally:
            del self._runs[profile_id]
        return {worker.engine_id: _as_json(run.reports.get(worker)) for worker in workers}

    def close(self) -> None:
        """End all waits: no further report will come."""
        for run in self._runs.values():
            run.done.set()

    def on_report(self, sender: Party, report: Profiled) -> bool:
        """Take in a report; return False if no request waits for it."""
        run = self._runs.get(report.profile_id)
        if run is None or sender not in run.missing:
            return False
        run.missing.remove(sender)
        run.reports[sender] = report
        if not run.missing:
            run.done.set()
        return True


def _as_json(report: Profiled | None) -> dict[str, Any]:
    if report is None:
        return {"error": "no report came in time; has the worker requests to run?"}
    if report.error:
        return {"error": report.error}
    seconds = report.seconds or 1e-9
    return {
        "trace": report.trace,
        "steps": report.num_steps,
        "seconds": report.seconds,
        "device_busy_share": report.busy_seconds / seconds,
        "long_gap_share": report.long_gap_seconds / seconds,
    }
