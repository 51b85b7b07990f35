"""StarCoder 2 (arXiv:2402.19173): layer norms, biases everywhere, an MLP of GELU without gates."""

from functools import partial
from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole
from splitserve.models.families.mistral import window_of_all_layers
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder, DecoderLayer
from splitserve.models.layers.mlp import Mlp
from splitserve.models.layers.norm import WideNorm
from splitserve.models.layers.residual import Residual
from splitserve.models.layers.step import Step

LayerNorm = partial(WideNorm, centred=True, bias=True)


class Starcoder2Layer(DecoderLayer):
    """Attention and an MLP, each behind a layer norm."""

    def __init__(self, name: str, config: ModelConfig, index: int) -> None:
        self.input_norm = LayerNorm(f"{name}.input_layernorm", config)
        self.attention = GroupedAttention(f"{name}.self_attn", config, index)
        self.post_attention_norm = LayerNorm(f"{name}.post_attention_layernorm", config)
        self.mlp = Mlp(f"{name}.mlp", config, up="c_fc", down="c_proj")

    def __call__(self, x: Residual, step: Step) -> None:
        x += self.attention(self.input_norm(x), step)
        x += self.mlp(self.post_attention_norm(x))


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    check_rotated_whole(given)
    has_biases = given.flag("use_bias", default=True)
    given.choice("norm_type", ("layer_norm",), "layer_norm")
    given.choice("mlp_type", ("default",), "default")
    return {
        "activation": given.choice("hidden_act", ("gelu_pytorch_tanh", "gelu"), "gelu_pytorch_tanh"),
        "mlp_gate": False,
        "qkv_bias": has_biases,
        "output_bias": has_biases,
        "mlp_bias": has_biases,
        "rms_norm_eps": given.number("norm_epsilon", 1e-5),
        "tie_word_embeddings": given.flag("tie_word_embeddings", default=True),
        **window_of_all_layers(given),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, Starcoder2Layer, LayerNorm)
