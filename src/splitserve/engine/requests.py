"""Requests in a worker, from acceptance to their end."""

from collections.abc import Sequence as ListLike
from typing import Any

from splitserve.engine.parts import Part
from splitserve.engine.scheduling import StepScheduler
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.engine.state import DRAINING_REASON, EngineState
from splitserve.protocol.messages.marks import Mark, MarkKind
from splitserve.protocol.messages.requests import Abort, FailureCode, RequestFailed, TokenDelta
from splitserve.protocol.request import FinishReason, Party
from splitserve.protocol.step import Draw

NO_PART = Part()
"""Owner of a sequence that only the scheduler has."""


class Requests:
    """Accepts and ends requests. The core and its parts call it; ``parts`` are set by the core."""

    def __init__(self, state: EngineState, scheduler: StepScheduler) -> None:
        self.state = state
        self.scheduler = scheduler
        self.parts: ListLike[Part] = ()
        self._num_accepted = 0

    def owner(self, sequence: Sequence) -> Part:
        """Return the part that moves the sequence's KV: of two the last one, since the prefix of a prompt that is to be
        handed out may first be read from a peer."""
        return next((part for part in reversed(self.parts) if part.owns(sequence)), NO_PART)

    def accept(self, request: Any, sender: Party, now: float, *, decodes_here: bool) -> Sequence | None:
        """Return the sequence of a new request; None if it is late, repeated, or can never run here."""
        state = self.state
        if request.key in state.tombstones or request.key in state.sequences:
            state.counters.stale_messages += 1
            self._fail_siblings(request, sender)
            return None
        token_ids = request.token_ids[:]
        token_ids.extend(request.output_ids)
        sequence = Sequence(
            key=request.key,
            reply_to=sender,
            token_ids=token_ids,
            num_prompt_tokens=len(request.token_ids),
            sampling=request.sampling,
            deadline=now + min(request.deadline_seconds, state.protocol.request_deadline_seconds),
            number=self._num_accepted,
            max_length=state.max_model_len,
            siblings={key: n for n, key in enumerate(request.siblings, 1) if key not in state.tombstones},
            num_choices=1 + len(request.siblings),
            decodes_here=decodes_here,
            itl_seconds=request.itl_seconds if decodes_here else 0.0,
            cache_salt=request.cache_salt,
        )
        refusal = self._refusal(sequence)
        if refusal is not None:
            state.fail(sequence, *refusal)
            state.leave_tombstone(request.key, refusal[1], now)
            return None
        if sequence.marks is not None:
            sequence.marks.add(MarkKind.ACCEPTED, now)
        state.sequences[request.key] = sequence
        self._num_accepted += 1
        return sequence

    def _fail_siblings(self, request: Any, sender: Party) -> None:
        """Report the siblings of a request that isn't computed since its end came first: the router continues them."""
        state = self.state
        for key in request.siblings if request.key in state.tombstones else ():
            if key not in state.tombstones and key not in state.sequences:
                failed = RequestFailed(key, FailureCode.OVERLOADED, f"{request.key} had ended before it came")
                state.outbox.send(sender, failed)

    def _refusal(self, sequence: Sequence) -> tuple[FailureCode, str] | None:
        """Return the reason for which a request can't run here, or None."""
        if self.state.is_draining:
            return FailureCode.OVERLOADED, DRAINING_REASON
        num_requests = len(self.state.sequences)
        if num_requests >= self.state.protocol.max_requests:
            return FailureCode.OVERLOADED, f"{num_requests} requests are here already"
        problem = self.state.why_impossible(sequence)
        return None if problem is None else (FailureCode.INVALID, problem)

    def on_abort(self, abort: Abort, sender: Party, now: float) -> None:
        """End a request; remember the end of one whose messages are still to come. A request goes on without output
        while siblings wait for its prompt's KV."""
        del sender
        sequence = self.state.sequences.get(abort.key)
        if sequence is None:
            self.state.leave_tombstone(abort.key, "aborted", now, attempt_over=True)
            sequence = next((each for each in self.state.sequences.values() if abort.key in each.siblings), None)
            if sequence is not None:
                del sequence.siblings[abort.key]
        else:
            sequence.was_aborted = True
        if sequence is not None and sequence.was_aborted and not (sequence.siblings or sequence.has_ended):
            self.end(sequence, "aborted", now)

    def fork(self, sequence: Sequence, draw: Draw, now: float) -> None:
        """Let the siblings of a sequence begin with the first tokens that were drawn with its own, ``draw``."""
        for fork in reversed(sequence.fork()):
            self.state.sequences[fork.key] = fork
            number = fork.sampling.choice - 1
            first = draw.others[number] if number < len(draw.others) else None
            if first is None:
                self.scheduler.add(fork, first=True)
            elif first.error:
                self.fail(fork, FailureCode.INVALID, first.error, now)
            else:
                self._begin_fork(fork, sequence, first, now)

    def _begin_fork(self, fork: Sequence, sequence: Sequence, first: Draw, now: float) -> None:
        """Deliver a sibling's first token, and let it draw the next one. It shares the full blocks of the prompt, and
        has a copy of a partial one; without room for that, or without all of the prompt's KV, it begins like a sequence
        that was preempted."""
        finish_reason = fork.finish_reason(first.token_id)
        self.deliver(fork, first, finish_reason, now)
        if finish_reason is not None:
            self.end(fork, f"finished: {finish_reason}", now)
            return
        has_blocks = self.state.blocks.share(sequence, fork)
        fork.token_ids.append(first.token_id)
        if has_blocks:
            self.scheduler.start_decoding(fork)
        else:
            self.scheduler.add(fork, first=True)

    def deliver(self, sequence: Sequence, draw: Draw, finish_reason: FinishReason | None, now: float) -> None:
        """Send the router a token, unless nobody waits for it."""
        if sequence.was_aborted:
            return
        marks: list[Mark] = []
        if sequence.marks is not None:
            sequence.marks.add(MarkKind.DRAWN, now)
            marks, sequence.marks = sequence.marks.take(), None
        elif sequence.draws_second:
            marks.append(Mark(MarkKind.SECOND, now))
        position, num_cached_tokens = sequence.num_output_tokens, sequence.num_cached_tokens
        delta = TokenDelta(
            sequence.key,
            position,
            [draw.token_id],
            finish_reason,
            num_cached_tokens,
            sequence.handover,
            draw.logprobs,
            marks,
        )
        sequence.handover = None
        self.state.add_delta(sequence, delta)

    def end(self, sequence: Sequence, reason: str, now: float, *, attempt_over: bool = True) -> None:
        """End a request on this worker; ``attempt_over``: on every worker."""
        sequence.enter(Stage.ENDED)
        self.scheduler.remove(sequence)
        for part in self.parts:
            if part.owns(sequence):
                part.on_end(sequence, reason, now, attempt_over=attempt_over)
        if self.owner(sequence) is NO_PART:
            self.forget(sequence, reason, now, attempt_over=attempt_over)

    def fail(self, sequence: Sequence, code: FailureCode, reason: str, now: float) -> None:
        """End a request with an error for the router, which decides what comes next."""
        self.state.fail(sequence, code, reason)
        self.end(sequence, reason, now, attempt_over=False)

    def forget(self, sequence: Sequence, reason: str, now: float, *, attempt_over: bool = False) -> None:
        """Remove a request that no part holds any more, and give its blocks back."""
        self.state.leave_tombstone(sequence.key, reason, now, attempt_over=attempt_over)
        self.state.drop_blocks(sequence)

    def expire(self, now: float) -> None:
        """End the requests whose deadlines have passed. In a freeze none does."""
        if self.state.is_frozen:
            return
        for sequence in [s for s in self.state.sequences.values() if now >= s.deadline and not s.has_ended]:
            self.state.fail(sequence, FailureCode.DEADLINE, "the request's deadline passed")
            self.end(sequence, "deadline", now)

    def next_deadline(self) -> float:
        """Return the earliest deadline of a request, infinity in a freeze."""
        if self.state.is_frozen:
            return float("inf")
        return min((s.deadline for s in self.state.sequences.values() if not s.has_ended), default=float("inf"))

    def check_invariants(self) -> None:
        """Raise AssertionError unless each sequence agrees with its stage, and at most one part owns it: two, if its
        prefix is read before it is handed out."""
        for sequence in self.state.sequences.values():
            owners = [type(part).__name__ for part in self.parts if part.owns(sequence)]
            is_both = not sequence.decodes_here and sequence.stage in (Stage.PULLING, Stage.UNADMITTED)
            assert len(owners) <= 1 + is_both, f"{sequence.key} has several owners: {owners}"
            sequence.check_invariants(self.state.blocks.block_size)
