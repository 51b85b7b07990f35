"""Membership of workers: which are registered and alive, and what each has in flight. Pure; time is an argument.

    CONNECTING --link up--> READY --link down, heartbeats stop--> LOST --heartbeat--> CONNECTING
         |                    |                                   ^ ^
         |------Draining------'--> DRAINING --link down, silence--' |
         '----------------------------------------------------------'

A draining worker gets no new requests; its requests in flight continue.

A worker leaves the table when it sends Leave, when a new incarnation of it registers, or when it has been LOST for
``forget_after_seconds``. A replaced incarnation never comes back, however late its messages are.

Messages about a worker are accepted only from the connection that registered it. Another connection takes its place
only with the token that the first one was given; a new incarnation replaces only one that is LOST. So a forged message
changes no worker's state.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.membership import PeerLink, WorkerInfo
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.router.links.worker_record import Charge, WorkerRecord
from splitserve.router.placement.policies import (
    NO_STEP_MODEL,
    Disaggregated,
    Placed,
    RequestShape,
    Snapshot,
)
from splitserve.router.placement.step_models import trusted_model

MAX_WORKERS = 4096
MAX_REPLACED_INCARNATIONS = 4096
_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Registration:
    """Answer to a Register."""

    refusal: str | None = None  # the reason if it is refused
    for_good: bool = True  # a refusal is final: another attempt would be refused, too
    must_dial: bool = False  # the worker has no link, or has lost it
    token: str = ""  # see :class:`splitserve.protocol.messages.membership.Registered`


class Membership:
    def __init__(
        self,
        dead_after_seconds: float,
        forget_after_seconds: float,
        new_token: Callable[[], str] = lambda: secrets.token_hex(_TOKEN_BYTES),
    ) -> None:
        self._dead_after_seconds = dead_after_seconds
        self._forget_after_seconds = forget_after_seconds
        self._new_token = new_token
        self._records: dict[str, WorkerRecord] = {}
        self._replaced: dict[Party, None] = {}  # in order of arrival

    # ---- events ----

    def register(
        self, sender: Party, info: WorkerInfo, now: float, connection: bytes = b"", token: str = ""
    ) -> Registration:
        """Register a worker, or return the reason for a refusal. Registering twice is harmless."""
        if info.party != sender:
            return Registration(refusal=f"it registers {info.party} but is {sender}")
        if sender in self._replaced:
            return Registration(refusal="this incarnation has left, or a newer one took its place")
        known = self._records.get(sender.engine_id)
        if known is None and len(self._records) >= MAX_WORKERS:
            return Registration(refusal=f"there are {MAX_WORKERS} workers already", for_good=False)
        if (problem := info.layout.problem) is not None:
            advice = "run the same version of Splitserve on router and workers"
            return Registration(refusal=f"the router can't use its KV layout: {problem}; {advice}")
        if (mismatch := self._mismatch(info)) is not None:
            return Registration(refusal=mismatch)
        if known is not None and (holder := _holder(known, sender, connection, token)) is not None:
            return Registration(refusal=holder, for_good=False)
        if known is not None and known.info.party == sender:
            was_lost = known.state is WorkerState.LOST
            known.state = WorkerState.CONNECTING if was_lost else known.state
            known.last_heard, known.connection = now, connection
            return Registration(must_dial=was_lost, token=known.token)
        record = self._records[sender.engine_id] = WorkerRecord(
            info, now, connection=connection, token=self._new_token()
        )
        if known is not None:  # LOST: its link has ended
            self._mark_replaced(known.info.party)
        return Registration(must_dial=True, token=record.token)

    def heartbeat(
        self,
        sender: Party,
        load: WorkerLoad,
        now: float,
        links: Sequence[PeerLink] = (),
        clock_offset_seconds: float | None = None,
        *,
        step_model: StepModel = NO_STEP_MODEL,
    ) -> WorkerState | None:
        """Record a heartbeat. Return the worker's state before it (LOST: dial it again); None for a stale sender."""
        record = self.get(sender)
        if record is None:
            return None
        before = record.state
        record.load, record.links, record.clock_offset_seconds = load, links, clock_offset_seconds
        record.last_heard = now
        record.num_heartbeats += 1
        record.link_rates = {link.peer: link.bytes_per_second for link in links if link.bytes_per_second}
        record.own_model = step_model
        if not step_model.num_steps:
            record.estimate = step_model
        pool = (each.known_steps for each in self._others(record) if each.info.role is record.info.role)
        alike = (each.known_steps for each in self._others(record) if _are_alike(each, record))
        record.step_model = trusted_model(record.known_steps, pool, alike)
        record.on_change()
        if before is WorkerState.LOST:
            record.state = WorkerState.CONNECTING
        return before

    def _others(self, record: WorkerRecord) -> Iterator[WorkerRecord]:
        """Yield the other workers that aren't lost."""
        return (each for each in self._records.values() if each is not record and each.state is not WorkerState.LOST)

    def link_up(self, party: Party) -> None:
        record = self.get(party)
        if record is not None and record.state is WorkerState.CONNECTING:
            record.state = WorkerState.READY

    def drain(self, party: Party) -> bool:
        """Mark a worker that takes no more requests. Return whether its state changed."""
        record = self.get(party)
        if record is None or record.state in (WorkerState.DRAINING, WorkerState.LOST):
            return False
        record.state = WorkerState.DRAINING
        return True

    def lose(self, party: Party) -> bool:
        """Mark a worker LOST whose link is down. Return whether its state changed."""
        record = self.get(party)
        if record is None or record.state is WorkerState.LOST:
            return False
        record.state = WorkerState.LOST
        return True

    def leave(self, party: Party) -> bool:
        """Remove a worker for good. Return whether it was there."""
        is_news = self.forget(party)
        if is_news:
            self._mark_replaced(party)
        return is_news

    def forget(self, party: Party) -> bool:
        """Remove a worker as if it had never registered; it may register again. Return whether it was there."""
        if self.get(party) is None:
            return False
        del self._records[party.engine_id]
        return True

    def expire(self, now: float) -> list[Party]:
        """Mark workers LOST whose heartbeats stopped, and return them; forget those that were lost long ago."""
        silent = []
        for engine_id, record in list(self._records.items()):
            silence_seconds = now - record.last_heard
            if record.state is not WorkerState.LOST and silence_seconds > self._dead_after_seconds:
                record.state = WorkerState.LOST
                silent.append(record.info.party)
            elif record.state is WorkerState.LOST and silence_seconds > self._forget_after_seconds:
                del self._records[engine_id]
        return silent

    def excuse_silence(self, now: float) -> None:
        """Restart all heartbeat time-outs, after a time in which the router itself was not running."""
        for record in self._records.values():
            if record.state is not WorkerState.LOST:
                record.last_heard = now

    def charge(self, placement: Placed, shape: RequestShape, now: float) -> Charge:
        """Count a placed request against its workers, until the charge is released."""
        charge = Charge(
            prefill=self.get(prefill_party(placement)),
            decode=self.get(decode_party(placement)),
            num_prompt_tokens=shape.num_prompt_tokens,
            matched_tokens=placement.matched_tokens,
        )
        charge.apply(now)
        return charge

    # ---- queries ----

    def get(self, party: Party) -> WorkerRecord | None:
        """Return the record of exactly this incarnation; None if there is none."""
        record = self._records.get(party.engine_id)
        return record if record is not None and record.info.party == party else None

    def speaks_for(self, connection: bytes, party: Party) -> bool:
        """Return whether ``connection`` is the one that registered exactly this incarnation."""
        record = self.get(party)
        return record is not None and record.connection == connection

    def __len__(self) -> int:
        """Return the number of known workers."""
        return len(self._records)

    def records(self) -> list[WorkerRecord]:
        return list(self._records.values())

    def states(self) -> list[tuple[Party, WorkerState]]:
        """Return the state of each worker; it differs whenever a worker has come, gone or changed."""
        return [(record.info.party, record.state) for record in self._records.values()]

    def usable(self, now: float) -> list[WorkerRecord]:
        """Return the ready workers; those with an open breaker only if their role has no others."""
        is_ready = WorkerState.READY
        ready = [record for record in self._records.values() if record.state is is_ready]
        trusted = [record for record in ready if record.breaker.open_until <= now]
        if len(trusted) == len(ready):
            return ready
        trusted_roles = {record.info.role for record in trusted}
        return [r for r in ready if r.breaker.allows(now) or r.info.role not in trusted_roles]

    def snapshot(self, now: float, matches: Mapping[Party, int] = MappingProxyType({})) -> Snapshot:
        """Return the usable workers as policies see them. ``matches``: tokens of a request's prompt that each worker
        holds, as far as known."""
        views = tuple([record.view(now) for record in self.usable(now)])
        for party, num_tokens in matches.items():
            if (record := self.get(party)) is not None:
                record.view(now, num_tokens)
        return Snapshot(views)

    def are_alike(self, now: float) -> bool:
        """Return whether all usable workers have the same model and device."""
        workers = self.usable(now)
        return all(_are_alike(workers[0], other) for other in workers[1:])

    def of_all_routers(self) -> float:
        """Return the requests in flight of all routers over those of this one; 1.0 if it has none."""
        own = sum(record.num_requests for record in self._records.values())
        every = sum(record.num_requests_of_all for record in self._records.values())
        return every / own if own else 1.0

    def is_connected(self) -> bool:
        """Return whether a decode worker can read from a prefill worker now; else the first request has to wait."""
        ready = (record for record in self._records.values() if record.state is WorkerState.READY)
        return any(record.load.peers_ready for record in ready if record.info.role is not Role.PREFILL)

    def vocab_size(self) -> int | None:
        """Return the vocabulary size, which all workers share; None while there is no worker."""
        return next((record.info.vocab_size for record in self._records.values()), None)

    def check_invariants(self) -> None:
        for engine_id, record in self._records.items():
            party, charges = record.info.party, record.charges
            assert party.engine_id == engine_id, f"{party} is known as {engine_id}"
            assert party not in self._replaced, f"{party} is known although another one took its place"
            assert not charges.is_negative, f"{party} is charged {charges}, less than nothing"
            record.check_view()
        assert len(self._records) <= MAX_WORKERS, f"{len(self._records)} workers are known"
        assert len(self._replaced) <= MAX_REPLACED_INCARNATIONS, f"{len(self._replaced)} incarnations are remembered"

    def _mismatch(self, info: WorkerInfo) -> str | None:
        """Return the difference between ``info`` and the present workers, of which the first determines the model; None
        if there is none."""
        for record in self._records.values():
            other = record.info
            if record.state is WorkerState.LOST or other.party.engine_id == info.party.engine_id:
                continue
            its: LayoutRecord = info.layout
            if (difference := its.mismatch(other.layout)) is not None:
                return f"its KV layout differs from worker {other.party.engine_id}'s: {difference}"
            if other.vocab_size != info.vocab_size:
                return f"vocab_size: {info.vocab_size} against worker {other.party.engine_id}'s {other.vocab_size}"
        return None

    def _mark_replaced(self, party: Party) -> None:
        self._replaced[party] = None
        if len(self._replaced) > MAX_REPLACED_INCARNATIONS:
            del self._replaced[next(iter(self._replaced))]


def _holder(known: WorkerRecord, sender: Party, connection: bytes, token: str) -> str | None:
    """Return the reason why ``connection`` can't register ``sender`` while ``known`` is there; None if it can."""
    if known.info.party != sender:
        alive = known.state is not WorkerState.LOST
        return f"another process is registered as {sender.engine_id} and alive: give it another name" if alive else None
    is_same = connection == known.connection or secrets.compare_digest(token.encode(), known.token.encode())
    return None if is_same else "another connection registered this incarnation, and this one doesn't show its token"


def prefill_party(placement: Placed) -> Party:
    return placement.prefill if isinstance(placement, Disaggregated) else placement.worker


def decode_party(placement: Placed) -> Party:
    return placement.decode if isinstance(placement, Disaggregated) else placement.worker


def _are_alike(one: WorkerRecord, other: WorkerRecord) -> bool:
    """Return whether two workers have the same model and device."""
    mine, its = one.info, other.info
    return mine.layout == its.layout and mine.setup.device == its.setup.device
