"""Tokens and log-probabilities of a request as the router keeps them: in order, and each once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.request import FinishReason

MAX_HELD_TOKENS = 1024


class Contradiction(Exception):
    """A worker's message that contradicts delivered tokens or the request's bounds."""


class NewTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens that can be delivered now, and their log-probabilities."""

    token_ids: list[int]
    logprobs: Logprobs | None


@dataclass(slots=True)
class TokenSequence:
    """Output tokens of one choice, ordered by position. Tokens after a gap are held, at most ``MAX_HELD_TOKENS``.

    ``wants_logprobs``: no token comes without its log-probabilities. While it ``is_gated`` all tokens are held.
    """

    max_tokens: int
    wants_logprobs: bool = False
    is_gated: bool = False
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    end: int | None = None
    _held: dict[int, int] = field(default_factory=dict)
    _held_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # of tokens that are held

    @property
    def complete(self) -> bool:
        return self.end == len(self.output_ids)

    def accept(
        self,
        position: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        logprobs: Logprobs | None = None,
    ) -> NewTokens:
        """Take in tokens that start at ``position``; return those that can be delivered now, in order."""
        stop = position + len(token_ids)
        if position < 0 or stop > self.max_tokens:
            raise Contradiction(f"tokens at {position}..{stop - 1} of a request for {self.max_tokens}")
        if self.end is not None and stop > self.end:
            raise Contradiction(f"a token at position {stop - 1} after the end at {self.end}")
        if self.wants_logprobs and (0 if logprobs is None else logprobs.num_positions) != len(token_ids):
            raise Contradiction(f"tokens at {position}..{stop - 1} without their log-probabilities")
        if finish_reason is not None:
            self._set_end(stop, finish_reason)
        num_before = len(self.output_ids)
        if position == num_before and not self._held and not self.is_gated:
            self.output_ids.extend(token_ids)
            return NewTokens(self.output_ids[num_before:], logprobs)
        self._merge(position, token_ids, logprobs)
        new = self._release()
        if len(self._held) > MAX_HELD_TOKENS:
            self._held.clear()
            self._held_logprobs.clear()
            raise Contradiction(f"more than {MAX_HELD_TOKENS} tokens after a missing one")
        return new

    def open_gate(self) -> NewTokens:
        """Return the tokens that were held only because of the gate."""
        self.is_gated = False
        return self._release()

    def _release(self) -> NewTokens:
        num_before = len(self.output_ids)
        while not self.is_gated and (next_id := self._held.pop(len(self.output_ids), None)) is not None:
            self.output_ids.append(next_id)
        positions = range(num_before, len(self.output_ids))
        parts = [self._held_logprobs.pop(position) for position in positions] if self.wants_logprobs else []
        return NewTokens(self.output_ids[num_before:], Logprobs.joined(parts) if parts else None)

    def _set_end(self, end: int, finish_reason: FinishReason) -> None:
        highest = max(self._held, default=-1)
        if self.end not in (None, end) or end < len(self.output_ids) or end <= highest:
            raise Contradiction(f"the end at position {end}, with tokens or another end beyond it")
        self.end = end
        self.finish_reason = finish_reason

    def _merge(self, position: int, token_ids: Sequence[int], logprobs: Logprobs | None) -> None:
        """Hold the tokens that are new. The others must be those that are known already."""
        fresh = {}
        for offset, token_id in enumerate(token_ids, start=position):
            known = self.output_ids[offset] if offset < len(self.output_ids) else self._held.get(offset)
            if known is None:
                fresh[offset] = token_id
            elif known != token_id:
                raise Contradiction(f"token {token_id} at position {offset}, where {known} stood")
        self._held |= fresh
        if self.wants_logprobs and logprobs is not None:
            for offset in fresh:
                self._held_logprobs[offset] = logprobs.between(offset - position, offset - position + 1)

    def drop_held(self) -> None:
        """Forget undelivered tokens, which came from an attempt that has ended."""
        self._held.clear()
        self._held_logprobs.clear()
        self.end = None
        self.finish_reason = None

    def check_invariants(self) -> None:
        num_tokens, end = len(self.output_ids), self.end
        assert num_tokens <= self.max_tokens, f"{num_tokens} tokens of a request for {self.max_tokens} were delivered"
        is_due = not self.is_gated and any(position <= num_tokens for position in self._held)
        assert not is_due, "tokens are held that could be delivered"
        described = self._held.keys() if self.wants_logprobs else set()
        assert self._held_logprobs.keys() == described, "tokens are held without their log-probabilities"
        assert len(self._held) <= MAX_HELD_TOKENS, f"{len(self._held)} tokens are held"
        assert end is None or num_tokens <= end, f"{num_tokens} tokens were delivered, which end at {end}"
        assert (end is None) == (self.finish_reason is None), "an end without a reason, or a reason without an end"


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens, as far as workers have sent them; kept from attempt to attempt."""

    num_wanted: int  # tokens, from the prompt's token number ``first`` on
    first: int = 1  # the first token of a prompt has none
    num_known: int = 0
    parts: list[Logprobs] = field(default_factory=list)

    @property
    def next_position(self) -> int:
        """Position in the prompt of the first token that is lacking."""
        return self.first + self.num_known

    @property
    def is_complete(self) -> bool:
        return self.num_known == self.num_wanted

    def accept(self, position: int, logprobs: Logprobs) -> bool:
        """Take in those of the tokens from ``position`` on; return whether any are new. Those after a gap are dropped:
        a worker sends them in order."""
        num_old, count = self.next_position - position, logprobs.num_positions
        if position < self.first or position - self.first + count > self.num_wanted:
            raise Contradiction(f"log-probabilities of the prompt's tokens {position}..{position + count - 1}")
        if not 0 <= num_old < count:
            return False
        self.parts.append(logprobs.between(num_old, count))
        self.num_known += count - num_old
        return True

    def all(self) -> Logprobs | None:
        """Return those of all tokens; None if none are wanted."""
        return Logprobs.joined(self.parts) if self.parts else None
