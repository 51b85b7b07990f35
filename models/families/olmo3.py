"""OLMo 3: OLMo 2 with a sliding window in three layers of four, whose rotations are not rescaled."""

from typing import Any

from splitserve.models.config import ConfigFields, ModelConfig, window_features
from splitserve.models.families.olmo2 import build as build_olmo2
from splitserve.models.families.olmo2 import olmo_features
from splitserve.models.layers.decoder import Decoder
from splitserve.models.rope import read_rope


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    # transformers passes over it, since it takes any rope_scaling as that of full attention
    given.without_effect("original_max_position_embeddings", None)
    theta = given.number("rope_theta", 10000.0)
    sliding_rope = given.mapping("rope_parameters").get("sliding_attention") or {}
    num_layers = given.positive("num_hidden_layers")
    return {
        **olmo_features(given),
        "sliding_rope": read_rope(sliding_rope, given, theta),
        **window_features(given, [index for index in range(num_layers) if (index + 1) % 4]),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return build_olmo2(config)
