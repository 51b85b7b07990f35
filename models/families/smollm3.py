"""SmolLM3: Llama without positions in every fourth layer (NoPE, arXiv:2305.19466)."""

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
from splitserve.models.families.llama import LlamaLayer, biases
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    num_layers, interval = given.positive("num_hidden_layers"), given.positive("no_rope_layer_interval", 4)
    rotated = given.items("no_rope_layers")  # 1: the layer is rotated, in spite of the name
    if not rotated:
        rotated = [int((index + 1) % interval != 0) for index in range(num_layers)]
    if len(rotated) != num_layers or any(each not in (0, 1) for each in rotated):
        raise CheckpointError(f"config.json: no_rope_layers is {shown(rotated)}; {num_layers} of 0 and 1 are needed")
    unrotated = [index for index, each in enumerate(rotated) if not each]
    sliding = window_features(given, unrotated) if given.flag("use_sliding_window") else {}
    if not sliding:
        given.get("sliding_window")
        full_attention_only(given)
    return {
        **biases(given),
        **sliding,
        "unrotated_layers": tuple(unrotated),
        "num_kv_heads": given.positive("num_key_value_heads", 4),
        "tie_word_embeddings": given.flag("tie_word_embeddings", default=True),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index))
