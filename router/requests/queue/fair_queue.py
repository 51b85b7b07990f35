"""The order in which requests begin while the workers are full. Pure; time is an argument.

Higher priorities (lower numbers) begin first. Among equal ones, the tenant that has had the least, by its weight, is
next: start-time fair queueing, where a request costs the tokens that it takes. A tenant's own requests begin by their
deadlines: arrival plus the objective of their class.

The rate at which requests begin is measured while some wait; at first a predicted rate counts as well. It predicts the
wait of a newcomer from what begins before it: what its tenant has queued with earlier deadlines, at the tenant's share
of the rate, after higher priorities.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

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
    is_gone: bool = False


@dataclass(slots=True)
class _Lane:
    """The requests of one tenant with one priority."""

    heap: list[tuple[float, int, Waiting]] = field(default_factory=list)  # by deadline, then by arrival
    cost: float = 0.0
    num_gone: int = 0  # requests in the heap that wait no more

    def first(self) -> Waiting | None:
        while self.heap and self.heap[0][2].is_gone:
            heapq.heappop(self.heap)
            self.num_gone -= 1
        return self.heap[0][2] if self.heap else None

    def remove(self, waiting: Waiting) -> None:
        """Take out a request. It stays in the heap until it comes first, or more than half of the heap is gone: the
        first one may wait for long while others leave behind it."""
        waiting.is_gone = True
        self.cost -= waiting.cost
        self.num_gone += 1
        if 2 * self.num_gone > len(self.heap):
            self.heap = [entry for entry in self.heap if not entry[2].is_gone]
            heapq.heapify(self.heap)
            self.num_gone = 0

    def in_order(self) -> Iterator[Waiting]:
        """Yield the requests by their deadlines. Only as much of the heap is ordered as is asked for."""
        found = [(self.heap[0][:2], 0)] if self.heap else []
        while found:
            _, place = heapq.heappop(found)
            if not self.heap[place][2].is_gone:
                yield self.heap[place][2]
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(self.heap):
                    heapq.heappush(found, (self.heap[child][:2], child))

    def cost_before(self, due_at: float) -> float:
        return sum(each.cost for due, _, each in self.heap if due <= due_at and not each.is_gone)


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


class FairQueue:
    """The waiting requests."""

    def __init__(self, tenants: Tenants) -> None:
        self.tenants = tenants
        self._lanes: dict[int, dict[str, _Lane]] = {}  # by priority, then by tenant
        self._by_id: dict[str, tuple[Waiting, _Lane]] = {}
        self._virtual_time = 0.0
        self._finish: dict[str, float] = {}  # by tenant: the virtual time up to which it has been served
        self._order = itertools.count()
        self._rate = BeginRate()

    def __len__(self) -> int:
        return len(self._by_id)

    def requests(self) -> list[ActiveRequest]:
        """Return the waiting requests, in order of arrival."""
        return [waiting.request for waiting, _ in self._by_id.values()]

    def get(self, request_id: str) -> ActiveRequest | None:
        found = self._by_id.get(request_id)
        return None if found is None else found[0].request

    def put(self, request: ActiveRequest, cost: float, now: float) -> None:
        """Add a request that takes ``cost`` tokens."""
        self._rate.advance(now, is_busy=bool(self._by_id))
        lane = self._lane(request)
        waiting = Waiting(request, cost, due_at(request))
        heapq.heappush(lane.heap, (waiting.due_at, next(self._order), waiting))
        lane.cost += cost
        self._by_id[request.request_id] = waiting, lane

    def in_order(self, num_each: int) -> Iterator[ActiveRequest]:
        """Yield the waiting requests in the order in which they are to begin as things stand, of each tenant at most
        ``num_each`` of one priority. The queue may not change meanwhile."""
        for priority in sorted(self._lanes):
            lanes = {name: lane for name, lane in self._lanes[priority].items() if lane.first() is not None}
            # Among equals the one whose request is due first.
            for name in sorted(lanes, key=lambda name: (self._start(name), lanes[name].heap[0][:2])):
                yield from (waiting.request for waiting in islice(lanes[name].in_order(), num_each))

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
        if lane.first() is None:
            self._drop_empty()
        return True

    def predicted_wait(self, request: ActiveRequest, now: float, cost: float = 0.0, interval: float = 0.0) -> float:
        """Return the seconds until a request that comes now would begin; 0.0 while that isn't known. ``cost``,
        ``interval``: its own, as :meth:`BeginRate.tokens_per_second` has them."""
        self._rate.advance(now, is_busy=bool(self._by_id))
        rate = self._rate.tokens_per_second(cost, interval)
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
            if (kept := {name: lane for name, lane in lanes.items() if lane.first() is not None})
        }

    def check_invariants(self) -> None:
        live = [each for lanes in self._lanes.values() for lane in lanes.values() for _, _, each in lane.heap]
        num_live = sum(not each.is_gone for each in live)
        assert num_live == len(self._by_id), f"{num_live} requests are in lanes where {len(self._by_id)} wait"
        for lanes in self._lanes.values():
            for name, lane in lanes.items():
                cost = lane.cost_before(math.inf)
                assert math.isclose(lane.cost, cost, abs_tol=1e-6), f"{name} has {lane.cost} queued where {cost} are"
                num_gone = sum(each.is_gone for _, _, each in lane.heap)
                assert lane.num_gone == num_gone, f"{name} counts {lane.num_gone} gone requests where {num_gone} are"
                assert 2 * num_gone <= len(lane.heap), f"{name} keeps {num_gone} gone requests of {len(lane.heap)}"


def due_at(request: ActiveRequest) -> float:
    """Return the time at which a request's first token is due."""
    seconds = request.context.request_class.ttft_ms / 1e3 or USUAL_TTFT_SECONDS
    return request.arrived_at + seconds
