"""Command R7B and Command A (Cohere 2, arXiv:2504.00698): attention and MLP side by side behind one layer norm."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole, window_features
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder, DecoderLayer
from splitserve.models.layers.mlp import GatedMlp
from splitserve.models.layers.norm import WideNorm
from splitserve.models.layers.residual import Residual
from splitserve.models.layers.step import Step

# Fields of the published files that transformers' code has no use for
_WITHOUT_EFFECT: Mapping[str, Any] = {
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
}  # fmt: skip

LayerNorm = partial(WideNorm, centred=True)


class Cohere2Layer(DecoderLayer):
    """Attention and a gated MLP of the same input."""

    def __init__(self, name: str, config: ModelConfig, index: int) -> None:
        self.norm = LayerNorm(f"{name}.input_layernorm", config)
        self.attention = GroupedAttention(f"{name}.self_attn", config, index)
        self.mlp = GatedMlp(f"{name}.mlp", config)

    def __call__(self, x: Residual, step: Step) -> None:
        normed = self.norm(x)
        attended = self.attention(normed, step)
        x += attended
        x += self.mlp(normed.kept(attended.rows))


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes. Layers without a window are not rotated."""
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    num_layers, period = given.positive("num_hidden_layers"), given.positive("sliding_window_pattern", 4)
    for name, value in {"layer_switch": period, **_WITHOUT_EFFECT}.items():
        given.without_effect(name, value)
    given.get("_sliding_window_pattern")  # transformers 4.57 writes it beside layer_types, which says the same
    given.flag("use_parallel_embedding")  # false in Tiny Aya's file: how training spread the embedding over ranks
    windows = window_features(given, [index for index in range(num_layers) if (index + 1) % period])
    has_biases = given.flag("attention_bias")
    return {
        **windows,
        "unrotated_layers": tuple(index for index in range(num_layers) if index not in windows["sliding_layers"]),
        "rotates_neighbours": True,
        "qkv_bias": has_biases,
        "output_bias": has_biases,
        "logits_scale": given.number("logit_scale", 0.0625),
        "rms_norm_eps": given.number("layer_norm_eps", 1e-5),
        "tie_word_embeddings": given.flag("tie_word_embeddings", default=True),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, Cohere2Layer, LayerNorm)
