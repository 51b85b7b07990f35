"""Bugs to plant in the router's core, in membership and in what they're made of. Not a test module."""

from typing import Any

import msgspec
import pytest

from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.requests import Abort
from splitserve.protocol.request import Party, RequestKey
from splitserve.router.links.membership import Membership
from splitserve.router.links.worker_record import Charge
from splitserve.router.placement.policies import Local, Placed, RequestShape, Snapshot, WorkerView
from splitserve.router.placement.prefix_view import PrefixMatch
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.attempts import Attempts
from splitserve.router.requests.core import RouterCore
from splitserve.router.requests.effects import Count, Send
from splitserve.router.requests.events import Cancel, WorkerReady
from splitserve.router.requests.ladder import decode_load
from splitserve.router.requests.orphans import Orphans
from splitserve.router.requests.settlement import Settlement
from splitserve.router.requests.state import RequestState, Update
from splitserve.router.requests.table import RequestTable
from splitserve.router.requests.waiting_room import WaitingRoom

# ---- attempts ----


def retries_get_the_whole_deadline(patch: pytest.MonkeyPatch) -> None:
    original = Attempts.messages

    def messages(
        self: Attempts, request: ActiveRequest, placement: Placed, now: float, *siblings: list[RequestKey], **is_: bool
    ) -> list[tuple[Party, Body]]:
        return original(self, request, placement, request.arrived_at, *siblings, **is_)

    patch.setattr(Attempts, "messages", messages)


def orphans_are_not_aborted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Orphans, "take", lambda self, worker, now: [])


def charges_of_failed_attempts_stay(patch: pytest.MonkeyPatch) -> None:
    original = Settlement.on_attempt_failed

    def on_attempt_failed(self: Settlement, request: ActiveRequest, now: float) -> None:
        request.charge = None
        original(self, request, now)

    patch.setattr(Settlement, "on_attempt_failed", on_attempt_failed)


def retries_start_over(patch: pytest.MonkeyPatch) -> None:
    original = Attempts.messages

    def messages(
        self: Attempts, request: ActiveRequest, placement: Placed, now: float, *siblings: list[RequestKey], **is_: bool
    ) -> list[tuple[Party, Body]]:
        sent = original(self, request, placement, now, *siblings, **is_)
        return [(party, msgspec.structs.replace(body, output_ids=[])) for party, body in sent]

    patch.setattr(Attempts, "messages", messages)


def only_the_first_attempt_has_a_first_token(patch: pytest.MonkeyPatch) -> None:
    original = Settlement.on_tokens

    def on_tokens(self: Settlement, request: ActiveRequest, count: int, now: float) -> None:
        charge = request.charge
        if request.timeline.num_tokens:
            request.charge = None
        original(self, request, count, now)
        request.charge = charge

    patch.setattr(Settlement, "on_tokens", on_tokens)


def aborts_name_the_next_attempt(patch: pytest.MonkeyPatch) -> None:
    original = RequestTable.apply

    def apply(self: RequestTable, request: ActiveRequest, update: Update, now: float) -> None:
        original(self, request, msgspec.structs.replace(update, aborts=()) if update.retry else update, now)
        for worker in update.aborts if update.retry else ():
            self._outbox.put(Send(worker, Abort(request.state.key)))

    patch.setattr(RequestTable, "apply", apply)


def draining_workers_get_requests(patch: pytest.MonkeyPatch) -> None:
    original = Membership.snapshot

    def snapshot(self: Membership, *arguments: Any) -> Snapshot:
        draining = [record.view(0.0) for record in self.records() if record.state is WorkerState.DRAINING]
        return Snapshot((*original(self, *arguments).workers, *draining))

    patch.setattr(Membership, "snapshot", snapshot)


def lost_workers_get_requests(patch: pytest.MonkeyPatch) -> None:
    original = Membership.snapshot

    def snapshot(self: Membership, *arguments: Any) -> Snapshot:
        lost = [record.view(0.0) for record in self.records() if record.state is WorkerState.LOST]
        return Snapshot((*original(self, *arguments).workers, *lost))

    patch.setattr(Membership, "snapshot", snapshot)


