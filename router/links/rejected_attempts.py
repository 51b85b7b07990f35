"""Rejected attempts to join: refused registrations, and connections without the cluster's secret. Pure.

They are recorded for the search for a missing worker, both in bounded number and for a bounded time.
"""

from collections import OrderedDict
from dataclasses import dataclass

from splitserve.protocol.cluster_report import RefusedWorker, Stranger
from splitserve.protocol.messages.membership import WorkerInfo

MAX_REMEMBERED = 64
UNKNOWN = "an unknown address"
REFUSED_SECONDS = 600.0
STRANGER_SECONDS = 30.0
"""A worker with another secret tries again several times a second, one without a secret every few seconds. Attempts
older than this have therefore stopped."""


@dataclass(slots=True)
class _Attempts:
    number: int
    last_at: float


class RejectedAttempts:
    """The record of rejected attempts. All times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._refused: OrderedDict[str, tuple[WorkerInfo, str, float]] = OrderedDict()
        self._strangers: OrderedDict[str, _Attempts] = OrderedDict()

    def refuse(self, info: WorkerInfo, reason: str, now: float) -> None:
        self._refused.pop(info.party.engine_id, None)
        self._refused[info.party.engine_id] = (info, reason, now)
        if len(self._refused) > MAX_REMEMBERED:
            self._refused.popitem(last=False)

    def forgive(self, engine_id: str) -> None:
        """Forget the refusals of a worker that has registered since."""
        self._refused.pop(engine_id, None)

    def stranger(self, address: str, now: float) -> None:
        """Record a connection from ``address`` ("": not known) that failed without the secret."""
        known = self._strangers.pop(address, None)
        goes_on = known is not None and now - known.last_at <= STRANGER_SECONDS
        self._strangers[address] = _Attempts((known.number if known and goes_on else 0) + 1, now)
        if len(self._strangers) > MAX_REMEMBERED:
            self._strangers.popitem(last=False)

    def refused(self, now: float) -> list[RefusedWorker]:
        return [
            RefusedWorker(
                engine_id=info.party.engine_id,
                machine=info.setup.machine,
                endpoint=info.endpoint,
                reason=reason,
                seconds_ago=now - at,
            )
            for info, reason, at in self._refused.values()
            if now - at <= REFUSED_SECONDS
        ]

    def strangers(self, now: float) -> list[Stranger]:
        recent = {
            address: attempts
            for address, attempts in self._strangers.items()
            if now - attempts.last_at <= STRANGER_SECONDS
        }
        if len(recent) > 1:
            recent.pop("", None)  # most likely one of the known addresses
        return [
            Stranger(address=address or UNKNOWN, num_attempts=attempts.number, seconds_ago=now - attempts.last_at)
            for address, attempts in recent.items()
        ]
