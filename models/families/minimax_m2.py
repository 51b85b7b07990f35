"""MiniMax-M2: Llama whose MLPs are mixtures of experts, with norms of all queries and all keys."""

from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import few
from splitserve.kernels.experts.spec import RouterSpec, Score
from splitserve.models.config import ConfigFields, ModelConfig, full_attention_only, partial_rotary_factor
from splitserve.models.experts import ExpertsSpec, check_router
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.families.mixtral import PROJECTIONS
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.experts import ExpertsMlp

_WITHOUT_EFFECT = (
    "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size",
    "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp",
)  # fmt: skip


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    full_attention_only(given)
    given.choice("hidden_act", ("silu",), "silu")
    count = "num_local_experts"
    router = RouterSpec(
        given.positive(count, 256),
        given.positive("num_experts_per_tok", 8),
        Score.SIGMOID,
        normalised=True,
        correction_bias=True,
    )
    _refuse_other_kinds(given)
    head_dim = given.positive("head_dim", 128)
    rotary_dim = given.optional_positive("rotary_dim") or int(head_dim * partial_rotary_factor(given))
    return {
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "experts": ExpertsSpec(check_router(router, experts=count), given.positive("intermediate_size")),
    }


def _refuse_other_kinds(given: ConfigFields) -> None:
    """Raise :class:`CheckpointError` for kinds of layers that other MiniMax models have; pass over fields without
    effect, among them those of the speculator that the released files lack."""
    given.choice("scoring_func", ("sigmoid",), "sigmoid")
    given.choice("qk_norm_type", ("per_layer",), "per_layer")
    kinds = given.items("attn_type_list")
    if any(kind != 1 for kind in kinds):
        raise CheckpointError(f"config.json: attn_type_list has {few(set(kinds))}; only 1 (softmax) is supported")
    for name in ("use_qk_norm", "use_routing_bias"):
        given.only_flag(name, allowed=True, default=True)
    if given.natural("shared_intermediate_size", 0):
        raise CheckpointError("config.json: shared_intermediate_size isn't 0; shared experts aren't supported here")
    for name in _WITHOUT_EFFECT:
        given.get(name)


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    return LlamaLayer(
        name,
        config,
        GroupedAttention(f"{name}.self_attn", config, index, joint_norms=True),
        ExpertsMlp(f"{name}.block_sparse_moe", config, correction="e_score_correction_bias", projections=PROJECTIONS),
    )
