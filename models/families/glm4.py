"""GLM-4 (0414): norms before and after attention and MLP; half of each head is rotated, in neighbouring pairs."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, full_attention_only, partial_rotary_factor
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder, DecoderLayer
from splitserve.models.layers.mlp import GatedMlp
from splitserve.models.layers.norm import RmsNorm, WideNorm
from splitserve.models.layers.residual import Residual
from splitserve.models.layers.step import Step


class Glm4Layer(DecoderLayer):
    """Attention and a gated MLP, each between two norms."""

    def __init__(self, name: str, config: ModelConfig, index: int) -> None:
        self.input_norm = RmsNorm(f"{name}.input_layernorm", config)
        self.attention = GroupedAttention(f"{name}.self_attn", config, index)
        self.after_attention_norm = WideNorm(f"{name}.post_self_attn_layernorm", config)
        self.post_attention_norm = RmsNorm(f"{name}.post_attention_layernorm", config)
        self.mlp = GatedMlp(f"{name}.mlp", config, fused="gate_up_proj")
        self.after_mlp_norm = WideNorm(f"{name}.post_mlp_layernorm", config)

    def __call__(self, x: Residual, step: Step) -> None:
        x += self.after_attention_norm.of(self.attention(self.input_norm(x), step))
        x += self.after_mlp_norm.of(self.mlp(self.post_attention_norm(x)))


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    full_attention_only(given)
    given.choice("hidden_act", ("silu",), "silu")
    head_dim = given.positive("head_dim", 128)
    return {
        "head_dim": head_dim,
        "rotary_dim": int(head_dim * partial_rotary_factor(given, 0.5)),
        "rotates_neighbours": True,
        "qkv_bias": given.flag("attention_bias", default=True),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, Glm4Layer)
