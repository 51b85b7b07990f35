"""GPT-OSS 20B and 120B (arXiv:2508.10925): experts in MXFP4, attention sinks, a window in every other layer."""

from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.kernels.experts.spec import MXFP4_GROUP, GatedActivation, RouterSpec, Score
from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole, is_mxfp4, window_features
from splitserve.models.experts import ExpertsSpec, check_router
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.experts import ExpertsMlp
from splitserve.models.rope import read_rope, rope_fields

_THETA = 150000.0
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    check_rotated_whole(given)
    given.choice("hidden_act", ("silu",), "silu")
    for name in ("experts_per_token", "initial_context_length"):
        given.get(name)  # in the released files, beside fields that say the same
    has_biases = given.flag("attention_bias", default=True)
    num_layers = given.positive("num_hidden_layers")
    main = read_rope(rope_fields(given, _YARN), given, given.number("rope_theta", _THETA))
    return {
        "head_dim": given.positive("head_dim", 64),
        "rms_norm_eps": given.number("rms_norm_eps", 1e-5),
        "rope_theta": main.theta,
        "rope_scaling": main.scaling,
        "qkv_bias": has_biases,
        "output_bias": has_biases,
        "sinks": True,
        "experts": _experts(given),
        **window_features(given, list(range(0, num_layers, 2))),
    }


def _experts(given: ConfigFields) -> ExpertsSpec:
    count = "num_experts" if given.raw.get("num_local_experts") is None else "num_local_experts"
    router = RouterSpec(
        given.positive(count), given.positive("num_experts_per_tok", 4), Score.SOFTMAX_OF_TOP, logits_bias=True
    )
    activation = GatedActivation(
        interleaved=True,
        limit=given.number("swiglu_limit", 7.0),
        sigmoid_factor=given.number("swiglu_alpha", 1.702),
        up_offset=1.0,
    )
    packed = is_mxfp4(given)
    for name in ("hidden_size", "intermediate_size"):
        if packed and given.positive(name) % MXFP4_GROUP:
            raise CheckpointError(
                f"config.json: {name} is {given.positive(name)}; MXFP4 needs a multiple of {MXFP4_GROUP}"
            )
    return ExpertsSpec(
        check_router(router, experts=count),
        given.positive("intermediate_size"),
        activation=activation,
        biases=True,
        is_mxfp4=packed,
        is_transposed=not packed,
    )


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    attention = GroupedAttention(f"{name}.self_attn", config, index, sinks=config.sinks)
    experts = ExpertsMlp(f"{name}.mlp", config, router="router", projections=("gate_up_proj", "down_proj"))
    return LlamaLayer(name, config, attention, experts)
