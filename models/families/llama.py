"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783)."""

from splitserve.models.config import ModelConfig
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder, DecoderLayer
from splitserve.models.layers.mlp import GatedMlp
from splitserve.models.layers.norm import RmsNorm
from splitserve.models.layers.residual import Residual
from splitserve.models.layers.step import Step


class LlamaLayer(DecoderLayer):
    """Attention and a gated MLP, each behind a norm of its own. Similar families replace the attention."""

    def __init__(self, name: str, config: ModelConfig, attention: GroupedAttention) -> None:
        self.input_norm = RmsNorm(f"{name}.input_layernorm", config)
        self.attention = attention
        self.post_attention_norm = RmsNorm(f"{name}.post_attention_layernorm", config)
        self.mlp = GatedMlp(f"{name}.mlp", config)

    def __call__(self, x: Residual, step: Step) -> None:
        x += self.attention(self.input_norm(x), step)
        x += self.mlp(self.post_attention_norm(x))


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index))
