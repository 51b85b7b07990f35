"""Qwen3 (arXiv:2505.09388): Llama with an RMS norm on each head of queries and keys."""

from splitserve.models.config import ModelConfig
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index, head_norms=True))
