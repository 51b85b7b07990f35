"""Ministral 3: Mistral, with queries that grow with the logarithm of the position (as Llama 4's)."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.families.mistral import window_of_all_layers
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder
from splitserve.models.rope import rope_fields


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    rope = ConfigFields(rope_fields(given))
    # Devstral 2's is 0: its queries don't grow
    beta = 0.0 if rope.get("llama_4_scaling_beta") == 0 else rope.number("llama_4_scaling_beta")
    return {
        "query_beta": beta,
        "query_period": rope.positive("original_max_position_embeddings"),
        **window_of_all_layers(given),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index))
