"""Nemotron-4, Minitron (arXiv:2402.16819): layer norms of 1 + weight, half of each head rotated, squared ReLU."""

from functools import partial
from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, full_attention_only, partial_rotary_factor
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder, DecoderLayer
from splitserve.models.layers.mlp import Mlp
from splitserve.models.layers.norm import WideNorm
from splitserve.models.layers.residual import Residual
from splitserve.models.layers.step import Step

LayerNorm = partial(WideNorm, centred=True, bias=True, offset=1.0)


class NemotronLayer(DecoderLayer):
    """Attention and an MLP, each behind a layer norm."""

    def __init__(self, name: str, config: ModelConfig, index: int) -> None:
        self.input_norm = LayerNorm(f"{name}.input_layernorm", config)
        self.attention = GroupedAttention(f"{name}.self_attn", config, index)
        self.post_attention_norm = LayerNorm(f"{name}.post_attention_layernorm", config)
        self.mlp = Mlp(f"{name}.mlp", config)

    def __call__(self, x: Residual, step: Step) -> None:
        x += self.attention(self.input_norm(x), step)
        x += self.mlp(self.post_attention_norm(x))


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    full_attention_only(given)
    head_dim = given.positive("hidden_size") // given.positive("num_attention_heads")
    has_biases = given.flag("attention_bias")
    return {
        "activation": given.choice("hidden_act", ("relu2",), "relu2"),
        "mlp_gate": False,
        "rotary_dim": int(given.positive("head_dim", head_dim) * partial_rotary_factor(given, 0.5)),
        "qkv_bias": has_biases,
        "output_bias": has_biases,
        "mlp_bias": given.flag("mlp_bias"),
        "rms_norm_eps": given.number("norm_eps", 1e-5),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, NemotronLayer, LayerNorm)
