"""One request in the router: a state machine without I/O and without a clock.

    WAITING --first token--> STREAMING --last token, stop string--> FINISHED
       |                         |------failed for good, deadline-> FAILED
       |-------------------------'------client gone---------------> CANCELLED

A failed attempt leaves the phase unchanged; the request has no placement until the next attempt begins (:mod:`.ladder`
chooses its workers).

The state machine guarantees, whatever the network does: tokens are delivered once, in order, and never after the end;
messages of another attempt, of a worker that isn't part of the attempt, or after the end are dropped (``None`` is
returned, for the caller to count). Delivered tokens are authoritative: a message that contradicts one fails the
request, so that no wrong answer passes. Each transition returns an :class:`Update`: tokens to deliver, and workers to
abort.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat

import msgspec

from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.messages.requests import HandoverReport, PromptLogprobs, RequestFailed, TokenDelta
from splitserve.protocol.request import FinishReason, Party, RequestKey
from splitserve.router.placement.policies import Disaggregated, Placed
from splitserve.router.requests.token_sequence import Contradiction, NewTokens, PromptScores, TokenSequence


class RequestPhase(StrEnum):
    WAITING = "waiting"
    STREAMING = "streaming"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({RequestPhase.FINISHED, RequestPhase.FAILED, RequestPhase.CANCELLED})


class FailureReason(StrEnum):
    """Reason of a request's failure: reported by a worker (the first five), or observed by the router."""

    INVALID = "invalid"
    OVERLOADED = "overloaded"
    DEADLINE = "deadline"
    HANDOVER = "handover"
    INTERNAL = "internal"
    WORKER_LOST = "worker_lost"
    CONTRADICTION = "contradiction"
    SHUTDOWN = "shutdown"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Failure:
    reason: FailureReason
    message: str


RETRIED = frozenset(
    {FailureReason.WORKER_LOST, FailureReason.HANDOVER, FailureReason.INTERNAL, FailureReason.OVERLOADED}
)
"""Reasons after which another worker may succeed. The others are the client's fault, or a retry would mislead it."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that failed."""

    placement: Placed
    culprit: Party  # the worker to blame, as far as the router can determine it
    failure: Failure


class Update(msgspec.Struct, frozen=True, gc=False):
    """Result of one transition, for the caller to carry out."""

    token_ids: Sequence[int] = ()  # the next output tokens
    finish_reason: FinishReason | None = None  # set if the output has ended with these tokens
    failure: Failure | None = None
    ended: bool = False  # the whole request has ended
    aborts: tuple[Party, ...] = ()  # workers that may still compute the request
    # The attempt has ended, but not the request: the caller begins the next attempt, or fails the request.
    retry: bool = False
    logprobs: Logprobs | None = None  # of ``token_ids``, where the request wants them
    prompt_logprobs: Logprobs | None = None  # all of the prompt's, once, before or with the first tokens


NOTHING = Update()


def each_by_itself(update: Update) -> Sequence[Update]:
    """Return the update's tokens in parts for the client, as if each of them had come alone."""
    count, logprobs = len(update.token_ids), update.logprobs
    if count < 2:
        return (update,)
    rows: Iterable[Logprobs | None] = (
        repeat(None) if logprobs is None else [logprobs.between(at, at + 1) for at in range(count)]
    )
    reasons = [None] * (count - 1) + [update.finish_reason]
    return [
        Update((token_id,), reason, logprobs=row)
        for token_id, reason, row in zip(update.token_ids, reasons, rows, strict=False)
    ]


