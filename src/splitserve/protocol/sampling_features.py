"""Parameters of sampling features, each declared once, and the registry of features.

A feature changes the logits of a draw. Its state is a pure function of (request, output ids), so that it survives
hand-over, preemption and a move to another worker. The HTTP schema, its errors and the reference page follow from the
declarations here; :mod:`splitserve.models.sampling` applies the features.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from splitserve.common.errors import ConfigError
from splitserve.protocol.wire_numbers import TokenId

MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 1 << 16
MAX_BAD_WORDS = 256  # as sequences of tokens: each word makes up to two
MAX_BAD_WORD_TOKENS = 32

Bias = Annotated[float, Meta(ge=-100, le=100)]
BadWord = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]


MAX_GRAMMAR_CHARS = 1 << 17
MAX_BEGIN_TOKENS = 64
MAX_END_TOKENS = 256


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A grammar, and the part of the output that it applies to."""

    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]  # in Lark's syntax, or in llguidance's JSON
    # Ids that end the text, all of the model's: allowed where the grammar may end, and nothing else is after its end.
    end_token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_END_TOKENS)]
    # The grammar begins after the first occurrence of these output tokens, such as </think>; at once if empty.
    begins_after: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_BEGIN_TOKENS)] = ()

    def begin(self, output_ids: Sequence[int], num_searched: int = 0) -> int | None:
        """Return the index of the first output token that the grammar applies to; None if it doesn't begin yet.

        ``num_searched``: tokens known not to complete the tokens that it begins after.
        """
        marker = self.begins_after
        if not marker:
            return 0
        for end in range(max(len(marker), num_searched + 1), len(output_ids) + 1):
            if output_ids[end - 1] == marker[-1] and tuple(output_ids[end - len(marker) : end]) == marker:
                return end
        return None


class FeatureParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of all sampling features. A default is neutral: with it a feature changes nothing and costs nothing.

    ``Meta`` holds a parameter's bounds and its one line of help, for clients as well as for the wire. Elements of
    tuples and keys of dicts are token ids. A tuple with a least length is left out where it is neutral, thus empty.
    """

    constraint: Annotated[
        Constraint | None, Meta(description="grammar of the output, in response_format or structured_outputs")
    ] = None
    logit_bias: Annotated[
        dict[TokenId, Bias], Meta(max_length=MAX_BIASED_TOKENS, description="numbers to add to logits, by token id")
    ] = {}

    repetition_penalty: Annotated[
        float, Meta(ge=0.01, le=100, description="divisor of the positive logits of tokens in prompt or output")
    ] = 1.0
    presence_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="subtracted from the logit of each token in the output")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="subtracted once for each occurrence of a token in the output")
    ] = 0.0
    bad_words: Annotated[
        tuple[BadWord, ...], Meta(max_length=MAX_BAD_WORDS, description="words that the output may not contain")
    ] = ()
    min_tokens: Annotated[
        int, Meta(ge=0, lt=2**31, description="output tokens before an end token or a stop token may be drawn")
    ] = 0
    allowed_token_ids: Annotated[
        tuple[TokenId, ...],
        Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS, description="the only token ids that may be drawn"),
    ] = ()
    min_p: Annotated[
        float, Meta(ge=0, le=1, description="least probability of a token, as a share of the most probable token's")
    ] = 0.0

    def __post_init__(self) -> None:
        for name, value in self.wanted_params():
            numbers = value.values() if isinstance(value, dict) else (value,) if isinstance(value, float) else ()
            if not all(map(math.isfinite, numbers)):
                raise ConfigError(f"{name} holds {value}; it must hold finite numbers")

    def token_ids(self) -> Iterator[tuple[str, Iterable[int]]]:
        """Yield each parameter that isn't neutral and has token ids: its name and the ids."""
        for name, value in self.wanted_params():
            if isinstance(value, dict):
                yield name, value.keys()
            elif isinstance(value, tuple):
                yield name, _flat(value)

    def wanted_params(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values of the parameters that aren't neutral."""
        for name, neutral in NEUTRAL_VALUES.items():
            value = getattr(self, name)
            if value != neutral:
                yield name, value


def _flat(token_ids: tuple[Any, ...]) -> Iterator[int]:
    for each in token_ids:
        if isinstance(each, tuple):
            yield from each
        else:
            yield each


@dataclass(frozen=True, slots=True)
class SamplingFeature:
    """Declaration of a feature."""

    module: str  # in splitserve.models.sampling.features
    class_name: str  # in that module
    params: tuple[str, ...]  # its parameters; it is wanted where one of them isn't neutral
    needs_last_token: bool = False  # a draw needs the token before it on the host, and waits for it there


# In the order in which they apply: the grammar, then that of the logits processors of transformers.
SAMPLING_FEATURES: Mapping[str, SamplingFeature] = {
    "grammar": SamplingFeature("grammar", "Grammar", ("constraint",), needs_last_token=True),
    "logit_bias": SamplingFeature("logit_bias", "LogitBias", ("logit_bias",)),
    "penalties": SamplingFeature(
        "penalties", "Penalties", ("repetition_penalty", "presence_penalty", "frequency_penalty")
    ),
    "bad_words": SamplingFeature("bad_words", "BadWords", ("bad_words",)),
    "min_tokens": SamplingFeature("min_tokens", "MinTokens", ("min_tokens",)),
    "allowed_token_ids": SamplingFeature("allowed_tokens", "AllowedTokens", ("allowed_token_ids",)),
    "min_p": SamplingFeature("min_p", "MinP", ("min_p",)),
}
"""Features by name. They apply before temperature, top-k and top-p."""

NEUTRAL_VALUES: Mapping[str, Any] = {
    field.name: field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    for field in msgspec.structs.fields(FeatureParams)
}
"""Each parameter's neutral value."""


def wanted_features(params: FeatureParams) -> tuple[str, ...]:
    """Return the names of the features that change a request's draws, in the order in which they apply."""
    names = {name for name, _ in params.wanted_params()}
    if not names:
        return ()
    return tuple(name for name, feature in SAMPLING_FEATURES.items() if not names.isdisjoint(feature.params))
