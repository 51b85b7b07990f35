"""DeepSeek V3 and R1 (arXiv:2412.19437), and Kimi K2 (arXiv:2507.20534): latent attention, and experts."""

from dataclasses import replace
from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole
from splitserve.models.experts import ExpertsSpec, deepseek_experts
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.latent import latent_features
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.experts import ExpertsMlp
from splitserve.models.layers.latent import LatentAttention


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    given.choice("hidden_act", ("silu",), "silu")
    check_rotated_whole(given)
    check_every_layer(given)
    for name in ("n_group", "topk_group", "n_shared_experts", "routed_scaling_factor"):
        given.number(name)  # V3's own defaults are not those of similar families, so they have to be there
    experts = deepseek_experts(given)
    first = given.natural("first_k_dense_replace", 3)
    return {
        **latent_features(given),
        "experts": replace(experts, dense_layers=frozenset(range(first))),
        "num_speculator_layers": num_speculator_layers(given),
    }


def check_every_layer(given: ConfigFields) -> None:
    """Raise :class:`CheckpointError` if only some of the layers behind the dense ones have experts."""
    if (step := given.positive("moe_layer_freq", 1)) != 1:
        raise CheckpointError(f"config.json: moe_layer_freq is {step}; only 1 is supported")


def num_speculator_layers(given: ConfigFields) -> int:
    """Read how many layers behind the others predict further tokens."""
    return max(given.natural("num_nextn_predict_layers", 0), given.natural("num_mtp_layers", 0))


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, latent_layer)


def latent_layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    """Declare a layer with latent attention, and with experts where it has them."""
    assert isinstance(config.experts, ExpertsSpec)
    attention = LatentAttention(f"{name}.self_attn", config, index)
    is_dense = index in config.experts.dense_layers
    return LlamaLayer(name, config, attention, None if is_dense else ExpertsMlp(f"{name}.mlp", config))