def prefill_workers_decode(patch: pytest.MonkeyPatch) -> None:
    """The ladder's last rung takes any worker."""

    def anywhere(workers: list[WorkerView], shape: RequestShape, preferred: Party | None = None) -> Local | None:
        best = min(workers, key=decode_load, default=None)
        return None if best is None else Local(best.party)

    patch.setattr("splitserve.router.requests.ladder.local_placement", anywhere)


def every_worker_has_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("splitserve.router.placement.policies.fitting_workers", lambda snapshot, _: list(snapshot.workers))
    patch.setattr("splitserve.router.requests.ladder.fits", lambda worker, shape: True)


def workers_help_themselves(patch: pytest.MonkeyPatch) -> None:
    def helper_of(worker: Party, matches: dict[Party, PrefixMatch], min_gain_tokens: int) -> Party | None:
        return max(matches, key=lambda party: matches[party].num_tokens, default=None)

    patch.setattr("splitserve.router.placement.placer.helper_of", helper_of)


def survivors_are_not_aborted(patch: pytest.MonkeyPatch) -> None:
    original = RequestState._without

    def without(self: RequestState, *arguments: Any) -> Update:
        update = original(self, *arguments)
        return msgspec.structs.replace(update, aborts=()) if update.retry else update

    patch.setattr(RequestState, "_without", without)


def unsent_requests_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RouterCore, "_on_not_sent", lambda self, event, now: None)


# ---- charges and counts ----


def each_token_ends_the_prefill(patch: pytest.MonkeyPatch) -> None:
    def first_token_out(self: Charge, now: float) -> None:
        if self.prefill is not None:
            self.prefill.prefill_tokens -= self.num_prompt_tokens
            self.prefill.on_change()
        self._prefilling = False

    patch.setattr(Charge, "first_token_out", first_token_out)


def failed_attempts_count_as_ends(patch: pytest.MonkeyPatch) -> None:
    original = Settlement.on_attempt_failed

    def on_attempt_failed(self: Settlement, request: ActiveRequest, now: float) -> None:
        original(self, request, now)
        self._outbox.put(Count("requests_finished", ("disaggregated", "failed", "handover")))

    patch.setattr(Settlement, "on_attempt_failed", on_attempt_failed)


def ended_requests_stay(patch: pytest.MonkeyPatch) -> None:
    original = RequestTable._retire

    def retire(self: RequestTable, request: ActiveRequest, now: float) -> None:
        original(self, request, now)
        self._requests[request.request_id] = request

    patch.setattr(RequestTable, "_retire", retire)


# ---- waiting ----


def retries_have_no_timer(patch: pytest.MonkeyPatch) -> None:
    def wait(self: Attempts, request: ActiveRequest, now: float) -> None:
        request.stranded_at = now

    patch.setattr(Attempts, "_wait", wait)


def timers_outlive_their_requests(patch: pytest.MonkeyPatch) -> None:
    def retire(self: RequestTable, request: ActiveRequest, now: float) -> None:
        del self._requests[request.request_id]
        self.num_of_tenant[request.context.tenant] -= 1
        self._settlement.on_end(request, now)

    patch.setattr(RequestTable, "_retire", retire)


def the_waiting_room_is_not_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingRoom, "serve_all", lambda self, now: None)


def stranded_requests_sleep_on(patch: pytest.MonkeyPatch) -> None:
    """A worker that is ready serves newcomers only."""

    def on_worker_ready(self: RouterCore, event: WorkerReady, now: float) -> None:
        for key in self._orphans.take(event.worker, now):
            self._outbox.put(Send(event.worker, Abort(key)))
        self.waiting_room.serve_all(now)

    patch.setattr(RouterCore, "_on_worker_ready", on_worker_ready)


def the_waiting_room_has_no_bound(patch: pytest.MonkeyPatch) -> None:
    original: Any = WaitingRoom.arrive

    def arrive(self: WaitingRoom[Any], *arguments: Any) -> None:
        bound, self._max_waiting = self._max_waiting, 1000
        original(self, *arguments)
        self._max_waiting = bound

    patch.setattr(WaitingRoom, "arrive", arrive)


def clients_that_left_stay_in_line(patch: pytest.MonkeyPatch) -> None:
    def on_cancel(self: RouterCore, event: Cancel, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is not None:
            self.requests.apply(request, request.state.cancel(), now)

    patch.setattr(RouterCore, "_on_cancel", on_cancel)
