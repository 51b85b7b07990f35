"""The order in which requests begin while the workers are full. Pure; time is an argument.

Higher priorities (lower numbers) begin first. Among equal ones, the tenant that has had the least, by its weight, is
next: start-time fair queueing, where a request costs the tokens that it takes. A tenant's own requests begin by their
deadlines: arrival plus the objective of their class.

The rate at which requests begin is measured while some wait; at first a predicted rate counts as well. It predicts the
wait of a newcomer from what begins before it: what its tenant has queued with earlier deadlines, at the tenant's share
of the rate, after higher priorities.
"""

import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TypeAlias

from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.queue.classes import USUAL_TTFT_SECONDS
from splitserve.router.requests.queue.tenants import Tenants

RATE_SECONDS = 5.0
"""Time constant of the measured rate."""
LEAST_BEGUN = 4.0
"""Requests that the measured rate goes back to at least, however long ago they began: outputs of minutes leave minutes
between them."""
PREDICTED_REQUESTS = 4.0
"""Requests that the predicted rate counts as in the beginning; it fades as time is measured and requests begin. By one
or two requests that began in a fifth of a second the rate can be a quarter of the true one, and requests would be
refused for it."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the queue."""

    request: ActiveRequest
    cost: float  # tokens
    due_at: float
    number: int  # in order of arrival
    interval: float  # predicted seconds from its begin to the next one

    @property
    def rank(self) -> tuple[float, int]:
        """Place among the requests of its tenant and priority: by deadline, then by arrival."""
        return self.due_at, self.number


def _rank(waiting: Waiting) -> tuple[float, int]:
    return waiting.rank


@dataclass(slots=True)
class _Lane:
    """The requests of one tenant with one priority, by rank."""

    waiting: list[Waiting] = field(default_factory=list)
    prompts: list[Waiting] = field(default_factory=list)  # those of them without anything to decode
    cost: float = 0.0
    interval: float = 0.0  # sum, as of the cost

    def add(self, waiting: Waiting) -> None:
        for each in self._lists_of(waiting):
            insort(each, waiting, key=_rank)
        self.cost += waiting.cost
        self.interval += waiting.interval

    def remove(self, waiting: Waiting) -> None:
        for each in self._lists_of(waiting):
            del each[bisect_left(each, waiting.rank, key=_rank)]
        self.cost -= waiting.cost
        self.interval -= waiting.interval

    def _lists_of(self, waiting: Waiting) -> list[list[Waiting]]:
        return [self.waiting, self.prompts] if waiting.request.is_prompt_only else [self.waiting]

    def cost_before(self, due_at: float) -> float:
        return sum(each.cost for each in self.waiting if each.due_at <= due_at)


@dataclass(slots=True)
class _Begun:
    """Requests that have begun, faded: their tokens, their number, and the seconds between them."""

    tokens: float = 0.0
    number: float = 0.0
    seconds: float = 0.0

    def add(self, cost: float, seconds: float, kept: float) -> None:
        """Add a request that began ``seconds`` after the one before; of the earlier ones a share is ``kept``."""
        self.tokens = self.tokens * kept + cost
        self.number = self.number * kept + 1
        self.seconds = self.seconds * kept + seconds


class BeginRate:
    """Tokens per second of the requests that begin, while some wait.

    The greater of two means: of the last seconds, by which the rate is soon right after a change, and of the last
    requests, which don't fade while none begins. The time since the last request counts like that between two.

    The first request that begins after the queue was empty counts half. On average it came in the middle of another
    one's service, so it waited for half a service: with short queues the rate would be up to twice the true one
    otherwise. This is exact for one worker and equal requests; elsewhere the rate may be up to 15% too low.
    """

    def __init__(self) -> None:
        self._recent = _Begun()  # in the last seconds
        self._last = _Begun()  # in the last seconds, or the last few if these go back further
        self._open_seconds = 0.0  # of waits since the last one
        self._at: float | None = None
        self._was_empty = True  # since the last request began

    def advance(self, now: float, *, is_busy: bool) -> None:
        """Count the time since the last call, if requests waited in it."""
        if self._at is not None and is_busy:
            self._open_seconds += max(0.0, now - self._at)
        self._was_empty = self._was_empty or not is_busy
        self._at = now

    def note_begun(self, cost: float) -> None:
        counted = cost / 2 if self._was_empty else cost
        kept = math.exp(-self._open_seconds / RATE_SECONDS)
        self._recent.add(counted, self._open_seconds, kept)
        least_kept = (LEAST_BEGUN - 1.0) / max(LEAST_BEGUN, self._last.number)
        self._last.add(counted, self._open_seconds, max(kept, least_kept))
        self._open_seconds = 0.0
        self._was_empty = False

    def tokens_per_second(self, cost: float = 0.0, interval: float = 0.0) -> float:
        """Return the rate; 0.0 while it isn't known. ``interval``: predicted seconds from one request that costs so
        much to the next that begins; without it, nothing is known until requests have waited for a while."""
        measured = min(1.0, self._last.seconds / RATE_SECONDS, self._last.number / LEAST_BEGUN)
        weight = PREDICTED_REQUESTS * (1.0 - measured) if interval else 0.0
        if not weight and self._last.seconds + self._open_seconds <= 0.1:
            return 0.0
        return max(
            (begun.tokens + weight * cost) / (begun.seconds + self._open_seconds + weight * interval)
            for begun in (self._recent, self._last)
        )


