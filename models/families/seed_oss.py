"""Seed-OSS: Llama with biases on queries, keys and values."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole, full_attention_only
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    full_attention_only(given)
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    return {
        "head_dim": given.positive("head_dim", 128),
        "qkv_bias": given.flag("attention_bias", default=True),
        "output_bias": given.flag("attention_out_bias"),
        "mlp_bias": given.flag("mlp_bias"),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index))
