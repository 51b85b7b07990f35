"""The gate before the workers: a request begins at once while they have room, and waits in the router while they are
full. Pure; time is an argument.

Workers serve what they are given in order of arrival. So the router gives them no more than keeps them busy, and keeps
the rest, where deadlines and shares decide.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import islice

from splitserve.protocol.request import Role
from splitserve.router.links.membership import Membership, decode_party, prefill_party
from splitserve.router.links.worker_record import WorkerRecord
from splitserve.router.placement.placer import Placer
from splitserve.router.placement.policies import NoWorker, Placed, context_limits
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.effects import CancelTimer, Count, Outbox, Refuse, SetTimer
from splitserve.router.requests.events import Timer, TimerKind
from splitserve.router.requests.queue.fair_queue import FairQueue
from splitserve.router.requests.queue.tenants import Tenants

AHEAD_SECONDS = 0.05
"""Predicted seconds of prompts that a worker still has when it is given the next one: enough to never be idle."""
RESERVED_SHARE = 1 / 8
"""Share of a worker's slots that tenants with more than their share of the running requests leave to the others."""
MAX_TRIES = 8  # first requests that are tried in a turn
TRIES_OF_TENANT = 4
MORE_TRIES = 4  # requests behind them that are tried in a turn
TURN_SECONDS = 0.01
"""Seconds between turns that try further requests while workers have room that the first ones don't take; more beside
many workers, among which a placement takes longer."""
WORKERS_OF_TURN = 8
TRY_MORE = Timer(TimerKind.TRY, "")
MISSED_OBJECTIVES = 2.0
"""A request is refused if its predicted TTFT exceeds its objective so many times."""


