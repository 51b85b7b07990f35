"""Qwen3 (arXiv:2505.09388): Llama with an RMS norm on each head of queries and keys."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.families.qwen2 import window_of_last_layers
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    return {**qwen3_features(given), **window_of_last_layers(given)}


def qwen3_features(given: ConfigFields) -> dict[str, Any]:
    """Read what Qwen3 has with and without experts."""
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    has_biases = given.flag("attention_bias")
    return {"qkv_bias": has_biases, "output_bias": has_biases}


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index, head_norms=True))
