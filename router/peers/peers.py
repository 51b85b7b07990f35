"""The other router processes on one port, as this router knows them from their reports. Pure; time is an argument.

Each router tells all others every ``REPORT_SECONDS`` its charges at the workers, its tenants' use and its pause, and at
once after a pause, a reset or a large prompt. Policies, limits and operators' answers see the sum. A router that is
lost, or silent for ``LOST_SECONDS``, counts no more; what it did is then known from the workers' heartbeats alone.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from splitserve.protocol.block_hash import root_hash
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.routers import (
    MAX_HASHES,
    MAX_TENANTS_REPORTED,
    PauseStamp,
    RouterReport,
    SentPrefixes,
    TenantUse,
    WorkerUse,
)
from splitserve.protocol.request import Party
from splitserve.router.links.membership import MAX_WORKERS, Membership
from splitserve.router.links.worker_record import Elsewhere
from splitserve.router.placement.prefix_view import PrefixView
from splitserve.router.requests.admission import Admission
from splitserve.router.requests.effects import Observe, Outbox, SetTimer, TellRouters
from splitserve.router.requests.events import Timer, TimerKind
from splitserve.router.requests.queue.tenants import Tenants
from splitserve.router.requests.queue.usage import TenantUsage

REPORT_SECONDS = 0.1
LOST_SECONDS = 2.0
LATE_SECONDS = 0.5
"""Time after the loss of a router in which its reports may still arrive."""
LEAST_BUSY_SHARE = 0.01
"""Share of a worker's time by prompts below which it is not reported."""
STAMPS_PER_SECOND = 1_000_000
SOON_SECONDS = 0.01
"""Least time between reports that only a large prompt causes."""
LARGE_PROMPT_TOKENS = 4096
MAX_SENT_PER_REPORT = 16 * MAX_HASHES
MAX_SENT_TO_NEWCOMER = 4 * MAX_HASHES
"""Blocks of each worker that a router which has just started is told of, the last ones."""
REPORT = Timer(TimerKind.REPORT, "")


@dataclass(slots=True)
class _Peer:
    """A router that has reported, and the tokens of each tenant that are counted here."""

    party: Party
    report: RouterReport
    heard_at: float
    num_tokens: dict[str, int] = field(default_factory=dict)


