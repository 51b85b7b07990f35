"""Gemma 2 (arXiv:2408.00118): norms of 1 + weight around everything, soft caps, every other layer with a window."""

import math
from functools import partial
from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole, window_features
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder, DecoderLayer
from splitserve.models.layers.mlp import GatedMlp
from splitserve.models.layers.norm import WideNorm
from splitserve.models.layers.residual import Residual
from splitserve.models.layers.step import Step

GemmaNorm = partial(WideNorm, offset=1.0)


class GemmaLayer(DecoderLayer):
    """Attention and a gated MLP, each between two norms."""

    def __init__(self, name: str, config: ModelConfig, attention: GroupedAttention) -> None:
        self.input_norm = GemmaNorm(f"{name}.input_layernorm", config)
        self.attention = attention
        self.post_attention_norm = GemmaNorm(f"{name}.post_attention_layernorm", config)
        self.pre_feedforward_norm = GemmaNorm(f"{name}.pre_feedforward_layernorm", config)
        self.mlp = GatedMlp(f"{name}.mlp", config)
        self.post_feedforward_norm = GemmaNorm(f"{name}.post_feedforward_layernorm", config)

    def __call__(self, x: Residual, step: Step) -> None:
        x += self.post_attention_norm.of(self.attention(self.input_norm(x), step))
        x += self.post_feedforward_norm.of(self.mlp(self.pre_feedforward_norm(x)))


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    # Some published files have both
    given.without_effect("sliding_window_size", given.optional_positive("sliding_window"))
    return {
        **gemma_features(given, period=2),
        "attention_soft_cap": given.optional_number("attn_logit_softcapping"),
        "final_soft_cap": given.optional_number("final_logit_softcapping"),
    }


def gemma_features(given: ConfigFields, period: int) -> dict[str, Any]:
    """Read what Gemma 2 and 3 have in common; every layer but each ``period``-th has a window, unless it says so."""
    check_rotated_whole(given)
    given.choice("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    num_layers = given.positive("num_hidden_layers")
    has_biases = given.flag("attention_bias")
    return {
        "head_dim": given.positive("head_dim", 256),
        "activation": given.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh"),
        "attention_scale": given.number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": math.sqrt(given.positive("hidden_size")),
        "tie_word_embeddings": given.flag("tie_word_embeddings", default=True),
        "qkv_bias": has_biases,
        "output_bias": has_biases,
        **window_features(given, [index for index in range(num_layers) if (index + 1) % period]),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer, GemmaNorm)


def _layer(name: str, config: ModelConfig, index: int) -> GemmaLayer:
    return GemmaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index))
