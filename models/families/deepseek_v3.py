"""DeepSeek V3 and R1 (arXiv:2412.19437), and Kimi K2: latent attention and experts."""

from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.models.config import ConfigFields, ModelConfig
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.latent import latent_features
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.latent import LatentAttention

_EXPERT_FIELDS = (
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
)


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    given.choice("hidden_act", ("silu",), "silu")
    refuse_experts(given, given.count("first_k_dense_replace", 3))
    return {**latent_features(given), "num_extra_layers": num_extra_layers(given)}


def refuse_experts(given: ConfigFields, num_dense: int) -> None:
    """Raise :class:`CheckpointError` unless all layers are dense, so that the fields of experts change nothing."""
    num_layers = given.positive("num_hidden_layers")
    if num_dense < num_layers:
        raise CheckpointError(
            f"config.json: {num_layers - num_dense} of {num_layers} layers have experts; only dense ones are supported"
        )
    for name in _EXPERT_FIELDS:
        given.get(name)


def num_extra_layers(given: ConfigFields) -> int:
    """Read how many layers behind the others predict further tokens."""
    return max(given.count("num_nextn_predict_layers"), given.count("num_mtp_layers"))


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(name, config, LatentAttention(f"{name}.self_attn", config, index))