class Gate:
    """``begin`` starts a placed request, ``let_wait`` keeps one that none of the workers takes, outside the queue;
    ``num_of_tenant`` counts those that run.

    ``is_open``: nothing waits here whatever the load (no classes, no tenants)."""

    def __init__(
        self,
        placer: Placer,
        membership: Membership,
        outbox: Outbox,
        begin: Callable[[ActiveRequest, Placed, float], None],
        num_of_tenant: Counter[str],
        *,
        let_wait: Callable[[ActiveRequest, NoWorker, float], None],
        deadline_seconds: float,
        tenants: Tenants,
        is_open: bool,
    ) -> None:
        self._placer = placer
        self._membership = membership
        self._outbox = outbox
        self._begin = begin
        self._let_wait = let_wait
        self._num_of_tenant = num_of_tenant
        self._deadline_seconds = deadline_seconds
        self.is_open = is_open
        self.queue = FairQueue(tenants)
        self.is_trying = False  # a further turn is due
        self._num_untried = 0  # requests that haven't been tried since there may be more room

    def arrive(self, request: ActiveRequest, now: float) -> NoWorker | None:
        """Begin a request, queue it, or refuse it because its prediction is hopeless. Return why no worker could ever
        take it, for the waiting room."""
        placement = self._placer.first(request, now)
        if isinstance(placement, NoWorker):
            return placement
        if self.is_open or self._may_begin_at_once(request, placement, now):
            self._start(request, placement, now)
            return None
        self._enqueue(request, placement, now)
        return None

    def _enqueue(self, request: ActiveRequest, placement: Placed, now: float) -> None:
        """Queue a request. Refuse it by its prediction, unless it begins at once: in its turn, or since those before it
        wait for other workers."""
        seconds = self._compute_seconds(request, placement)
        interval = seconds / self._num_alike(placement, now)
        wait = self.queue.predicted_wait(request, now, self._cost(request), interval)
        waited = now - request.arrived_at
        predicted = waited + wait + self._queue_seconds(placement, now) + seconds
        self.queue.put(request, self._cost(request), now, interval)
        self._outbox.put(SetTimer(_timer(request.request_id), request.arrived_at + self._deadline_seconds))
        # Without requests in flight, no end of one would let the first in the queue begin.
        if not any(self._num_of_tenant.values()) or self._has_room(request, placement, now):
            self.pump(now)
        if self.queue.get(request.request_id) is None:
            return
        request.predicted_ttft_seconds = predicted
        objective = request.context.request_class.ttft_ms / 1e3
        if objective and predicted > MISSED_OBJECTIVES * objective:
            self.leave(request.request_id)
            self._refuse(request, objective)

    def pump(self, now: float) -> None:
        """Begin requests of the queue while workers have room. One that waits for its own worker lets those behind it
        begin at others; one that none of the workers takes any more leaves the queue. A turn tries few of them:
        further turns follow while some worker has room."""
        self._num_untried = len(self.queue)
        self._take_turn(now)

    def on_try_more(self, now: float, *, is_paused: bool) -> None:
        """Try further requests, unless a pause is on, whose end tries all."""
        self.is_trying = False
        if not is_paused:
            self._take_turn(now)

    def _take_turn(self, now: float) -> None:
        while len(self.queue) and self._any_room(now) and self._begin_next(now):
            pass
        if self._num_untried > 0 and len(self.queue) and not self.is_trying and self._any_room_by_role(now):
            self.is_trying = True
            num_shares = max(1.0, len(self._membership.usable(now)) / WORKERS_OF_TURN)
            self._outbox.put(SetTimer(TRY_MORE, now + num_shares * TURN_SECONDS))

    def _begin_next(self, now: float) -> bool:
        """Begin the first request that finds room; return False if none does, or all wait for a worker that decodes."""
        for request in self._to_try(self._barred(now), prompts_only=not self._any_slot(now)):
            placement = self._placer.first(request, now)
            if isinstance(placement, NoWorker):
                if context_limits(self._membership.snapshot(now)) is None:
                    return False  # the queue keeps its order
                self.leave(request.request_id)
                self._let_wait(request, placement, now)
                return True
            if self._has_room(request, placement, now):
                self.queue.begin(request, now)
                self._outbox.put(CancelTimer(_timer(request.request_id)))
                self._start(request, placement, now, is_charged=True)
                return True
        return False

    def _to_try(self, barred: Collection[str], *, prompts_only: bool) -> Iterator[ActiveRequest]:
        """Yield the first requests in order, and then a few of those behind them: others in each turn.
        ``prompts_only``: behind them those without anything to decode, the first of these in order as well."""
        self._num_untried = min(self._num_untried, self.queue.num_except(barred, prompts_only=prompts_only))
        tried = set[str]()
        for only in (False, True) if prompts_only else (False,):
            for request in islice(self.queue.in_order(TRIES_OF_TENANT, barred, prompts_only=only), MAX_TRIES):
                if request.request_id not in tried:
                    tried.add(request.request_id)
                    yield request
        num_first = len(tried)
        for request in self.queue.in_turn(barred, prompts_only=prompts_only):
            self._num_untried -= 1
            if request.request_id in tried:
                continue
            tried.add(request.request_id)
            yield request
            if len(tried) == num_first + MORE_TRIES:
                return

    def leave(self, request_id: str) -> bool:
        """Take out a request that doesn't begin; return False if it wasn't waiting."""
        if not self.queue.remove(request_id):
            return False
        self._outbox.put(CancelTimer(_timer(request_id)))
        return True

    def on_timer(self, request_id: str) -> None:
        """Refuse a request whose deadline has come in the queue."""
        if self.queue.remove(request_id):
            reason = f"the request waited {self._deadline_seconds:g} s for room at the workers"
            self._outbox.put(Refuse(request_id, reason))

    def close(self, reason: str) -> None:
        """Refuse all that wait."""
        for request in self.queue.requests():
            self.leave(request.request_id)
            self._outbox.put(Refuse(request.request_id, reason))

    def _start(self, request: ActiveRequest, placement: Placed, now: float, *, is_charged: bool = False) -> None:
        if not is_charged and not self.is_open:
            self.queue.note_begun(request, self._cost(request))
        if request.predicted_ttft_seconds is None:
            seconds = self._compute_seconds(request, placement)
            waited = now - request.arrived_at
            request.predicted_ttft_seconds = waited + self._queue_seconds(placement, now) + seconds if seconds else None
        self._placer.note_begun(request, placement, now)
        self._begin(request, placement, now)

    def _refuse(self, request: ActiveRequest, objective: float) -> None:
        predicted = request.predicted_ttft_seconds or 0.0
        name = request.context.request_class.name
        reason = (
            f"the first token is predicted after {predicted:.1f} s, more than {MISSED_OBJECTIVES:g} times the "
            f"{objective:g} s that are the objective of class {name}"
        )
        # Within the deadline all that wait now have begun, or are refused.
        retry_after = max(1, math.ceil(min(predicted - objective, self._deadline_seconds)))
        self._outbox.put(Refuse(request.request_id, reason, retry_after))
        self._outbox.put(Count("class_requests", (name, request.context.tenant, "refused")))

    def _cost(self, request: ActiveRequest) -> float:
        outputs = min(request.sampling.max_tokens, self._placer.sizes.output) * (1 + len(request.siblings))
        return len(request.token_ids) + outputs

    def _has_room(self, request: ActiveRequest, placement: Placed, now: float) -> bool:
        """Return whether the placement's workers would take up the request about now."""
        prefill = self._membership.get(prefill_party(placement))
        decode = self._membership.get(decode_party(placement))
        if prefill is None or decode is None:
            return True
        num_slots = _num_slots(decode, has_reserve=self._exceeds_share(request.context.tenant))
        return decode.num_requests_of_all < num_slots and prefill.queue_seconds(now) <= AHEAD_SECONDS

    def _barred(self, now: float) -> set[str]:
        """Return the waiting tenants with more than their share for which only reserved slots are left to decode in: it
        would be in vain to place their requests."""
        if any(each.num_requests_of_all < _num_slots(each, has_reserve=True) for each in self._decoding(now)):
            return set()
        return {name for name in self.queue.tenants_that_decode() if self._exceeds_share(name)}

    def _may_begin_at_once(self, request: ActiveRequest, placement: Placed, now: float) -> bool:
        """Return whether a newcomer may begin before it is queued: at a worker with room, which must be idle if others
        wait. They leave no worker idle that they could take."""
        is_idle = all(
            record is not None and not record.num_requests_of_all
            for record in map(self._membership.get, (prefill_party(placement), decode_party(placement)))
        )
        return (is_idle or not len(self.queue)) and self._has_room(request, placement, now)

    def _any_room(self, now: float) -> bool:
        """Return whether some worker would take a prompt, and some worker an output."""
        usable = self._membership.usable(now)
        return any(record.queue_seconds(now) <= AHEAD_SECONDS for record in usable) and any(
            record.num_requests_of_all < _num_slots(record) for record in usable
        )

    def _any_room_by_role(self, now: float) -> bool:
        """Return whether further turns are worth their time: workers of the roles that compute prompts have room, and
        those that decode as well, or those with room for a prompt that has nothing to decode."""
        usable, is_aggregated = self._membership.usable(now), self._placer.is_aggregated
        ready = [
            record
            for record in usable
            if (is_aggregated or record.info.role is not Role.DECODE) and record.queue_seconds(now) <= AHEAD_SECONDS
        ]
        if not ready or self._any_slot(now):
            return bool(ready)
        has_slot = any(record.num_requests_of_all < _num_slots(record) for record in ready)
        return has_slot and self.queue.num_except((), prompts_only=True) > 0

    def _any_slot(self, now: float) -> bool:
        """Return whether a worker of the roles that decode has a slot."""
        return any(record.num_requests_of_all < _num_slots(record) for record in self._decoding(now))

    def _decoding(self, now: float) -> list[WorkerRecord]:
        """Return the workers of the roles that decode."""
        usable, is_aggregated = self._membership.usable(now), self._placer.is_aggregated
        return [record for record in usable if is_aggregated or record.info.role is not Role.PREFILL]

    def _exceeds_share(self, tenant: str) -> bool:
        """Return whether a tenant has more than its share of the requests that run."""
        running = self._num_of_tenant
        return running[tenant] > self.queue.tenants.share_of(tenant) * sum(running.values())

    def _queue_seconds(self, placement: Placed, now: float) -> float:
        record = self._membership.get(prefill_party(placement))
        return 0.0 if record is None else record.queue_seconds(now)

    def _num_alike(self, placement: Placed, now: float) -> float:
        """Return the number of workers of the role of the one that computes the prompt: this router's share of them, by
        the requests in flight."""
        record = self._membership.get(prefill_party(placement))
        usable = self._membership.usable(now)
        number = sum(record is not None and each.info.role is record.info.role for each in usable)
        return max(1, number) / self._membership.of_all_routers()

    def _compute_seconds(self, request: ActiveRequest, placement: Placed) -> float:
        record = self._membership.get(prefill_party(placement))
        if record is None:
            return 0.0
        num_tokens = len(request.token_ids)
        matched = min(placement.matched_tokens, num_tokens)
        chunk_tokens = record.info.max_num_batched_tokens or num_tokens
        return record.step_model.prefill_seconds(matched, num_tokens - matched, chunk_tokens)


def _timer(request_id: str) -> Timer:
    return Timer(TimerKind.QUEUE, request_id)


def _num_slots(record: WorkerRecord, *, has_reserve: bool = False) -> int:
    """Return the number of requests that a worker runs at once; ``has_reserve``: less those that are kept for tenants
    with less than their share."""
    num_slots = max(1, record.info.max_num_seqs)
    return num_slots - int(RESERVED_SHARE * num_slots) if has_reserve else num_slots
