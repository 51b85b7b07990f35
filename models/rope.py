"""Rotary positions as config.json describes them: frequencies, their rescaling, the rotated part. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import few, shown
from splitserve.models.fields import MAX_POSITIONS, ConfigFields


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's rescaling of the rotary frequencies ("llama3"), for contexts longer than the original one."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions divided by ``factor`` ("linear")."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """A blend of stretched and unchanged frequencies (arXiv:2309.00071, "yarn")."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float  # of cosines and sines


@dataclass(frozen=True, slots=True)
class LongScaling:
    """A divisor of each frequency ("longrope", arXiv:2402.13753)."""

    factors: tuple[float, ...]
    attention_factor: float


AnyScaling: TypeAlias = RopeScaling | LinearScaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """One table of rotations."""

    theta: float
    scaling: AnyScaling | None = None


FULL, SLIDING = "full_attention", "sliding_attention"


def rope_fields(given: ConfigFields, default: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the fields of rope_parameters or rope_scaling that describe the rotations: those of full attention where
    each kind of layer has its own. As in transformers, original_max_position_embeddings beside them has priority over
    theirs, unless they are by kind."""
    parameters = _parameters(given) or default or {}
    original = given.optional_positive("original_max_position_embeddings")
    if isinstance(by_kind := parameters.get(FULL), dict):
        return by_kind
    return parameters if original is None else {**parameters, "original_max_position_embeddings": original}


def _parameters(given: ConfigFields) -> Mapping[str, Any]:
    """Return rope_parameters, or rope_scaling. Where both are given, transformers takes the latter alone, without the
    former's rope_theta."""
    parameters, scaling = given.mapping("rope_parameters"), given.mapping("rope_scaling")
    if parameters and scaling and parameters != scaling:
        raise CheckpointError(
            "config.json: rope_parameters and rope_scaling are both given, and differ; put all fields of the rotations "
            "into rope_parameters, rope_theta among them, and remove rope_scaling"
        )
    return parameters or scaling


def check_alike(given: ConfigFields) -> None:
    """Raise :class:`CheckpointError` if rotations are given by kind of layer."""
    if kinds := [name for name, value in _parameters(given).items() if isinstance(value, dict)]:
        raise CheckpointError(
            f"config.json: rope_parameters has {few(kinds)}, but all layers of this architecture are rotated alike; "
            "give the fields themselves, as rope_theta"
        )


def rope_by_kind(given: ConfigFields) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the fields that describe the rotations of full and of sliding attention, where they differ: rope_scaling
    is of full attention. Raises :class:`CheckpointError` for what transformers passes over."""
    by_kind, scaling = given.mapping("rope_parameters"), given.mapping("rope_scaling")
    if other := [name for name in by_kind if name not in (FULL, SLIDING)]:
        raise CheckpointError(
            f"config.json: rope_parameters has {few(other)}; '{FULL}' and '{SLIDING}' are needed here, with the fields "
            "of each kind of layer"
        )
    if "type" in scaling and "rope_type" not in scaling:
        raise CheckpointError("config.json: rope_scaling.type isn't supported in this architecture; use rope_type")
    if kinds := [name for name, value in scaling.items() if isinstance(value, dict)]:
        raise CheckpointError(f"config.json: rope_scaling has {few(kinds)}; give them in rope_parameters")
    full = ConfigFields(by_kind).mapping(FULL) or scaling
    sliding = ConfigFields(by_kind).mapping(SLIDING)
    for fields in (full, sliding):
        ConfigFields(fields).only_flag("truncate", True, default=True)
    return full, sliding


def read_rope(parameters: Mapping[str, Any], outer: ConfigFields, theta: float) -> Rope:
    """Return the rotations that ``parameters`` describe, fields of rope_parameters or rope_scaling; ``theta``: the
    default."""
    fields = ConfigFields(parameters)
    theta = fields.number("rope_theta", theta)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    # "dynamic" changes frequencies beyond max_position_embeddings only, and no longer context is served.
    if kind in ("default", "dynamic"):
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, LinearScaling(fields.number("factor")))
    if kind == "llama3":
        return Rope(theta, _llama3(fields))
    if kind == "yarn":
        return Rope(theta, _yarn(fields, outer))
    if kind in ("longrope", "su"):
        return Rope(theta, _long(fields, outer))
    raise CheckpointError(
        f"config.json: rope type {shown(kind)} isn't supported; 'default', 'linear', 'dynamic', 'llama3', 'yarn' and "
        "'longrope' are"
    )


def _llama3(fields: ConfigFields) -> RopeScaling:
    scaling = RopeScaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=fields.positive("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError("config.json: high_freq_factor must be larger than low_freq_factor")
    return scaling


def _yarn(fields: ConfigFields, outer: ConfigFields) -> YarnScaling:
    longest = outer.positive("max_position_embeddings", 2048)
    original = fields.positive("original_max_position_embeddings", longest)
    factor = fields.number("factor", longest / original)
    attention_factor = fields.optional_number("attention_factor")
    if attention_factor is None:
        # mscale of 0 counts as absent, as in transformers
        both_given = fields.get("mscale") and fields.get("mscale_all_dim")
        attention_factor = mscale(factor, 1.0)
        if both_given:
            wide, narrow = fields.number("mscale"), fields.number("mscale_all_dim")
            attention_factor = mscale(factor, wide) / mscale(factor, narrow)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.flag("truncate", default=True),
        attention_factor=attention_factor,
    )


def longest_context(positions: int, factor: float, original: int) -> int:
    """Return the longest context under YaRN. It is often added to a config.json whose ``positions`` stay as they were:
    then the context is the ``original`` one, stretched by the factor."""
    return max(positions, min(int(factor * original), MAX_POSITIONS))


def mscale(factor: float, scale: float) -> float:
    """Return the growth of attention with the stretching of contexts by ``factor`` (arXiv:2309.00071)."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _long(fields: ConfigFields, outer: ConfigFields) -> LongScaling:
    """Frequencies that change with a context's length would make its cached keys wrong: one list serves all lengths,
    the long one if the model takes contexts longer than the original."""
    longest = outer.positive("max_position_embeddings", 2048)
    original = fields.positive("original_max_position_embeddings", longest)
    factor = fields.number("factor", longest / original)
    attention_factor = fields.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    name = "long_factor" if longest > original else "short_factor"
    factors = fields.items(name)
    if not factors or not all(type(each) in (int, float) and each > 0 for each in factors):
        raise CheckpointError(f"config.json: {name} is {shown(factors)}; a list of positive numbers is needed")
    return LongScaling(tuple(float(each) for each in factors), attention_factor)
