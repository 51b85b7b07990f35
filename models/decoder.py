"""Dense decoders of the Llama 3.x and Qwen3 families, on the operations of :mod:`splitserve.kernels`.

A step is flat: the tokens of all its sequences in one ``[num_tokens, hidden]``, without padding. Positions, slots, the
attention plan and the rotation's cosines are made once per step and shared by all layers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, Kernels, Linear, PagedAttention
from splitserve.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one step, on the model's device. T tokens, R rows to sample from (R may be 0).

    ``token_ids``, ``positions``: int64 [T]. ``slots``: int64 [T, G], where the KV goes. ``sample_rows``: int64 [R],
    rows of the flat batch.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sample_rows: Tensor
    attention_plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. ``qkv`` and ``gate_up`` are fused along the output. ``qk_norm`` [H + G, D] or None."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """``embedding`` [vocab, hidden] may be a view of the checkpoint's file and of the checkpoint's own dtype."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear


class RotaryEmbedding:
    """Cosines and signed sines of positions, in float32 as the reference implementations compute them."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies(config).to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``positions`` [T] -> cos, sin [T, D]; the first half of sin is negated, for :class:`kernels.api.Rope`."""
        angles = positions.float().unsqueeze(1) * self._inverse_frequencies
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
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


class DecoderModel:
    """The forward pass. Holds weights and the chosen kernels; no state of any request."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self._weights = weights
        self._rotary = RotaryEmbedding(config, device)

    def forward(self, batch: ForwardBatch, kv_layers: list[Tensor], attention: PagedAttention) -> Tensor | None:
        """Writes the KV of all tokens and returns float32 logits [R, vocab] of ``batch.sample_rows``, None if R is 0.

        ``kv_layers``: per layer the view ``[num_blocks, G, 2, B, D]`` of the KV memory.
        """
        eps = self.config.rms_norm_eps
        rotation = self._rotary(batch.positions, self.dtype)
        hidden = torch.nn.functional.embedding(batch.token_ids, self._weights.embedding).to(self.dtype)
        residual = torch.zeros_like(hidden)
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            normed = self.kernels.rms_norm(hidden, layer.input_norm, eps, residual)
            query = self._write_kv(layer, normed, batch, kv_layers[index], rotation)
            if index == last and batch.sample_rows.shape[0] == 0:
                return None  # only the KV was wanted
            context = attention.run(query, kv_layers[index], batch.attention_plan).flatten(1)
            if index == last:  # what follows works row by row, and only these rows are read
                context, residual = context[batch.sample_rows], residual[batch.sample_rows]
            hidden = self._mlp(layer, layer.output(context), residual)
        normed = self.kernels.rms_norm(hidden, self._weights.final_norm, eps, residual)
        return self._weights.lm_head(normed).float()

    def _write_kv(
        self,
        layer: LayerWeights,
        normed: Tensor,
        batch: ForwardBatch,
        kv_layer: Tensor,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Projects, normalises and rotates; writes keys and values; returns the queries [T, H, D]."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(normed).view(-1, num_rotated + config.num_kv_heads, config.head_dim)
        rotated = qkv[:, :num_rotated]
        if layer.qk_norm is not None:
            rotated = self.kernels.rms_norm(rotated, layer.qk_norm, config.rms_norm_eps)
        rotated = self.kernels.rope(rotated, *rotation)
        query, key = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        self.kernels.kv_write(kv_layer, key, qkv[:, num_rotated:], batch.slots)
        return query

    def _mlp(self, layer: LayerWeights, attended: Tensor, residual: Tensor) -> Tensor:
        normed = self.kernels.rms_norm(attended, layer.post_attention_norm, self.config.rms_norm_eps, residual)
        return layer.down(self.kernels.silu_mul(layer.gate_up(normed)))
