"""OLMo 3: OLMo 2 with a sliding window in three layers of four, whose rotations are not rescaled."""

from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.models.config import ConfigFields, ModelConfig, window_features
from splitserve.models.families.olmo2 import build as build_olmo2
from splitserve.models.families.olmo2 import olmo_features
from splitserve.models.layers.decoder import Decoder
from splitserve.models.rope import read_rope, rope_by_kind

_THETA = 5e5


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    # transformers passes over it, since it takes any rope_scaling as that of full attention
    given.without_effect("original_max_position_embeddings", None)
    theta, (_, sliding) = given.number("rope_theta", _THETA), rope_by_kind(given)
    if theta != _THETA and sliding.get("rope_theta") is None:
        raise CheckpointError(
            f"config.json: rope_theta is {theta:g}, which transformers 4 takes for all layers, and 5 for those of full "
            "attention; give the rope_theta of each kind of layer in rope_parameters"
        )
    num_layers = given.positive("num_hidden_layers")
    return {
        **olmo_features(given),
        "sliding_rope": read_rope(sliding, given, theta),
        **window_features(given, [index for index in range(num_layers) if (index + 1) % 4]),
    }


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return build_olmo2(config)
