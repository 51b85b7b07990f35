"""Settlement of requests: charges, breakers, and the metrics of tokens, hand-overs, attempts and ends. Pure."""

import math
from collections.abc import Callable

from splitserve.router.links.membership import Membership
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.effects import Count, CountTokens, Observe, Outbox
from splitserve.router.requests.objectives import Objectives, objectives_of
from splitserve.router.requests.outcome import outcome
from splitserve.router.requests.state import FailureReason, RequestPhase, Update


class Settlement:
    def __init__(
        self,
        membership: Membership,
        objectives: Objectives,
        outbox: Outbox,
        note_first_token: Callable[[ActiveRequest], None],
        note_output: Callable[[ActiveRequest], None],
    ) -> None:
        """``note_first_token`` is called with each request whose prompt is computed, ``note_output`` with each finished
        one."""
        self._note_first_token = note_first_token
        self._note_output = note_output
        self.num_freed = 0  # times that a worker was relieved of a prompt or of a request
        self._membership = membership
        self._objectives = objectives
        self._outbox = outbox

    @property
    def gap_seconds(self) -> float:
        """Return the time between tokens above which a timeline notes the gap."""
        return self._objectives.tpot_seconds or math.inf

    def on_tokens(self, request: ActiveRequest, count: int, now: float) -> None:
        """Count new tokens that are delivered to the client."""
        if request.charge is not None:
            self.num_freed += request.charge.is_prefilling
            request.charge.first_token_out(now)  # of each attempt: a retry computes the prompt again
        are_first = not request.timeline.num_tokens
        if are_first:
            self._note_first_token(request)
            self._note_prediction(request, now)
        self._outbox.put(CountTokens(count, request.timeline.on_tokens(count, now), are_first))

    def _note_prediction(self, request: ActiveRequest, now: float) -> None:
        """Observe how far the predicted time to first token was off, where the first attempt succeeded."""
        placement = request.state.placement
        if placement is not None and placement.ttft_seconds is not None and request.state.num_attempts == 1:
            seconds = now - request.timeline.attempts[0].began_at
            self._outbox.put(Observe("prediction_error_seconds", abs(seconds - placement.ttft_seconds)))

    def on_handover(self, request: ActiveRequest, update: Update, now: float) -> None:
        """Record the duration of a hand-over when decode reports that it is ready.

        The report repeats the first token; if the token is new, decode's report was faster than prefill's: 0 s.
        """
        seconds = request.timeline.on_handover(now, is_first=bool(update.token_ids))
        self._outbox.put(Observe("handover_seconds", seconds))

    def on_attempt_failed(self, request: ActiveRequest, now: float) -> None:
        """Take the failed attempt off its workers' counts, and count the failure against its culprit."""
        self._release(request, now)
        attempt = request.state.history[-1]
        request.timeline.fail_attempt(attempt.failure.reason.value, attempt.culprit.engine_id)
        record = self._membership.get(attempt.culprit)
        if record is not None and attempt.failure.reason is not FailureReason.OVERLOADED:
            record.breaker.on_failure(now, request.timeline.attempts[-1].began_at)

    def on_end(self, request: ActiveRequest, now: float) -> None:
        """Count the request once, by its outcome."""
        self._release(request, now)
        state = request.state
        if state.phase is RequestPhase.FINISHED:
            self._note_output(request)
        if state.phase is RequestPhase.FINISHED and state.placement is not None:
            for party in state.placement.parties:
                record = self._membership.get(party)
                if record is not None:
                    record.breaker.on_success()
        self._outbox.put(Observe("e2e_seconds", now - request.arrived_at))
        self._outbox.put(Count("requests_finished", outcome(state)))
        context = request.context
        self._outbox.put(Count("class_requests", (context.request_class.name, context.tenant, state.phase.value)))
        self._judge(request)
        request.timeline.ended_at = now

    def _release(self, request: ActiveRequest, now: float) -> None:
        if request.charge is not None:
            request.charge.release(now)
            self.num_freed += 1
            request.charge = None

    def _judge(self, request: ActiveRequest) -> None:
        """Count the objectives that the request met or missed; none if the client ended it."""
        state = request.state
        objectives = objectives_of(request.context.request_class) or self._objectives
        if state.phase is RequestPhase.FINISHED:
            times = (request.arrived_at, request.timeline.first_token_at, request.timeline.last_token_at)
            verdicts = objectives.judge(*times, len(state.delivered_ids))
        elif state.failure is not None and state.failure.reason is not FailureReason.INVALID:
            verdicts = objectives.missed()
        else:
            return
        for name, met in verdicts:
            self._outbox.put(Count("objectives", (name, str(met).lower())))
