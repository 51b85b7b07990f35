"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783)."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole, full_attention_only
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder, DecoderLayer
from splitserve.models.layers.experts import ExpertsMlp
from splitserve.models.layers.latent import LatentAttention
from splitserve.models.layers.mlp import GatedMlp, Mlp
from splitserve.models.layers.norm import RmsNorm
from splitserve.models.layers.residual import Residual
from splitserve.models.layers.step import Step


class LlamaLayer(DecoderLayer):
    """Attention and an MLP, each behind a norm of its own. Similar families replace them."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        attention: GroupedAttention | LatentAttention,
        mlp: GatedMlp | Mlp | ExpertsMlp | None = None,
    ) -> None:
        self.input_norm = RmsNorm(f"{name}.input_layernorm", config)
        self.attention = attention
        self.post_attention_norm = RmsNorm(f"{name}.post_attention_layernorm", config)
        self.mlp = mlp or GatedMlp(f"{name}.mlp", config)

    def __call__(self, x: Residual, step: Step) -> None:
        x += self.attention(self.input_norm(x), step)
        x += self.mlp(self.post_attention_norm(x))


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what Llama's config.json has beside the sizes."""
    full_attention_only(given)
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    return biases(given)


def biases(given: ConfigFields) -> dict[str, Any]:
    """Read which projections have biases."""
    has_biases = given.flag("attention_bias")
    return {"qkv_bias": has_biases, "output_bias": has_biases, "mlp_bias": given.flag("mlp_bias")}


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index))
