"""Mistral 7B, Nemo, Small (arXiv:2310.06825): Llama, in some releases with a sliding window in every layer."""

from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole, window_features
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    return _window(given)


def window_of_all_layers(given: ConfigFields) -> dict[str, Any]:
    """Read the sliding window that all layers have, unless it is null. Other layers than all aren't supported."""
    found = _window(given)
    if found and len(found["sliding_layers"]) < given.positive("num_hidden_layers"):
        raise CheckpointError(
            "config.json: layer_types has 'full_attention', but all layers of this architecture have the window that "
            "sliding_window gives; remove layer_types, and for full attention sliding_window as well"
        )
    return found


def _window(given: ConfigFields) -> dict[str, Any]:
    """Read which layers have a sliding window: all, unless ``layer_types`` says otherwise. transformers then takes
    Mistral as Ministral, which has the same weights."""
    if given.get("sliding_window") is None:
        return {}
    return window_features(given, list(range(given.positive("num_hidden_layers"))))


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index))
