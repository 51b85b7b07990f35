"""GLM-4.5 and GLM-4.6 (arXiv:2508.06471): Llama whose MLPs are mixtures of experts, its heads rotated in part."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, full_attention_only, partial_rotary_factor
from splitserve.models.experts import deepseek_experts
from splitserve.models.families.llama import LlamaLayer
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder
from splitserve.models.layers.experts import ExpertsMlp


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    full_attention_only(given)
    given.choice("hidden_act", ("silu",), "silu")
    head_dim = given.positive("head_dim", given.positive("hidden_size") // given.positive("num_attention_heads"))
    return {
        "rotary_dim": int(head_dim * partial_rotary_factor(given, 0.5)),
        "qkv_bias": given.flag("attention_bias"),
        "head_norms": given.flag("use_qk_norm"),
        "rms_norm_eps": given.number("rms_norm_eps", 1e-5),
        "experts": deepseek_experts(given),
        "num_speculator_layers": given.natural("num_nextn_predict_layers", 0),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer)


def _layer(name: str, config: ModelConfig, index: int) -> LlamaLayer:
    assert config.experts is not None
    attention = GroupedAttention(f"{name}.self_attn", config, index, head_norms=config.head_norms)
    is_dense = index in config.experts.dense_layers
    return LlamaLayer(name, config, attention, None if is_dense else ExpertsMlp(f"{name}.mlp", config))
