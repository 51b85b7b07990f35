"""Qwen3 with experts, 30B-A3B and 235B-A22B (arXiv:2505.09388): Qwen3 whose MLPs are mixtures of experts."""

from typing import Any

from splitserve.kernels.experts.spec import RouterSpec
from splitserve.models.config import ConfigFields, ModelConfig
from splitserve.models.experts import ExpertsSpec, check_router, layer_numbers
from splitserve.models.families import qwen3
from splitserve.models.families.llama import LlamaLayer
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
    return {**qwen3.features(given), "experts": experts}


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    assert config.experts is not None
    attention = GroupedAttention(f"{name}.self_attn", config, index, head_norms=True)
    is_dense = index in config.experts.dense_layers
    return LlamaLayer(name, config, attention, None if is_dense else ExpertsMlp(f"{name}.mlp", config))
