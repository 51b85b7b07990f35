"""Profiles of the workers, on request: asks them, and waits for what they say."""

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

MAX_STEPS = 100_000
MAX_SECONDS = 600.0
MAX_PROFILE_BODY_BYTES = 4096
REPORT_SECONDS = 60.0
"""How long a worker may take to write and read its trace."""


class ProfileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /admin/profile."""

    num_steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEPS)] = 100
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = 60.0


def parse_profile_request(body: bytes) -> ProfileRequest:
    """Raises :class:`ApiError` 400 that says what is wrong."""
    try:
        return msgspec.json.decode(body or b"{}", type=ProfileRequest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"body: {error}") from error


@dataclass(slots=True)
class _Run:
    """One request for profiles. ``missing`` have yet to report."""

    missing: set[Party]
    reports: dict[Party, Profiled] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Profiles:
    """Used on the event loop. What comes late, or from a worker that wasn't asked, is dropped."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._runs: dict[str, _Run] = {}

    async def take(self, num_steps: int, timeout_seconds: float) -> dict[str, Any]:
        """Let every ready worker record its next ``num_steps`` steps, for at most ``timeout_seconds``.

        A report for each, by engine id: ``{"error": ...}``, or what was recorded.
        """
        profile_id = secrets.token_hex(8)
        records = self._fleet.membership.records()
        workers = [record.info.party for record in records if record.state is WorkerState.READY]
        body = Profile(profile_id, num_steps, timeout_seconds)
        run = self._runs[profile_id] = _Run({worker for worker in workers if self._fleet.send(worker, body)})
        try:
            if run.missing:
                async with asyncio.timeout(timeout_seconds + REPORT_SECONDS):
                    await run.done.wait()
        except TimeoutError:
            pass  # those that are missing are reported as such
        finally:
            del self._runs[profile_id]
        return {worker.engine_id: _as_json(run.reports.get(worker)) for worker in workers}

    def close(self) -> None:
        """Nobody will report any more."""
        for run in self._runs.values():
            run.done.set()

    def on_report(self, sender: Party, report: Profiled) -> bool:
        """False if nobody waits for it."""
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
