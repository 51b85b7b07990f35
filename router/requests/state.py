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

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from splitserve.protocol.messages.requests import HandoverReport, RequestFailed, TokenDelta
from splitserve.protocol.request import FinishReason, Party, RequestKey
from splitserve.router.placement.policies import Disaggregated, Placed

MAX_HELD_TOKENS = 1024


class Phase(StrEnum):
    WAITING = "waiting"
    STREAMING = "streaming"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})


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


NOTHING = Update()


class _Contradiction(Exception):
    """A worker's message that contradicts delivered tokens or the request's bounds."""


@dataclass(slots=True)
class TokenSequence:
    """Output tokens of a request, ordered by position. Tokens after a gap are held, at most ``MAX_HELD_TOKENS``."""

    max_tokens: int
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    end: int | None = None
    _held: dict[int, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.end == len(self.output_ids)

    def accept(self, position: int, token_ids: Sequence[int], finish_reason: FinishReason | None) -> list[int]:
        """Take in tokens that start at ``position``; return those that can be delivered now, in order."""
        stop = position + len(token_ids)
        if position < 0 or stop > self.max_tokens:
            raise _Contradiction(f"tokens at {position}..{stop - 1} of a request for {self.max_tokens}")
        if self.end is not None and stop > self.end:
            raise _Contradiction(f"a token at position {stop - 1} after the end at {self.end}")
        if finish_reason is not None:
            self._set_end(stop, finish_reason)
        num_before = len(self.output_ids)
        if position == num_before and not self._held:
            self.output_ids.extend(token_ids)
        else:
            self._merge(position, token_ids)
        return self.output_ids[num_before:]

    def _set_end(self, end: int, finish_reason: FinishReason) -> None:
        highest = max(self._held, default=-1)
        if self.end not in (None, end) or end < len(self.output_ids) or end <= highest:
            raise _Contradiction(f"the end at position {end}, with tokens or another end beyond it")
        self.end = end
        self.finish_reason = finish_reason

    def _merge(self, position: int, token_ids: Sequence[int]) -> None:
        fresh = {}
        for offset, token_id in enumerate(token_ids, start=position):
            known = self.output_ids[offset] if offset < len(self.output_ids) else self._held.get(offset)
            if known is None:
                fresh[offset] = token_id
            elif known != token_id:
                raise _Contradiction(f"token {token_id} at position {offset}, where {known} stood")
        self._held |= fresh
        while (next_id := self._held.pop(len(self.output_ids), None)) is not None:
            self.output_ids.append(next_id)
        if len(self._held) > MAX_HELD_TOKENS:
            self._held.clear()
            raise _Contradiction(f"more than {MAX_HELD_TOKENS} tokens after a missing one")

    def drop_held(self) -> None:
        """Forget undelivered tokens, which came from an attempt that has ended."""
        self._held.clear()
        self.end = None
        self.finish_reason = None

    def check_invariants(self) -> None:
        num_tokens, end = len(self.output_ids), self.end
        assert num_tokens <= self.max_tokens, f"{num_tokens} tokens of a request for {self.max_tokens} were delivered"
        assert all(position > num_tokens for position in self._held), "tokens are held that could be delivered"
        assert len(self._held) <= MAX_HELD_TOKENS, f"{len(self._held)} tokens are held"
        assert end is None or num_tokens <= end, f"{num_tokens} tokens were delivered, which end at {end}"
        assert (end is None) == (self.finish_reason is None), "an end without a reason, or a reason without an end"


class RequestState:
    """The state machine. ``begin`` places an attempt; the other methods are events of the attempt."""

    def __init__(self, request_id: str, max_tokens: int) -> None:
        self.request_id = request_id
        self.phase = Phase.WAITING
        self.output = TokenSequence(max_tokens)
        self.placement: Placed | None = None
        self.num_attempts = 0
        self.key = RequestKey(request_id)  # of the current attempt
        self.failure: Failure | None = None
        self.handover: HandoverReport | None = None
        self.handover_seconds: float | None = None  # from the first token to decode's report, as received here
        self.num_cached_tokens = 0
        self.history: list[FailedAttempt] = []
        self.was_disaggregated = False  # as first placed
        self._num_delivered_before = 0  # by earlier attempts
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
        self.handover_seconds = None
        self.num_cached_tokens = 0
        self._at_work = list(placement.parties)
        self._decode_started = False
        return abandoned

    def on_delta(self, sender: Party, delta: TokenDelta) -> Update | None:
        """Take in new tokens from a worker. Returns None if the message is stale and was dropped."""
        if not self._is_current(sender, delta.key):
            return None
        self._note_progress(sender, delta)
        output = self.output
        try:
            new_ids = output.accept(delta.position, delta.token_ids, delta.finish_reason)
        except _Contradiction as error:
            # Either worker may be wrong, and may not have stopped either: abort both.
            self._at_work = list(self.placement.parties) if self.placement is not None else []
            text = f"worker {sender.engine_id} sent {error}"
            return self.fail(Failure(FailureReason.CONTRADICTION, text))
        if output.end is not None:
            self._forget(sender)
        if new_ids and self.phase is Phase.WAITING:
            self.phase = Phase.STREAMING
        if not output.complete:
            return Update(token_ids=new_ids) if new_ids else NOTHING
        return Update(new_ids, output.finish_reason, ended=True, aborts=self._end(Phase.FINISHED))

    def on_request_failed(self, sender: Party, message: RequestFailed) -> Update | None:
        """Handle a worker's report of failure. Returns None if the message is stale and was dropped."""
        if not self._is_current(sender, message.key):
            return None
        failure = Failure(FailureReason(message.code.value), f"worker {sender.engine_id}: {message.message}")
        return self._without(sender, failure, self._culprit(sender, failure))

    def on_worker_lost(self, worker: Party, why: str) -> Update | None:
        """Handle the loss of a worker. Returns None if it has no part in the current attempt."""
        if self.ended or self.placement is None or worker not in self.placement.parties:
            return None
        return self._without(worker, Failure(FailureReason.WORKER_LOST, f"worker {worker.engine_id} {why}"), worker)

    def finish_at_stop_string(self) -> Update:
        """Finish the request, since its text reached a stop string; its workers may still compute tokens."""
        return NOTHING if self.ended else Update(ended=True, aborts=self._end(Phase.FINISHED))

    def cancel(self) -> Update:
        """Cancel the request of a client that is gone."""
        return NOTHING if self.ended else Update(ended=True, aborts=self._end(Phase.CANCELLED))

    def fail(self, failure: Failure) -> Update:
        if self.ended:
            return NOTHING
        self.failure = failure
        return Update(failure=failure, ended=True, aborts=self._end(Phase.FAILED))

    def check_invariants(self) -> None:
        self.output.check_invariants()
        parties = self.placement.parties if self.placement is not None else ()
        assert not (self.ended and self._at_work), "workers are at work on a request that has ended"
        assert (self.phase is Phase.FAILED) == (self.failure is not None), "a failure without a reason, or the reverse"
        assert set(self._at_work) <= set(parties), "a worker is at work that has no part in the attempt"
        assert not (self.phase is Phase.WAITING and self.output.output_ids), (
            "a request with tokens waits for its first one"
        )

    def _is_current(self, sender: Party, key: RequestKey) -> bool:
        if self.ended or self.placement is None:
            return False
        return key == self.key and sender in self.placement.parties

    def _note_progress(self, sender: Party, delta: TokenDelta) -> None:
        placement = self.placement
        if isinstance(placement, Disaggregated) and sender == placement.decode:
            # Decode has the whole prompt's KV and the first token: prefill's part has ended.
            self._decode_started = True
            self._forget(placement.prefill)
        elif delta.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.handover is not None:
            self.handover = delta.handover

    def _without(self, worker: Party, failure: Failure, culprit: Party) -> Update:
        """Continue without ``worker`` if its part had ended already; else end the attempt, or the request."""
        self._forget(worker)
        if isinstance(self.placement, Disaggregated) and worker == self.placement.prefill and self._decode_started:
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
        """Return the worker to blame: for a failed hand-over that one side reports, the other side."""
        if failure.reason is FailureReason.HANDOVER and isinstance(self.placement, Disaggregated):
            return next(party for party in self.placement.parties if party != sender)
        return sender

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

    def _end(self, phase: Phase) -> tuple[Party, ...]:
        self.phase = phase
        aborts = tuple(self._at_work)
        self._at_work.clear()
        return aborts
