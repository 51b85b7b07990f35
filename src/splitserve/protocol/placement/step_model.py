"""Step-time models: the seconds of a worker's step by the work in it. Pure; workers fit them, the router predicts with
them."""

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from splitserve.protocol.wire_numbers import Count

Coefficient = Annotated[float, msgspec.Meta(ge=0, le=1e6)]  # seconds per unit of work


class StepWork(NamedTuple):
    """The work in one step, in the units that its time grows with."""

    num_decodes: float = 0.0
    decode_context: float = 0.0  # tokens of KV that the decoding sequences attend to
    prefill_tokens: float = 0.0
    prefill_pairs: float = 0.0  # pairs of a prompt token and a token that it attends to


def pairs(start: float, count: float) -> float:
    """Return the pairs of ``count`` tokens from position ``start`` on, each with itself and all tokens before it."""
    return count * (start + (count + 1) / 2)


class StepModel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A linear model of a step's seconds, with non-negative coefficients.

    A prompt token costs less in a step that decodes: such a step reads the weights anyway, and they hide a part of the
    computing. ``num_steps``: number of steps that it was fitted on; 0 for an estimate.
    """

    base: Coefficient = 0.0  # per step
    per_decode: Coefficient = 0.0  # per sequence that decodes
    per_context: Coefficient = 0.0  # per token of their KV
    per_token: Coefficient = 0.0  # per prompt token
    per_pair: Coefficient = 0.0  # per pair of tokens in the attention of prompts
    num_steps: Count = 0
    saved_beside: Coefficient = 0.0  # of per_token, in a step that decodes

    @classmethod
    def of(cls, coefficients: Sequence[float], num_steps: int) -> "StepModel":
        base, per_decode, per_context, per_token, per_pair, saved_beside = coefficients
        return cls(base, per_decode, per_context, per_token, per_pair, num_steps, saved_beside)

    @property
    def coefficients(self) -> tuple[float, ...]:
        return (self.base, self.per_decode, self.per_context, self.per_token, self.per_pair, self.saved_beside)

    @property
    def per_token_beside(self) -> float:
        """Seconds per prompt token in a step that decodes."""
        return self.per_token - self.saved_beside if self.per_token > self.saved_beside else 0.0

    def seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of a step."""
        num_decodes, context, num_tokens, num_pairs = work
        of_decodes = self.per_decode * num_decodes + self.per_context * context
        per_token = self.per_token_beside if num_decodes else self.per_token
        return self.base + of_decodes + per_token * num_tokens + self.per_pair * num_pairs

    def prefill_seconds(self, start: int, num_tokens: int, chunk_tokens: int) -> float:
        """Return the seconds of ``num_tokens`` prompt tokens after ``start``, alone on a worker, in chunks."""
        if num_tokens <= 0:
            return 0.0
        base, num_steps = self.base, -(-num_tokens // (chunk_tokens if chunk_tokens > 1 else 1))
        first = base + self.per_token * num_tokens + self.per_pair * pairs(start, num_tokens)
        return (num_steps - 1) * base + first

    def decode_seconds(self, num_decodes: int, context_tokens: int) -> float:
        """Return the seconds of a step of ``num_decodes`` sequences with ``context_tokens`` tokens in all."""
        return self.base + (self.per_decode * num_decodes + self.per_context * context_tokens)

    def chunk_seconds(self, start: int, count: float, *, decodes: bool = True) -> float:
        """Return what ``count`` prompt tokens after ``start`` add to a step, in seconds; ``decodes``: it does, too."""
        per_token = self.per_token_beside if decodes else self.per_token
        return per_token * count + self.per_pair * pairs(start, count)

    def prompt_tokens_within(self, seconds: float, start: int) -> int:
        """Return the most prompt tokens after ``start`` that add at most ``seconds`` to a step that decodes."""
        linear, half = self.per_token_beside + self.per_pair * (start + 0.5), self.per_pair / 2
        if seconds <= 0.0 or not linear:
            return 0
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * half * seconds)))

    def clamped(self, reference: "StepModel", factor: float) -> "StepModel":
        """Return this model with each coefficient between ``1 / factor`` and ``factor`` times that of ``reference``."""
        bounds = zip(self.coefficients, reference.coefficients, strict=True)
        held = [min(max(own, other / factor), other * factor) for own, other in bounds]
        return StepModel.of(held, self.num_steps)
