"""Rotary positions (arXiv:2104.09864), once per step for all layers."""

import math

import torch
from torch import Tensor

from splitserve.models.config import ModelConfig
from splitserve.models.rope import AnyScaling, LinearScaling, LongScaling, Rope, RopeScaling, YarnScaling

NOT_ROTATED = Rope(math.inf)
"""Rotations by 0, of layers without positions."""


class RotaryEmbedding:
    """Cosines and signed sines of positions, in float32 as the reference implementations compute them.

    On GPUs ``table`` [positions, 2 (cos, sin), D] holds those of all positions. Elements that are not rotated have
    cosine 1 and sine 0; :func:`splitserve.models.layers.head_order.rotary_order` has put them where they belong.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, rope: Rope | None = None) -> None:
        """``rope``: of these rotations; None: the config's main one."""
        rope = config.rope if rope is None else rope
        frequencies = rope_frequencies(config.rotary_dim or config.head_dim, rope)
        left = config.head_dim // 2 - frequencies.shape[0]
        self._inverse_frequencies = torch.nn.functional.pad(frequencies, (0, left)).to(device)
        self._dtype = dtype
        self._factors: Tensor | None = None  # [D / 2] of cosines and sines
        if (factor := attention_factor(rope.scaling)) != 1.0:
            factors = torch.full_like(frequencies, factor)
            self._factors = torch.nn.functional.pad(factors, (0, left), value=1.0).to(device)
        self.table: Tensor | None = None
        if device.type == "cuda":
            self.table = torch.stack(self(torch.arange(config.max_position_embeddings, device=device)), 1)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``positions`` [T] -> cos, sin [T, D]; the first half of sin is negated (:class:`kernels.api.PrepareQkv`)."""
        angles = positions.float().unsqueeze(1) * self._inverse_frequencies
        wide_cos, wide_sin = angles.cos(), angles.sin()
        if self._factors is not None:
            wide_cos, wide_sin = wide_cos * self._factors, wide_sin * self._factors
        cos, sin = wide_cos.to(self._dtype), wide_sin.to(self._dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32 [rotary_dim / 2], of the config's main rotations."""
    return rope_frequencies(config.rotary_dim or config.head_dim, config.rope)


def rope_frequencies(rotary_dim: int, rope: Rope) -> Tensor:
    """float32 [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    if rope == NOT_ROTATED:
        return torch.zeros_like(exponents)
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if isinstance(scaling, RopeScaling):
        return _llama3(frequencies, scaling)
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        return _yarn(frequencies, scaling, rotary_dim, rope.theta)
    if isinstance(scaling, LongScaling):
        return 1.0 / (torch.tensor(scaling.factors) * rope.theta**exponents)
    return frequencies


def attention_factor(scaling: AnyScaling | None) -> float:
    """Return the factor of cosines and sines."""
    return scaling.attention_factor if isinstance(scaling, YarnScaling | LongScaling) else 1.0


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched by ``factor``, short ones are kept, and those between are blended linearly in the
    number of turns that fit the original context (Llama 3.1's release)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(frequencies: Tensor, scaling: YarnScaling, rotary_dim: int, theta: float) -> Tensor:
    """Blend linearly between the elements that turn ``beta_fast`` and ``beta_slow`` times in the original context."""

    def element(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = element(scaling.beta_fast), element(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    high = high + 0.001 if high == low else high
    stretched = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
