"""Attempts of requests: the messages that begin one, and its successor on the ladder when it fails. Pure."""

import random

import msgspec

from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.requests import DecodeRequest, LocalRequest, PrefillRequest
from splitserve.protocol.request import Party, RequestKey
from splitserve.router.links.membership import Membership, prefill_party
from splitserve.router.placement.placer import Placer
from splitserve.router.placement.policies import Disaggregated, NoWorker, Placed, RequestShape
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.effects import CancelTimer, Count, Log, Outbox, Send, SetTimer
from splitserve.router.requests.events import Timer, TimerKind
from splitserve.router.requests.ladder import backoff_seconds, may_wait, next_step
from splitserve.router.requests.state import Failure
from splitserve.router.requests.timeline.timeline import Timeline

MIN_DEADLINE_SECONDS = 0.001  # a worker refuses a request without time left


class Attempts:
    """Starts and retries of attempts. ``chosen`` draws the jitter of waits."""

    def __init__(
        self,
        placer: Placer,
        membership: Membership,
        outbox: Outbox,
        chosen: random.Random,
        deadline_seconds: float,
    ) -> None:
        self._placer = placer
        self._membership = membership
        self._outbox = outbox
        self._chosen = chosen
        self._deadline_seconds = deadline_seconds

    def start(self, request: ActiveRequest, placement: Placed, now: float) -> None:
        """Begin an attempt, the first one together with those of the siblings: charge its workers, and send it to them.

        The siblings share the prompt, for which only the first request is charged.
        """
        siblings = request.siblings if not request.state.num_attempts else ()
        prefill = self._membership.get(placement.prefill) if isinstance(placement, Disaggregated) else None
        is_late = prefill is not None and not prefill.begins_soon
        self._begin(request, placement, request.shape, now)
        for sibling in siblings:
            self._begin(
                sibling, placement, msgspec.structs.replace(request.shape, num_prompt_tokens=0), now, request.timeline
            )
        keys = [sibling.state.key for sibling in siblings]
        for party, body in self.messages(request, placement, now, keys, late_grant=is_late):
            self._outbox.put(Send(party, body))
        self._placer.note_sent([prefill_party(placement)], request.hashes)  # decode has it with the first token

    def _begin(
        self,
        request: ActiveRequest,
        placement: Placed,
        shape: RequestShape,
        now: float,
        primary: Timeline | None = None,
    ) -> None:
        request.state.begin(placement)
        request.timeline.begin_attempt(placement, now, primary)
        request.stranded_at, request.num_waits = None, 0
        request.charge = self._membership.charge(placement, shape, now)

    def go_on(self, request: ActiveRequest, now: float) -> Failure | None:
        """Begin the attempt that follows a failed one on the ladder, or wait for workers. Return None for both.

        Returns the request's failure if neither is possible.
        """
        state = request.state
        last = state.history[-1].failure
        snapshot = self._placer.snapshot(request.hashes, now)
        step = next_step(snapshot, request.shape, self._placer.policy, state.history)
        if isinstance(step.placement, NoWorker) and may_wait(snapshot, state.history):
            self._wait(request, now)
            return None
        self._outbox.put(Count("ladder_steps", (step.rung, last.reason)))
        if isinstance(step.placement, NoWorker):
            return Failure(last.reason, step.placement.reason)
        if request.is_stranded:
            self._outbox.put(CancelTimer(Timer(TimerKind.RETRY, request.request_id)))
        self._outbox.put(Log(f"request {state.key} failed ({last.reason}): {last.message}; it continues ({step.rung})"))
        self.start(request, step.placement, now)
        return None

    def _wait(self, request: ActiveRequest, now: float) -> None:
        """Retry after a pause; a worker that becomes ready ends the wait earlier, the deadline ends the request."""
        request.stranded_at = now if request.stranded_at is None else request.stranded_at
        delay = backoff_seconds(request.num_waits, self._chosen)
        request.num_waits += 1
        self._outbox.put(SetTimer(Timer(TimerKind.RETRY, request.request_id), now + delay))

    def messages(
        self,
        request: ActiveRequest,
        placement: Placed,
        now: float,
        siblings: list[RequestKey],
        *,
        late_grant: bool = False,
    ) -> list[tuple[Party, Body]]:
        """Return an attempt's messages. Decode comes first: it reserves room while prefill's message travels, unless
        the grant is late."""
        key, prompt, sampling = request.state.key, request.token_ids, request.attempt_sampling()
        delivered = request.state.delivered_ids
        salt, priority = request.context.cache_salt, request.priority
        itl = request.context.request_class.itl_ms / 1e3
        # Workers add the time of a freeze themselves, that of the present one included.
        left_seconds = max(
            MIN_DEADLINE_SECONDS, self._deadline_seconds + request.held_seconds - (now - request.arrived_at)
        )
        if not isinstance(placement, Disaggregated):
            prefix = self._placer.prefix_helper(request.hashes, placement.worker, now)
            local = LocalRequest(key, prompt, sampling, left_seconds, delivered, prefix, salt, priority, siblings, itl)
            return [(placement.worker, local)]
        prefill, decode = self._placer.peer(placement.prefill), self._placer.peer(placement.decode)
        to_decode = sampling
        if sampling.prompt_logprobs is not None:
            to_decode = msgspec.structs.replace(sampling, prompt_logprobs=None)
        rest = left_seconds, delivered, salt, priority
        source = None if placement.prefix is None else self._placer.peer(placement.prefix)
        return [
            (placement.decode, DecodeRequest(key, prompt, to_decode, prefill, *rest, late_grant, siblings, itl)),
            (placement.prefill, PrefillRequest(key, prompt, sampling, decode, *rest, siblings, late_grant, source)),
        ]
