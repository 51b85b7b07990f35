"""Rotary positions (arXiv:2104.09864), once per step for all layers."""

import math

import torch
from torch import Tensor

from splitserve.models.config import ModelConfig


class RotaryEmbedding:
    """Cosines and signed sines of positions, in float32 as the reference implementations compute them.

    On GPUs ``table`` [positions, 2 (cos, sin), D] holds those of all positions.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies(config).to(device)
        self._dtype = dtype
        self.table: Tensor | None = None
        if device.type == "cuda":
            self.table = torch.stack(self(torch.arange(config.max_position_embeddings, device=device)), 1)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``positions`` [T] -> cos, sin [T, D]; the first half of sin is negated (:class:`kernels.api.PrepareQkv`)."""
        angles = positions.float().unsqueeze(1) * self._inverse_frequencies
        cos, sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32 [D / 2]. With "llama3" scaling, long wavelengths are stretched by ``factor``, short ones are kept, and
    those between are blended linearly in the number of turns that fit the original context (Llama 3.1's release)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
