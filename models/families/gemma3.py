"""Gemma 3 (arXiv:2503.19786): Gemma 2 with norms of heads instead of soft caps, and other rotations in windows."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig
from splitserve.models.families.gemma2 import GemmaLayer, GemmaNorm, gemma_features
from splitserve.models.layers.attention import GroupedAttention
from splitserve.models.layers.decoder import Decoder
from splitserve.models.rope import read_rope, rope_by_kind


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    given.get("_sliding_window_pattern")  # transformers 5 writes it beside layer_types, which says the same
    given.without_effect("attn_logit_softcapping", None)  # transformers has the field, and passes over it
    full, sliding = rope_by_kind(given)
    main = read_rope(full, given, given.number("rope_theta", 1e6))
    local = given.number("rope_local_base_freq", 1e4)
    return {
        **gemma_features(given, period=given.positive("sliding_window_pattern", 6)),
        "rope_theta": main.theta,
        "rope_scaling": main.scaling,
        "sliding_rope": read_rope(sliding, given, local),
        "final_soft_cap": given.optional_number("final_logit_softcapping"),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, _layer, GemmaNorm)


def _layer(name: str, config: ModelConfig, index: int) -> GemmaLayer:
    attention = GroupedAttention(f"{name}.self_attn", config, index, head_norms=True, norm_offset=1.0)
    return GemmaLayer(name, config, attention)
