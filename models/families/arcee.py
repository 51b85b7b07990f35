"""Arcee AFM: Llama with an MLP of squared ReLU, without gates (arXiv:2109.08668)."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole, full_attention_only
from splitserve.models.families.llama import LlamaLayer, biases
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.mlp import Mlp


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    full_attention_only(given)
    check_rotated_whole(given)
    return {
        **biases(given),
        "activation": given.choice("hidden_act", ("relu2",), "relu2"),
        "mlp_gate": False,
        "rms_norm_eps": given.number("rms_norm_eps", 1e-5),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index), Mlp(f"{name}.mlp", config))