class RequestState:
    """The state machine. ``begin`` places an attempt; the other methods are events of the attempt."""

    def __init__(
        self,
        request_id: str,
        max_tokens: int,
        *,
        wants_logprobs: bool = False,
        prompt_scores: PromptScores | None = None,
    ) -> None:
        """``prompt_scores``: the log-probabilities of the prompt that are wanted; no token is delivered before them."""
        self.request_id = request_id
        self.phase = RequestPhase.WAITING
        self.prompt_scores = prompt_scores
        is_gated = prompt_scores is not None and not prompt_scores.is_complete
        self.output = TokenSequence(max_tokens, wants_logprobs, is_gated)
        self.placement: Placed | None = None
        self.num_attempts = 0
        self.key = RequestKey(request_id)  # of the current attempt
        self.failure: Failure | None = None
        self.handover: HandoverReport | None = None
        self.num_cached_tokens = 0
        self.history: list[FailedAttempt] = []
        self.was_disaggregated = False  # as first placed
        self._num_delivered_before = 0  # by earlier attempts
        self._parties: tuple[Party, ...] = ()  # of the current attempt
        self._at_work: list[Party] = []
        self._decode_started = False

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    def begin(self, placement: Placed) -> tuple[Party, ...]:
        """Start the next attempt on ``placement``; return the workers of the last attempt that must be aborted."""
        assert not self.ended, f"{self.request_id} has ended"
        abandoned = tuple(self._at_work)
        self.output.drop_held()
        if not self.num_attempts:
            self.was_disaggregated = isinstance(placement, Disaggregated)
        self._num_delivered_before = len(self.output.output_ids)
        self.placement = placement
        self.key = RequestKey(self.request_id, self.num_attempts)
        self.num_attempts += 1
        self.handover = None
        self.num_cached_tokens = 0
        self._parties = placement.parties
        self._at_work = list(self._parties)
        self._decode_started = False
        return abandoned

    def on_delta(self, sender: Party, delta: TokenDelta) -> Update | None:
        """Take in new tokens from a worker. Returns None if the message is stale and was dropped."""
        if not self._is_current(sender, delta.key):
            return None
        self._note_progress(sender, delta)
        output = self.output
        try:
            new = output.accept(delta.position, delta.token_ids, delta.finish_reason, delta.logprobs)
        except Contradiction as error:
            return self._contradicted(sender, error)
        if output.end is not None:
            self._forget(sender)
        return self._delivered(new)

    def on_prompt_logprobs(self, sender: Party, message: PromptLogprobs) -> list[Update] | None:
        """Take in log-probabilities of the prompt. Returns None if the message is stale and was dropped.

        Once all are here: an update with them, and with the tokens that waited for them.
        """
        if not self._is_current(sender, message.key) or self.prompt_scores is None:
            return None
        try:
            is_new = self.prompt_scores.accept(message.position, message.logprobs)
        except Contradiction as error:
            return [self._contradicted(sender, error)]
        if not is_new or not self.prompt_scores.is_complete:
            return []
        updates = [Update(prompt_logprobs=self.prompt_scores.all())]
        self.prompt_scores.parts.clear()
        update = self._delivered(self.output.open_gate())
        if update is not NOTHING:
            updates.append(update)
        return updates

    def _delivered(self, new: NewTokens) -> Update:
        """Return the update with new tokens."""
        if new.token_ids and self.phase is RequestPhase.WAITING:
            self.phase = RequestPhase.STREAMING
        output = self.output
        if output.end is None or output.end != len(output.output_ids):  # not complete
            return Update(new.token_ids, logprobs=new.logprobs) if new.token_ids else NOTHING
        aborts = self._end(RequestPhase.FINISHED)
        return Update(new.token_ids, output.finish_reason, ended=True, aborts=aborts, logprobs=new.logprobs)

    def _contradicted(self, sender: Party, error: Contradiction) -> Update:
        """Fail the request. Either worker may be wrong, and may not have stopped either: abort both."""
        self._at_work = list(self.placement.parties) if self.placement is not None else []
        return self.fail(Failure(FailureReason.CONTRADICTION, f"worker {sender.engine_id} sent {error}"))

    def on_request_failed(self, sender: Party, message: RequestFailed) -> Update | None:
        """Handle a worker's report of failure. Returns None if the message is stale and was dropped."""
        if not self._is_current(sender, message.key):
            return None
        failure = Failure(FailureReason(message.code.value), f"worker {sender.engine_id}: {message.message}")
        return self._without(sender, failure, self._culprit(sender, failure))

    def on_worker_lost(self, worker: Party, why: str) -> Update | None:
        """Handle the loss of a worker. Returns None if it has no part in the current attempt, or its part is over."""
        if self.ended or self.placement is None or worker not in self.placement.parties:
            return None
        failure = Failure(FailureReason.WORKER_LOST, f"worker {worker.engine_id} {why}")
        update = self._without(worker, failure, worker)
        return None if update is NOTHING else update

    def finish_at_stop_string(self) -> Update:
        """Finish the request, since its text reached a stop string; its workers may still compute tokens."""
        return NOTHING if self.ended else Update(ended=True, aborts=self._end(RequestPhase.FINISHED))

    def cancel(self) -> Update:
        """Cancel the request of a client that is gone."""
        return NOTHING if self.ended else Update(ended=True, aborts=self._end(RequestPhase.CANCELLED))

    def fail(self, failure: Failure) -> Update:
        if self.ended:
            return NOTHING
        self.failure = failure
        return Update(failure=failure, ended=True, aborts=self._end(RequestPhase.FAILED))

    def check_invariants(self) -> None:
        self.output.check_invariants()
        parties = self.placement.parties if self.placement is not None else ()
        assert not (self.ended and self._at_work), "workers are at work on a request that has ended"
        assert (self.phase is RequestPhase.FAILED) == (self.failure is not None), (
            "a failure without a reason, or the reverse"
        )
        assert set(self._at_work) <= set(parties), "a worker is at work that has no part in the attempt"
        assert not (self.phase is RequestPhase.WAITING and self.output.output_ids), (
            "a request with tokens waits for its first one"
        )

    def _is_current(self, sender: Party, key: RequestKey) -> bool:
        if self.placement is None or self.phase in ENDED:
            return False
        return key == self.key and sender in self._parties

    def _note_progress(self, sender: Party, delta: TokenDelta) -> None:
        placement = self.placement
        if isinstance(placement, Disaggregated) and sender == placement.decode:
            # Decode has the whole prompt's KV and the first token: prefill's part has ended.
            self._decode_started = True
            if self._prefill_is_over:
                self._forget(placement.prefill)
        elif delta.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.handover is not None:
            self.handover = delta.handover

    def _without(self, worker: Party, failure: Failure, culprit: Party) -> Update:
        """Continue without ``worker`` if its part had ended already; else end the attempt, or the request."""
        self._forget(worker)
        if isinstance(self.placement, Disaggregated) and worker == self.placement.prefill and self._prefill_is_over:
            return NOTHING
        if failure.reason not in RETRIED:
            return self.fail(failure)
        assert self.placement is not None
        self.history.append(FailedAttempt(self.placement, culprit, failure))
        self.placement = None
        aborts = tuple(self._at_work)
        self._at_work.clear()
        return Update(aborts=aborts, retry=True)

    def _culprit(self, sender: Party, failure: Failure) -> Party:
        """Return the worker to blame: for a failed hand-over prefill, whichever side reports it, since decode can go on
        alone."""
        if failure.reason is FailureReason.HANDOVER and isinstance(self.placement, Disaggregated):
            return self.placement.prefill
        return sender

    @property
    def _prefill_is_over(self) -> bool:
        """Return whether nothing that the client is to get can come from the prefill worker any more."""
        return self._decode_started and (self.prompt_scores is None or self.prompt_scores.is_complete)

    @property
    def ended_at_prefill(self) -> bool:
        """Return whether decode has sent nothing in the current attempt."""
        return not self._decode_started

    @property
    def num_attempt_tokens(self) -> int:
        """Number of output tokens that the current attempt has delivered."""
        return len(self.output.output_ids) - self._num_delivered_before

    @property
    def delivered_ids(self) -> list[int]:
        """Output tokens that the client has or will have; the next attempt starts after them."""
        return list(self.output.output_ids)

    def _forget(self, worker: Party) -> None:
        if worker in self._at_work:
            self._at_work.remove(worker)

    def _end(self, phase: RequestPhase) -> tuple[Party, ...]:
        self.phase = phase
        aborts = tuple(self._at_work)
        self._at_work.clear()
        return aborts
