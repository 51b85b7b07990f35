"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115): Llama with biases on queries, keys and values."""

from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import shown
from splitserve.models.config import (
    ConfigFields,
    ModelConfig,
    check_rotated_whole,
    full_attention_only,
    window_features,
)
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    return window_of_last_layers(given)


def window_of_last_layers(given: ConfigFields) -> dict[str, Any]:
    """Read the layers with a sliding window: those from ``max_window_layers`` on, if there are any."""
    first = given.get("max_window_layers")
    if not given.flag("use_sliding_window"):
        given.get("sliding_window")
        full_attention_only(given)
        return {}
    if type(first) is not int or first < 0:
        raise CheckpointError(f"config.json: max_window_layers is {shown(first)}; a number of layers is needed")
    return window_features(given, list(range(first, given.positive("num_hidden_layers"))))


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index, biases=True))
