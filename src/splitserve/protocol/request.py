"""A request as every process sees it: its identity, its sampling parameters, why it ended."""

from enum import StrEnum

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.protocol.sampling_features import FeatureParams
from splitserve.protocol.wire_numbers import Count, NumTop

MAX_CHOICES = 16
"""The largest number of outputs of one prompt."""


class RequestKey(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Identity of one attempt at one request. A retry is the same request with the next attempt number."""

    request_id: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


class Party(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process that sends and receives messages: its stable name and the random number of this life of it."""

    engine_id: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.engine_id}@{self.incarnation:08x}"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


LEAST_TEMPERATURE = 1e-5
"""A lower one is greedy: logits that are divided by a much lower one are infinite."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class SamplingParams(FeatureParams, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The rules for drawing tokens and ending a sequence, in token terms (stop strings belong to the router).

    Parameters of sampling features are inherited.

    A ``temperature`` below :data:`LEAST_TEMPERATURE` is greedy. ``top_k`` 0 keeps every token. ``seed`` is always set
    by the router, so that every worker draws the same token for the same (seed, choice, position); ``choice`` is the
    output's number among those of its prompt.
    ``stop_token_ids`` holds the end-of-sequence ids too, unless the client asked for ``ignore_eos``.
    ``logprobs`` and ``prompt_logprobs`` are the numbers of alternatives in the log-probabilities of output and prompt;
    None: not wanted. The prompt's begin with its token number ``prompt_logprobs_start``: the router has the others.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    choice: int = 0
    logprobs: NumTop | None = None
    prompt_logprobs: NumTop | None = None
    prompt_logprobs_start: Count = 1

    def __post_init__(self) -> None:
        FeatureParams.__post_init__(self)
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0.0 <= self.temperature <= 100.0:
            raise ConfigError(f"temperature is {self.temperature}; it must be in [0, 100]")
        if not 0 <= self.top_k < 2**31:
            raise ConfigError(f"top_k is {self.top_k}; it must be 0 (all tokens) or positive, and fit 31 bits")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}; it must fit 64 unsigned bits")
        if not 0 <= self.choice < MAX_CHOICES:
            raise ConfigError(f"choice is {self.choice}; it must be between 0 and {MAX_CHOICES - 1}")

    @property
    def draw_temperature(self) -> float:
        """The temperature of the draws: 0 is greedy."""
        return self.temperature if self.temperature >= LEAST_TEMPERATURE else 0.0

    def finish_reason(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """Return the reason to end with ``token_id`` as the ``num_output_tokens``-th output token, or None."""
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if num_output_tokens >= self.max_tokens:
            return FinishReason.LENGTH
        return None
