"""DeepSeek V2 and V2-Lite (arXiv:2405.04434): latent attention, and experts that are chosen by a softmax."""

from typing import Any

from splitserve.kernels.experts.spec import GroupScore, RouterSpec
from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole
from splitserve.models.experts import ExpertsSpec, check_router
from splitserve.models.families.deepseek_v3 import check_every_layer, latent_layer, num_speculator_layers
from splitserve.models.latent import latent_features
from splitserve.models.layers.decoder import Decoder


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    given.choice("hidden_act", ("silu",), "silu")
    check_rotated_whole(given)
    given.choice("scoring_func", ("softmax",), "softmax")
    for name in ("norm_topk_prob", "mlp_bias"):
        given.only_flag(name, allowed=False, default=False)
    check_every_layer(given)
    inner_size = given.positive("moe_intermediate_size", 1407)
    experts = ExpertsSpec(
        check_router(_router(given), experts="n_routed_experts"),
        inner_size,
        dense_layers=frozenset(range(given.natural("first_k_dense_replace", 0))),
        shared_size=inner_size * given.natural("n_shared_experts", 2),
    )
    return {**latent_features(given), "experts": experts, "num_speculator_layers": num_speculator_layers(given)}


def _router(given: ConfigFields) -> RouterSpec:
    """Return the router; with the method "greedy" groups have no part in the choice."""
    method = given.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups, kept = given.optional_positive("n_group") or 1, given.optional_positive("topk_group") or 1
    if method == "greedy":
        groups = kept = 1
    return RouterSpec(
        given.positive("n_routed_experts", 64),
        given.positive("num_experts_per_tok"),
        scale=given.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        kept_groups=kept,
        group_score=GroupScore.MAX,
        wide_logits=True,
    )


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, latent_layer)