class Peers:
    """The others of the config, none if this router is alone: then nothing is exchanged."""

    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        prefixes: PrefixView,
        *,
        admission: Admission,
        usage: TenantUsage,
        outbox: Outbox,
    ) -> None:
        self.is_alone = not config.peers
        self.is_new = True  # it has heard of no other router before the present report
        self.is_reporting = False  # the timer is set
        self.is_urgent = False  # a report is due now
        self.pause = PauseStamp()
        self.reset = 0  # number of the last reset of prefix caches
        self.reset_done = 0  # of the last one that all workers have confirmed to this router
        self.tenants = Tenants()
        self.num_running = 0
        self.num_waiting = 0
        self._name = config.name
        self._others = frozenset(config.peers)
        self._membership = membership
        self._prefixes = prefixes
        self._admission = admission
        self._usage = usage
        self._outbox = outbox
        self._known: dict[str, _Peer] = {}
        self._has_heard = False
        self._unheard = set(config.peers)  # since this router's start, which may run all the same
        self._begun_at: float | None = None
        self._newcomers: list[Party] = []  # routers that are to be told what was sent, after the next report
        self._lost: dict[str, tuple[Party, float]] = {}  # the last one of a name, and when
        self._sums: dict[Party, Elsewhere] = {}  # of the last reports, by worker
        self._num_reports = 0
        self._reported_at = float("-inf")
        self._num_placed_tokens = 0  # since the last report
        self._sent: dict[Party, list[bytes]] = {}  # since the last report
        self._num_sent = 0
        self._early: dict[Party, list[bytes]] = {}  # sent to workers that haven't registered here yet
        if config.peers:
            prefixes.on_sent = self._note_sent

    # ---- the others ----

    @property
    def reports(self) -> list[RouterReport]:
        """Last reports of the other routers that are running."""
        return [peer.report for peer in self._known.values()]

    @property
    def parties(self) -> list[Party]:
        """Routers other than this one that are running."""
        return [peer.party for peer in self._known.values()]

    @property
    def are_all_heard(self) -> bool:
        return len(self._known) == len(self._others)

    @property
    def names_behind(self) -> list[str]:
        """Names of the other routers that, by their last reports, don't follow the last pause or resumption yet; those
        that were not heard since this router's start are among them for ``LOST_SECONDS``."""
        behind = {name for name, peer in self._known.items() if peer.report.pause < self.pause}
        return sorted(behind | self._unheard)

    @property
    def have_reset(self) -> bool:
        """True if this router and all others have carried out the last reset. Those that were not heard since this
        router's start are awaited for ``LOST_SECONDS``."""
        done = [self.reset_done, *(report.reset_done for report in self.reports)]
        return min(done) >= self.reset and not self._unheard

    def on_report(self, sender: Party, report: RouterReport, now: float) -> bool:
        """Take a report; return False for one that is out of date, or of no router that belongs here."""
        if sender.engine_id not in self._others:
            return False
        lost, lost_at = self._lost.get(sender.engine_id, (None, 0.0))
        if lost == sender and now - lost_at < LATE_SECONDS:
            return False
        self.is_new &= not self._has_heard
        self._has_heard = True
        self._unheard.discard(sender.engine_id)
        known = self._known.get(sender.engine_id)
        if known is None or known.party != sender:
            known = self._known[sender.engine_id] = _Peer(sender, report, now)
            self._welcome(sender, report, now)
        elif report.number <= known.report.number:
            return False
        else:
            self._outbox.put(Observe("router_report_gap_seconds", now - known.heard_at))
        known.report, known.heard_at = report, now
        self._count_tokens(known, now)
        self._add_up()
        return True

    def greet(self, name: str) -> None:
        """Tell a router again what was sent: it may have been heard before there was a connection to it."""
        if name in self._known:
            self._newcomers.append(self._known[name].party)

    def on_prefixes(self, sender: Party, message: SentPrefixes) -> bool:
        """Take blocks into account that another router has sent to a worker; return False if they are out of date."""
        known = self._known.get(sender.engine_id)
        if known is None or known.party != sender or message.reset != self.reset:
            return False
        if self._membership.get(message.worker) is None:
            kept = self._early.setdefault(message.worker, []) + message.hashes
            self._early[message.worker] = kept[-MAX_SENT_TO_NEWCOMER:]
            if len(self._early) > MAX_WORKERS:
                del self._early[next(iter(self._early))]
        else:
            self._note_hashes(message.worker, message.hashes)
        return True

    def _note_hashes(self, worker: Party, hashes: list[bytes]) -> None:
        record = self._membership.get(worker)
        if record is not None and record.state is not WorkerState.LOST and record.info.prefix_caching:
            layout = record.info.layout
            where = (root_hash(layout), layout.block_size)
            self._prefixes.note_hashes(worker, *where, hashes, record.num_kept_blocks)

    def lose(self, party: Party, now: float) -> None:
        """Forget a router that is gone, with all that it had in flight. Reports that were on their way don't count."""
        self._lost[party.engine_id] = party, now
        self._unheard.discard(party.engine_id)
        known = self._known.get(party.engine_id)
        if known is not None and known.party == party:
            del self._known[party.engine_id]
            self._add_up()

    def on_worker_ready(self, worker: Party) -> None:
        """Let a worker's new record have what the others have in flight there, and have sent it."""
        if (hashes := self._early.pop(worker, None)) is not None:
            self._note_hashes(worker, hashes)
        record = self._membership.get(worker)
        if record is not None and self._sums:
            record.elsewhere = self._sums.get(worker)

    def expire(self, now: float) -> None:
        """Forget routers that have been silent for too long."""
        for peer in list(self._known.values()):
            if now - peer.heard_at > LOST_SECONDS:
                self.lose(peer.party, now)
        if self._begun_at is not None and now - self._begun_at > LOST_SECONDS:
            self._unheard.clear()

    def _welcome(self, newcomer: Party, report: RouterReport, now: float) -> None:
        """Take over the tenants' use from a router that is heard for the first time, and tell it what it must know."""
        for use in report.tenants:
            self._usage.raise_level(self.tenants.named(use.name), use.level, now)
        self._known[newcomer.engine_id].num_tokens = {use.name: use.num_tokens for use in report.tenants}
        self._newcomers.append(newcomer)
        self.is_urgent = True

    def _count_tokens(self, peer: _Peer, now: float) -> None:
        """Count the tokens that tenants have used at another router since its last report."""
        for use in peer.report.tenants:
            new = use.num_tokens - peer.num_tokens.get(use.name, 0)
            if new > 0:
                self._usage.note_elsewhere(self.tenants.named(use.name), new, now)
        peer.num_tokens = {use.name: use.num_tokens for use in peer.report.tenants}

    def _add_up(self) -> None:
        """Let membership, admission and limits see the sum of what the others have in flight."""
        sums: dict[Party, Elsewhere] = {}
        in_flight: dict[str, int] = {}
        for report in self.reports:
            for use in report.workers:
                sums[use.worker] = sums.get(use.worker, Elsewhere()).plus(use)
            for tenant in report.tenants:
                in_flight[tenant.name] = in_flight.get(tenant.name, 0) + tenant.num_in_flight
        self._sums = sums
        for record in self._membership.records():
            record.elsewhere = sums.get(record.info.party)
        self._usage.in_flight_elsewhere = in_flight
        self._admission.num_elsewhere = sum(report.num_admitted for report in self.reports)
        self.num_running = sum(report.num_running for report in self.reports)
        self.num_waiting = sum(report.num_waiting for report in self.reports)

    # ---- this router ----

    def stamp(self, mode: str, now: float) -> None:
        """Number a pause ("": a resumption) that an operator has asked this router for."""
        self.pause = PauseStamp(_next_number(self.pause.number, now), self._name, mode)  # type: ignore[arg-type]
        self.is_urgent = not self.is_alone

    def stamp_reset(self, now: float) -> None:
        """Number a reset of the prefix caches that an operator has asked this router for."""
        self.reset = _next_number(self.reset, now)

    def note_placed(self, num_tokens: int, now: float) -> None:
        """Count a prompt that was placed: the others learn of large ones at once."""
        if self.is_alone:
            return
        self._num_placed_tokens += num_tokens
        if self._num_placed_tokens >= LARGE_PROMPT_TOKENS and now - self._reported_at >= SOON_SECONDS:
            self.is_urgent = True

    def _note_sent(self, worker: Party, hashes: list[bytes]) -> None:
        room = MAX_SENT_PER_REPORT - self._num_sent
        kept = hashes[-room:] if room > 0 else []  # the beginnings of prompts, which more of them share
        self._sent.setdefault(worker, []).extend(kept)
        self._num_sent += len(kept)

    def report(self, num_running: int, num_waiting: int, now: float) -> None:
        """Tell the others the state of this router."""
        self.is_urgent = False
        self._num_reports += 1
        self._reported_at, self._num_placed_tokens = now, 0
        ready = sum(record.state is WorkerState.READY for record in self._membership.records())
        report = RouterReport(
            number=self._num_reports,
            num_ready=ready,
            num_admitted=self._admission.num_admitted,
            num_running=num_running,
            num_waiting=num_waiting,
            workers=list(self._uses(now)),
            tenants=[TenantUse(*use) for use in islice(self._usage.uses(self.tenants, now), MAX_TENANTS_REPORTED)],
            pause=self.pause,
            reset=self.reset,
            reset_done=self.reset_done,
        )
        self._outbox.put(TellRouters(report))
        for worker, hashes in self._sent.items():
            self._tell_sent(worker, hashes)
        for newcomer in self._newcomers:
            for record in self._membership.records():
                party = record.info.party
                self._tell_sent(party, self._prefixes.sent_to(party, MAX_SENT_TO_NEWCOMER), newcomer)
        self._newcomers.clear()
        self._sent, self._num_sent = {}, 0

    def forget_sent(self) -> None:
        """Forget what was sent and not reported: the caches are reset."""
        self._sent, self._num_sent = {}, 0
        self._early.clear()

    def set_timer(self, now: float) -> None:
        self.is_reporting = True
        self._begun_at = now if self._begun_at is None else self._begun_at
        self._outbox.put(SetTimer(REPORT, now + REPORT_SECONDS))

    def _tell_sent(self, worker: Party, hashes: list[bytes], to: Party | None = None) -> None:
        for begin in range(0, len(hashes), MAX_HASHES):
            part = hashes[begin : begin + MAX_HASHES]
            self._outbox.put(TellRouters(SentPrefixes(worker, part, self.reset), to))

    def _uses(self, now: float) -> Iterator[WorkerUse]:
        """Yield what this router has in flight, by worker. Prompts keep a worker busy that were computed just now."""
        records = self._membership.records()
        is_idle = not any(record.num_requests for record in records)
        for record in records:
            busy_share = 0.0 if is_idle else record.prompts.busy_share(now)
            if record.num_requests or record.context_tokens or busy_share >= LEAST_BUSY_SHARE:
                yield WorkerUse(
                    record.info.party,
                    record.num_requests,
                    record.prefill_tokens,
                    record.context_tokens,
                    record.num_prefilling,
                    record.prompts.seconds(now),
                    busy_share,
                )

    def check_invariants(self) -> None:
        """Raise AssertionError if a worker is charged for others than the routers that are there."""
        in_flight: Counter[Party] = Counter()
        for report in self.reports:
            for use in report.workers:
                in_flight[use.worker] += use.num_requests
        for record in self._membership.records():
            party, found = record.info.party, record.elsewhere
            due = in_flight[party]
            assert found is None or found.num_requests == due, (
                f"{party} has {found} of other routers, which report {due} requests there"
            )
        assert self._known.keys() <= self._others, f"routers {self._known.keys() - self._others} don't belong here"


def _next_number(last: int, now: float) -> int:
    """Return the number of an operator's act, by a hybrid logical clock (Kulkarni et al., 2014): greater than all that
    were heard, and, by the clock that the routers of one machine share, than those of earlier acts that were not."""
    return max(last + 1, int(now * STAMPS_PER_SECOND))
