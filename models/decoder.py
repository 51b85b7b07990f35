"""Dense decoders of the Llama 3.x and Qwen3 families, on the operations of :mod:`splitserve.kernels`.

A step is flat: the tokens of all its sequences in one ``[num_tokens, hidden]``, without padding. Positions, slots, the
attention plan and the rotation's cosines are made once per step and shared by all layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.kernels.api import (
    AttentionPlan,
    AttentionShape,
    Kernels,
    Linear,
    NormedLinear,
    PagedAttention,
    ResidualLinear,
    TokenRows,
)
from splitserve.models.config import ModelConfig
from splitserve.models.parallel import Alone, Collectives

BeforeLayer = Callable[[int], None]
"""Called with the number of each layer, before anything reads the layer's KV."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one step, on the model's device. T tokens, R rows to sample from (R may be 0).

    ``sample_rows``: int64 [R], rows of the flat batch; None stands for all of them.
    """

    tokens: TokenRows
    sample_rows: Tensor | None
    attention_plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. ``qkv`` and ``gate_up`` are fused along the output. ``qk_norm`` [H + G, D] or None."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    output: ResidualLinear
    post_attention_norm: Tensor
    gate_up: Linear
    down: ResidualLinear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """``embedding`` [vocab, hidden] may be a view of the checkpoint's file and of the checkpoint's own dtype."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: NormedLinear


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
        group: Collectives | None = None,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self._weights = weights
        self._group = group or Alone()
        self._rotary = RotaryEmbedding(config, dtype, device)

    def tokens(self, token_ids: Tensor, positions: Tensor, slots: Tensor) -> TokenRows:
        """Of ids and positions (int64 [T]) that the host knows; ``slots`` int64 [T, G]."""
        hidden = torch.nn.functional.embedding(token_ids, self._weights.embedding).to(self.dtype)
        return TokenRows(hidden, self._rotary(positions), slots)

    def begin_step(self, inputs: Tensor, drawn: Tensor, shape: AttentionShape) -> TokenRows:
        """On a GPU: see :class:`splitserve.kernels.api.BeginStep`."""
        assert self._rotary.table is not None
        return self.kernels.begin_step(inputs, drawn, self._weights.embedding, self._rotary.table, shape)

    def forward(
        self,
        batch: ForwardBatch,
        kv_layers: list[Tensor],
        attention: PagedAttention,
        before_layer: BeforeLayer | None = None,
    ) -> Tensor | None:
        """Writes the KV of all tokens and returns logits [R, vocab] of ``batch.sample_rows``, None if R is 0.

        ``kv_layers``: per layer the view ``[num_blocks, G, 2, B, D]`` of the KV memory. ``before_layer`` may queue what
        a layer has to wait for.
        """
        eps, rows = self.config.rms_norm_eps, batch.sample_rows
        hidden, rotation, slots = batch.tokens.hidden, batch.tokens.rotation, batch.tokens.slots
        layers, final_norm = self._weights.layers, self._weights.final_norm
        last = len(layers) - 1
        normed: Tensor | None = None  # hidden, where it is normalised already for the product that follows
        for index, layer in enumerate(layers):
            if before_layer is not None:
                before_layer(index)
            qkv = layer.qkv.parts_after_norm(hidden, layer.input_norm, eps, normed)
            qkv = qkv.view(*qkv.shape[:2], -1, self.config.head_dim)
            query = self.kernels.prepare_qkv(qkv, layer.qk_norm, eps, rotation, kv_layer=kv_layers[index], slots=slots)
            if index == last and rows is not None and rows.shape[0] == 0:
                self._group.meet()  # the step is over when all ranks have their KV
                return None  # only the KV was wanted
            context = attention.run(query, kv_layers[index], batch.attention_plan).flatten(1)
            if index == last and rows is not None:  # what follows works row by row, and only these rows are read
                context, hidden = context[rows], hidden[rows]
            normed = layer.output.add_to(hidden, context, layer.post_attention_norm, eps)
            gated = layer.gate_up.gated_after_norm(hidden, layer.post_attention_norm, eps, normed)
            next_norm = final_norm if index == last else layers[index + 1].input_norm
            normed = layer.down.add_to(hidden, gated, next_norm, eps)
        return self._weights.lm_head.after_norm(hidden, final_norm, eps, normed)