_Place: TypeAlias = tuple[int, str, tuple[float, int]]  # priority, tenant, rank


class FairQueue:
    """The waiting requests."""

    def __init__(self, tenants: Tenants) -> None:
        self.tenants = tenants
        self._lanes: dict[int, dict[str, _Lane]] = {}  # by priority, then by tenant
        self._by_id: dict[str, tuple[Waiting, _Lane]] = {}
        self._virtual_time = 0.0
        self._finish: dict[str, float] = {}  # by tenant: the virtual time up to which it has been served
        self._numbers = itertools.count()
        self._places: dict[bool, _Place] = {}  # of the last request of :meth:`in_turn`, by its ``prompts_only``
        self._rate = BeginRate()

    def __len__(self) -> int:
        return len(self._by_id)

    def requests(self) -> list[ActiveRequest]:
        """Return the waiting requests, in order of arrival."""
        return [waiting.request for waiting, _ in self._by_id.values()]

    def get(self, request_id: str) -> ActiveRequest | None:
        found = self._by_id.get(request_id)
        return None if found is None else found[0].request

    def put(self, request: ActiveRequest, cost: float, now: float, interval: float = 0.0) -> None:
        """Add a request that takes ``cost`` tokens; ``interval``: predicted seconds from its begin to the next one."""
        self._rate.advance(now, is_busy=bool(self._by_id))
        lane = self._lane(request)
        waiting = Waiting(request, cost, due_at(request), next(self._numbers), interval)
        lane.add(waiting)
        self._by_id[request.request_id] = waiting, lane

    def in_order(
        self, num_each: int, barred: Collection[str] = (), *, prompts_only: bool = False
    ) -> Iterator[ActiveRequest]:
        """Yield the waiting requests in the order in which they are to begin as things stand, of each tenant at most
        ``num_each`` of one priority, and none of ``barred`` tenants. ``prompts_only``: those without anything to
        decode. The queue may not change meanwhile."""
        for priority in sorted(self._lanes):
            queued = self._queued(self._lanes[priority], barred, prompts_only=prompts_only)
            # Among equals the one whose request is due first.
            for name in sorted(queued, key=lambda name: (self._start(name), queued[name][0].rank)):
                yield from (waiting.request for waiting in islice(queued[name], num_each))

    def in_turn(self, barred: Collection[str] = (), *, prompts_only: bool = False) -> Iterator[ActiveRequest]:
        """Yield all waiting requests once, but those of ``barred`` tenants, by priority, tenant and deadline, from the
        one after the last that an earlier call yielded: calls that look at a few come to each request, wherever it
        stands. ``prompts_only``: those without anything to decode, in turns of their own. The queue may not change
        meanwhile."""
        last = self._places.get(prompts_only)
        both = chain(*(self._after(place, barred, prompts_only=prompts_only) for place in (last, None)))
        for place, request in islice(both, self.num_except(barred, prompts_only=prompts_only)):
            self._places[prompts_only] = place
            yield request

    def num_except(self, barred: Collection[str], *, prompts_only: bool = False) -> int:
        """Return the number of waiting requests without those of ``barred`` tenants; ``prompts_only``: of those without
        anything to decode."""
        levels = (self._queued(lanes, barred, prompts_only=prompts_only) for lanes in self._lanes.values())
        return sum(len(queued) for level in levels for queued in level.values())

    def tenants_that_decode(self) -> set[str]:
        """Return the names of the tenants with waiting requests, all of which need a worker that decodes."""
        lanes = [pair for level in self._lanes.values() for pair in level.items()]
        return {name for name, _ in lanes} - {name for name, lane in lanes if lane.prompts}

    def _queued(
        self, lanes: dict[str, _Lane], barred: Collection[str], *, prompts_only: bool
    ) -> dict[str, list[Waiting]]:
        """Return the requests of one priority by tenant, by rank; tenants without any are left out."""
        every = {name: lane.prompts if prompts_only else lane.waiting for name, lane in lanes.items()}
        return {name: queued for name, queued in every.items() if queued and name not in barred}

    def _after(
        self, place: _Place | None, barred: Collection[str], *, prompts_only: bool
    ) -> Iterator[tuple[_Place, ActiveRequest]]:
        """Yield the requests after a place, each with its own; None: all."""
        for priority, lanes in sorted(self._lanes.items()):
            for name, queued in sorted(self._queued(lanes, barred, prompts_only=prompts_only).items()):
                start = 0
                if place is not None and (priority, name) <= place[:2]:
                    if (priority, name) < place[:2]:
                        continue
                    start = bisect_right(queued, place[2], key=_rank)
                for waiting in islice(queued, start, None):
                    yield (priority, name, waiting.rank), waiting.request

    def begin(self, request: ActiveRequest, now: float) -> None:
        """Take out a request that begins now, and charge its tenant."""
        self._rate.advance(now, is_busy=True)
        waiting, _ = self._by_id[request.request_id]
        self.remove(request.request_id)
        self.note_begun(request, waiting.cost)
        self._rate.note_begun(waiting.cost)

    def note_begun(self, request: ActiveRequest, cost: float) -> None:
        """Charge the tenant of a request that has begun."""
        name = request.context.tenant
        start = self._start(name)
        self._virtual_time = max(self._virtual_time, start)
        self._finish[name] = start + cost / self.tenants.named(name).weight
        if len(self._finish) > 2 * len(self.tenants.by_name) + 16:  # tenants that are gone
            self._finish = {each: at for each, at in self._finish.items() if at > self._virtual_time}

    def remove(self, request_id: str) -> bool:
        """Take out a request that doesn't begin; return False if it wasn't waiting."""
        found = self._by_id.pop(request_id, None)
        if found is None:
            return False
        waiting, lane = found
        lane.remove(waiting)
        if not lane.waiting:
            self._drop_empty()
        return True

    def predicted_wait(self, request: ActiveRequest, now: float, cost: float = 0.0, interval: float = 0.0) -> float:
        """Return the seconds until a request that comes now would begin; 0.0 while that isn't known. ``cost``,
        ``interval``: its own, as :meth:`put` has them. The predicted rate is that of all that wait: a short request's
        own is far from that of the long ones before it."""
        self._rate.advance(now, is_busy=bool(self._by_id))
        lanes, number = [lane for level in self._lanes.values() for lane in level.values()], 1 + len(self._by_id)
        mean_cost = (cost + sum(lane.cost for lane in lanes)) / number
        mean_interval = (interval + sum(lane.interval for lane in lanes)) / number
        rate = self._rate.tokens_per_second(mean_cost, mean_interval)
        if not rate:
            return 0.0
        priority, name = request.priority, request.context.tenant
        same = self._lanes.get(priority, {})
        before = sum(lane.cost for level, lanes in self._lanes.items() if level < priority for lane in lanes.values())
        own = same[name].cost_before(due_at(request)) if name in same else 0.0
        names = {name, *(each for each, lane in same.items() if lane.cost)}
        share = self.tenants.named(name).weight / sum(self.tenants.named(each).weight for each in names)
        others = sum(lane.cost for each, lane in same.items() if each != name)
        return (before + min(own / share, own + others)) / rate

    def _start(self, name: str) -> float:
        return max(self._virtual_time, self._finish.get(name, 0.0))

    def _lane(self, request: ActiveRequest) -> _Lane:
        return self._lanes.setdefault(request.priority, {}).setdefault(request.context.tenant, _Lane())

    def _drop_empty(self) -> None:
        self._lanes = {
            priority: kept
            for priority, lanes in self._lanes.items()
            if (kept := {name: lane for name, lane in lanes.items() if lane.waiting})
        }

    def check_invariants(self) -> None:
        num_in_lanes = sum(len(lane.waiting) for lanes in self._lanes.values() for lane in lanes.values())
        assert num_in_lanes == len(self._by_id), f"{num_in_lanes} requests are in lanes where {len(self._by_id)} wait"
        for lanes in self._lanes.values():
            for name, lane in lanes.items():
                cost = lane.cost_before(math.inf)
                assert math.isclose(lane.cost, cost, abs_tol=1e-6), f"{name} has {lane.cost} queued where {cost} are"
                assert lane.waiting == sorted(lane.waiting, key=_rank), f"{name}'s requests are out of order"
                assert lane.waiting, f"{name} has a lane without requests"
                prompts = [each for each in lane.waiting if each.request.is_prompt_only]
                assert lane.prompts == prompts, f"{name} has {len(prompts)} requests to score"


def due_at(request: ActiveRequest) -> float:
    """Return the time at which a request's first token is due."""
    seconds = request.context.request_class.ttft_ms / 1e3 or USUAL_TTFT_SECONDS
    return request.arrived_at + seconds
