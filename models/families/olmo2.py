"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP instead of before, and of all queries and all keys."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole, full_attention_only
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder, DecoderLayer
from splitserve.models.layers.mlp import GatedMlp
from splitserve.models.layers.norm import WideNorm
from splitserve.models.layers.residual import Residual
from splitserve.models.layers.step import Step


class OlmoLayer(DecoderLayer):
    """Attention and a gated MLP of the residual as it is; a norm of each result is added."""

    def __init__(self, name: str, config: ModelConfig, attention: GroupedAttention) -> None:
        self.attention = attention
        self.post_attention_norm = WideNorm(f"{name}.post_attention_layernorm", config)
        self.mlp = GatedMlp(f"{name}.mlp", config)
        self.post_feedforward_norm = WideNorm(f"{name}.post_feedforward_layernorm", config)

    def __call__(self, x: Residual, step: Step) -> None:
        x += self.post_attention_norm.of(self.attention(x.unnormed(), step))
        x += self.post_feedforward_norm.of(self.mlp(x.unnormed()))


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    full_attention_only(given)
    return olmo_features(given)


def olmo_features(given: ConfigFields) -> dict[str, Any]:
    """Read what OLMo 2 and 3 have in common."""
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    has_biases = given.flag("attention_bias")
    eps = given.number("rms_norm_eps", 1e-5)
    return {"qkv_bias": has_biases, "output_bias": has_biases, "rms_norm_eps": eps}


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer, WideNorm)


def _layer(name: str, config: ModelConfig, index: int) -> OlmoLayer:
    return OlmoLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index, joint_norms=True))
