"""Qwen3 with experts, 30B-A3B and 235B-A22B (arXiv:2505.09388): Qwen3 whose MLPs are mixtures of experts."""

from typing import Any

from splitserve.kernels.experts.spec import RouterSpec
from splitserve.models.config import ConfigFields, ModelConfig, full_attention_only
from splitserve.models.experts import ExpertsSpec, check_router, layer_numbers
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.families.mistral import window_of_all_layers
from splitserve.models.families.qwen3 import qwen3_features
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.experts import ExpertsMlp


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    count = "num_experts" if given.raw.get("num_local_experts") is None else "num_local_experts"
    router = RouterSpec(
        given.positive(count, 128), given.positive("num_experts_per_tok", 8), normalised=given.flag("norm_topk_prob")
    )
    step = given.positive("decoder_sparse_step", 1)
    num_layers = given.positive("num_hidden_layers")
    dense = layer_numbers(given, "mlp_only_layers", num_layers)
    experts = ExpertsSpec(
        check_router(router, experts=count),
        given.positive("moe_intermediate_size", 768),
        dense_layers=dense | {index for index in range(num_layers) if (index + 1) % step},
    )
    return {**qwen3_features(given), **_window(given), "experts": experts}


def _window(given: ConfigFields) -> dict[str, Any]:
    """Read the sliding window. Unlike Qwen3's, it is of all layers: ``max_window_layers`` has no effect."""
    if given.flag("use_sliding_window"):
        return window_of_all_layers(given)
    given.get("sliding_window")
    full_attention_only(given)
    return {}


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    assert config.experts is not None
    attention = GroupedAttention(f"{name}.self_attn", config, index, head_norms=True)
    is_dense = index in config.experts.dense_layers
    return LlamaLayer(name, config, attention, None if is_dense else ExpertsMlp(f"{name}.mlp", config))
