"""Parameters of sampling features, each declared once, and the registry of features.

A feature changes the logits of a draw. Its state is a pure function of (request, output ids), so that it survives
hand-over, preemption and a move to another worker. The HTTP schema, its errors and the reference page follow from the
declarations here; :mod:`splitserve.models.sampling` applies the features.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from splitserve.common.errors import ConfigError
from splitserve.protocol.constraint import Constraint


class FeatureParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of all sampling features. A default is neutral: with it a feature changes nothing and costs nothing.

    ``Meta`` holds a parameter's bounds and its one line of help, for clients as well as for the wire.
    """

    constraint: Annotated[
        Constraint | None, Meta(description="grammar of the output, in response_format or structured_outputs")
    ] = None
    repetition_penalty: Annotated[
        float, Meta(ge=0.01, le=100, description="divisor of the positive logits of tokens in prompt or output")
    ] = 1.0
    presence_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="subtracted from the logit of each token in the output")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="subtracted once for each occurrence of a token in the output")
    ] = 0.0
    min_p: Annotated[
        float, Meta(ge=0, le=1, description="least probability of a token, as a share of the most probable token's")
    ] = 0.0

    def __post_init__(self) -> None:
        for name, value in self.wanted_params():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{name} is {value}; it must be a finite number")

    def wanted_params(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values of the parameters that aren't neutral."""
        for name, neutral in NEUTRAL_VALUES.items():
            value = getattr(self, name)
            if value != neutral:
                yield name, value


@dataclass(frozen=True, slots=True)
class SamplingFeature:
    """Declaration of a feature."""

    module: str  # in splitserve.models.sampling.features
    class_name: str  # in that module
    params: tuple[str, ...]  # its parameters; it is wanted where one of them isn't neutral
    needs_last_token: bool = False  # a draw needs the token before it on the host: no step is launched ahead


# In the order in which they apply: the grammar, then that of the logits processors of transformers.
SAMPLING_FEATURES: Mapping[str, SamplingFeature] = {
    "grammar": SamplingFeature("grammar", "Grammar", ("constraint",), needs_last_token=True),
    "penalties": SamplingFeature(
        "penalties", "Penalties", ("repetition_penalty", "presence_penalty", "frequency_penalty")
    ),
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
