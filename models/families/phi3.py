"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905): Llama with fused projections, its heads rotated in part."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, partial_rotary_factor
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.families.mistral import window_of_all_layers
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.mlp import GatedMlp
from splitserve.models.rope import rope_fields


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    given.choice("hidden_act", ("silu",), "silu")
    for name in ("full_attn_mod", "interpolate_factor"):
        given.without_effect(name, 1)  # Phi-4-mini's
    rope = ConfigFields(rope_fields(given))
    rope.choice("rope_type" if "rope_type" in rope.raw else "type", ("default", "longrope", "su"), "default")
    head_dim = given.positive("hidden_size") // given.positive("num_attention_heads")
    rotary_dim = int(given.positive("head_dim", head_dim) * partial_rotary_factor(given))
    return {"rotary_dim": rotary_dim, "rms_norm_eps": given.number("rms_norm_eps", 1e-5), **window_of_all_layers(given)}


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(
        name,
        config,
        GroupedAttention(f"{name}.self_attn", config, index, fused="qkv_proj"),
        GatedMlp(f"{name}.mlp", config, fused="gate_up_proj"),
    )
