"""The timeline of one request: events of the router and of its workers, all on the router's clock. Pure.

The router notes its own events here; workers send marks with their tokens, which :meth:`Timeline.add_marks` maps to the
router's clock. Everything else that is known about a request's time is a view: :mod:`.stages`, metrics, the log's line,
``return_route``, ``splitserve trace``, spans.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from splitserve.protocol.messages.marks import Mark, MarkKind
from splitserve.protocol.request import Party
from splitserve.router.links.membership import decode_party, prefill_party
from splitserve.router.placement.policies import Disaggregated, Placed
from splitserve.router.requests.timeline.clocks import WorkerClocks

MAX_GAPS = 16
MAX_BATCHES = 8
"""Messages of an attempt whose marks are kept: each has at most ``MAX_MARKS``, and a worker needs two."""


MarkBatch: TypeAlias = tuple[bool, float, Sequence[Mark]]
"""Marks of one message: whether the worker that computes the prompt sent them, the offset of its clock, the marks."""
Times: TypeAlias = dict[MarkKind, float]


@dataclass(slots=True)
class AttemptTimeline:
    """One attempt: its workers and their marks."""

    placement: Placed
    began_at: float  # the router placed it and sent its messages
    primary: "AttemptTimeline | None" = None  # that of the prompt's first choice, which computes the prompt
    batches: list[MarkBatch] = field(default_factory=list)  # as they came; mapped to the router's clock when read
    handover_seconds: float | None = None  # from the last token that prefill sent to decode's report, at the router
    failure: str = ""  # reason of its end; "" while it goes on, or succeeded
    culprit: str = ""  # engine id of the worker to blame

    @property
    def is_disaggregated(self) -> bool:
        return isinstance(self.placement, Disaggregated)

    @property
    def prefill(self) -> str:
        return prefill_party(self.placement).engine_id

    @property
    def decode(self) -> str:
        return decode_party(self.placement).engine_id

    @property
    def prefill_marks(self) -> list[Mark]:
        """Return the marks of the worker that computes the prompt, on the router's clock."""
        return self._marks(of_prefill=True)

    @property
    def decode_marks(self) -> list[Mark]:
        """Return the marks of the decode worker, if that is another one, on the router's clock."""
        return self._marks(of_prefill=False)

    def _marks(self, *, of_prefill: bool) -> list[Mark]:
        return [
            Mark(mark.kind, mark.at - offset, mark.amount)
            for is_prefill, offset, marks in self.batches
            if is_prefill is of_prefill
            for mark in marks
        ]

    def by_kind(self) -> tuple[Times, Times]:
        """Return the last time of each kind of mark, of prefill and of decode."""
        times: tuple[Times, Times] = ({}, {})
        for is_prefill, offset, marks in self.batches:
            found = times[0] if is_prefill else times[1]
            for mark in marks:
                found[mark.kind] = mark.at - offset
        return times


@dataclass(slots=True)
class Gap:
    """A pause between two deliveries of tokens that was longer than the objective."""

    begin: float
    seconds: float
    num_tokens_before: int


@dataclass(slots=True)
class Timeline:
    """All events of a request. Times are of the router's clock; 0.0: hasn't come yet."""

    arrived_at: float
    prepared_at: float = 0.0  # the prompt's tokens were known
    read_at: float = 0.0  # its head was read from the connection
    gap_seconds: float = math.inf  # the objective for the time between tokens
    attempts: list[AttemptTimeline] = field(default_factory=list)
    first_token_at: float = 0.0  # it came from a worker
    first_written_at: float = 0.0  # its event was written to the client's connection; answers in one piece have none
    last_token_at: float = 0.0
    num_tokens: int = 0  # delivered
    longest_gap_seconds: float = 0.0
    num_gaps: int = 0  # above the objective
    gaps: tuple[Gap, ...] = ()  # the first MAX_GAPS of them
    ended_at: float = 0.0

    # ---- events ----

    def begin_attempt(self, placement: Placed, now: float, primary: "Timeline | None" = None) -> None:
        """Note that an attempt was placed; ``primary``: that of the request which computes the prompt for this one."""
        self.attempts.append(AttemptTimeline(placement, now, None if primary is None else primary.attempts[-1]))

    def add_marks(self, sender: Party, marks: Sequence[Mark], clocks: WorkerClocks, now: float) -> None:
        """Take the marks of a message of the current attempt that arrived just now."""
        attempt = self.attempts[-1]
        clock = clocks.of(sender, now)
        first, last = marks[0], marks[-1]
        low = last.at - now
        clock.note(low, first.at - attempt.began_at if first.kind is MarkKind.ACCEPTED else math.inf, now)
        offset = clock.offset
        if offset is None:
            return
        if len(attempt.batches) < MAX_BATCHES:
            attempt.batches.append((sender == prefill_party(attempt.placement), offset, marks))

    def on_tokens(self, count: int, now: float) -> float:
        """Note tokens delivered together; return the seconds since the last ones, or since the arrival."""
        if not self.num_tokens:
            self.first_token_at = now
            seconds = now - self.arrived_at
        else:
            seconds = now - self.last_token_at
            if seconds > self.longest_gap_seconds:  # noqa: PLR1730  # max() takes longer, for each token
                self.longest_gap_seconds = seconds
            if seconds > self.gap_seconds:
                self._add_gap(seconds)
        self.last_token_at = now
        self.num_tokens += count
        return seconds

    def on_written(self, now: float) -> None:
        """Note that the event with the first token was written to the client's connection."""
        if self.num_tokens and not self.first_written_at:
            self.first_written_at = now

    def on_handover(self, now: float, *, is_first: bool) -> float:
        """Note decode's report and return the seconds since the last token that prefill sent.

        ``is_first``: decode's own message brings the token: it was faster than prefill's.
        """
        seconds = 0.0 if is_first or not self.num_tokens else now - self.last_token_at
        self.attempts[-1].handover_seconds = seconds
        return seconds

    def fail_attempt(self, reason: str, culprit: str) -> None:
        self.attempts[-1].failure, self.attempts[-1].culprit = reason, culprit

    def _add_gap(self, seconds: float) -> None:
        self.num_gaps += 1
        if len(self.gaps) < MAX_GAPS:
            self.gaps += (Gap(self.last_token_at, seconds, self.num_tokens),)

    # ---- figures ----

    @property
    def ttft_seconds(self) -> float | None:
        """Return the time from the arrival to the first token, in a stream until it is written; None: none came."""
        return (self.first_written_at or self.first_token_at) - self.arrived_at if self.num_tokens else None

    @property
    def itl_seconds(self) -> float | None:
        """Return the mean time per output token after the first; None if fewer than two came."""
        if self.num_tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.num_tokens - 1)

    @property
    def first_token_attempt(self) -> AttemptTimeline | None:
        """Return the attempt that delivered the first token; without a token, the last attempt."""
        attempts = self.attempts
        if self.num_tokens:
            attempts = [each for each in attempts if each.began_at <= self.first_token_at]
        return attempts[-1] if attempts else None
