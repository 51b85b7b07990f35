"""The requests that have begun and haven't ended, and the handling of their states' updates. Pure."""

from collections import Counter
from collections.abc import Iterator

from splitserve.protocol.messages.requests import Abort
from splitserve.router.links.membership import Membership
from splitserve.router.links.worker_record import NO_CHARGES, Charges
from splitserve.router.placement.policies import Placed
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.attempts import Attempts
from splitserve.router.requests.effects import Begun, CancelTimer, Count, Deliver, Ended, Outbox, Send, SetTimer
from splitserve.router.requests.events import Timer, TimerKind
from splitserve.router.requests.settlement import Settlement
from splitserve.router.requests.state import NOTHING, Failure, FailureReason, Update


class RequestTable:
    """Active requests. Each has a deadline, and either a charged attempt or a timer that triggers the next attempt."""

    def __init__(
        self,
        attempts: Attempts,
        settlement: Settlement,
        membership: Membership,
        outbox: Outbox,
        deadline_seconds: float,
    ) -> None:
        self._attempts = attempts
        self._settlement = settlement
        self._membership = membership
        self._outbox = outbox
        self._deadline_seconds = deadline_seconds
        self._requests: dict[str, ActiveRequest] = {}
        self.num_of_tenant: Counter[str] = Counter()
        self.num_begun = 0  # so far
        self.frozen_since: float | None = None  # the time from which no request's time passes

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Iterate over a copy of the current requests, which may end meanwhile."""
        return iter(list(self._requests.values()))

    def get(self, request_id: str) -> ActiveRequest | None:
        return self._requests.get(request_id)

    def begin(self, request: ActiveRequest, placement: Placed, now: float) -> None:
        """Start a new request's first attempt, and those of its siblings."""
        self._outbox.put(Count("prompt_tokens", amount=len(request.token_ids)))
        for each in (request, *request.siblings):
            self._requests[each.request_id] = each
            self.num_begun += 1
            self.num_of_tenant[each.context.tenant] += 1
            each.timeline.gap_seconds = self._settlement.gap_seconds
            self._outbox.put(Begun(each.request_id))
            self._set_deadline(each)
        self._attempts.start(request, placement, now)
        for each in (request, *request.siblings):
            each.state.was_disaggregated |= request.is_fallback

    def _set_deadline(self, request: ActiveRequest) -> None:
        deadline = request.arrived_at + self._deadline_seconds + request.held_seconds
        self._outbox.put(SetTimer(Timer(TimerKind.DEADLINE, request.request_id), deadline))

    def freeze(self, now: float) -> None:
        """Stop the time of all requests. No effect on frozen ones."""
        if self.frozen_since is None:
            self.frozen_since = now
            for request in self:
                self._outbox.put(CancelTimer(Timer(TimerKind.DEADLINE, request.request_id)))

    def thaw(self, now: float) -> None:
        """Let the time of all requests go on."""
        if self.frozen_since is not None:
            for request in self:
                request.held_seconds += now - self.frozen_since
                self._set_deadline(request)
            self.frozen_since = None

    def apply(self, request: ActiveRequest, update: Update, now: float) -> None:
        """Carry out the update of a transition of the request's state."""
        if update is NOTHING:
            return
        if update.token_ids:
            self._settlement.on_tokens(request, len(update.token_ids), now)
        for worker in update.aborts:
            self._outbox.put(Send(worker, Abort(request.state.key)))
        if update.retry:
            self._settlement.on_attempt_failed(request, now)
            self.go_on(request, now)
            return
        if update.ended:
            self._retire(request, now)
        self._outbox.put(Deliver(request.request_id, update))
        if update.ended:
            self._outbox.put(Ended(request))  # after the client has its last token

    def go_on(self, request: ActiveRequest, now: float) -> None:
        """Begin the next attempt, wait for a worker, or fail the request, as the ladder decides."""
        failure = self._attempts.go_on(request, now)
        if failure is not None:
            self.apply(request, request.state.fail(failure), now)

    def expire(self, request: ActiveRequest, now: float) -> None:
        """Fail a request whose deadline has come."""
        message = f"the request took longer than {self._deadline_seconds:g} s"
        if request.is_stranded:
            last = request.state.history[-1].failure.message
            message += f": no worker came that could go on; {last}"
        self.apply(request, request.state.fail(Failure(FailureReason.DEADLINE, message)), now)

    def _retire(self, request: ActiveRequest, now: float) -> None:
        del self._requests[request.request_id]
        tenant = request.context.tenant
        self.num_of_tenant[tenant] -= 1
        if not self.num_of_tenant[tenant]:
            del self.num_of_tenant[tenant]
        self._outbox.put(CancelTimer(Timer(TimerKind.DEADLINE, request.request_id)))
        if request.stranded_at is not None:
            self._outbox.put(CancelTimer(Timer(TimerKind.RETRY, request.request_id)))
        self._settlement.on_end(request, now)

    def check_invariants(self) -> None:
        for request in self._requests.values():
            request.check_invariants()
        tenants = Counter(request.context.tenant for request in self._requests.values())
        assert tenants == self.num_of_tenant, f"{self.num_of_tenant} are counted where {tenants} are active"
        self._check_charges()

    def _check_charges(self) -> None:
        """Assert that the counts of each worker are the sum over the attempts that run there."""
        due: dict[int, Charges] = {}
        for request in self._requests.values():
            for record, charges in request.charge.by_record() if request.charge is not None else ():
                due[id(record)] = due.get(id(record), NO_CHARGES) + charges
        for record in self._membership.records():
            found, sum_ = record.charges, due.get(id(record), NO_CHARGES)
            assert found == sum_, f"{record.info.party} is charged {found}, but its attempts add up to {sum_}"
