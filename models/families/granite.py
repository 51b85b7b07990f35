"""Granite 3 and 4 dense: Llama with scaled embeddings, scores, summands of the residual, and logits (muP)."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole, full_attention_only
from splitserve.models.families.llama import LlamaLayer, biases
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.residual import Product, Residual, Summand
from splitserve.models.layers.step import Step


class GraniteLayer(LlamaLayer):
    """A layer of Llama that adds a fraction of what it computes."""

    def __init__(self, name: str, config: ModelConfig, attention: GroupedAttention) -> None:
        super().__init__(name, config, attention)
        self._scale, self._hidden_size = config.residual_scale, config.hidden_size

    def __call__(self, x: Residual, step: Step) -> None:
        x += self._scaled(self.attention(self.input_norm(x), step))
        x += self._scaled(self.mlp(self.post_attention_norm(x)))

    def _scaled(self, product: Product) -> Summand:
        return Summand(product.computed(self._hidden_size).mul_(self._scale), product.rows)


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    full_attention_only(given)
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    return {
        **biases(given),
        "embedding_scale": given.number("embedding_multiplier", 1.0),
        "attention_scale": given.number("attention_multiplier", 1.0),
        "residual_scale": given.number("residual_multiplier", 1.0),
        "logits_scale": 1.0 / given.number("logits_scaling", 1.0),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> GraniteLayer:
    return GraniteLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index))
