"""Mixtral 8x7B and 8x22B (arXiv:2401.04088): Mistral whose MLPs are mixtures of experts."""

from typing import Any

from splitserve.kernels.experts.spec import RouterSpec
from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole
from splitserve.models.experts import ExpertsSpec, check_router
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.families.mistral import window_of_all_layers
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.experts import ExpertsMlp

PROJECTIONS = ("w1", "w3", "w2")  # gate, up, down


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    count = "num_local_experts"
    router = RouterSpec(given.positive(count, 8), given.positive("num_experts_per_tok", 2), normalised=True)
    experts = ExpertsSpec(check_router(router, experts=count), given.positive("intermediate_size"))
    return {
        **window_of_all_layers(given),
        "rms_norm_eps": given.number("rms_norm_eps", 1e-5),
        "experts": experts,
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    experts = ExpertsMlp(f"{name}.block_sparse_moe", config, projections=PROJECTIONS)
    return LlamaLayer(name, config, GroupedAttention(f"{name}.self_attn", config, index), experts)
