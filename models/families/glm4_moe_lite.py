"""GLM-4.7-Flash: latent attention, and the experts of GLM-4.5."""

from dataclasses import replace
from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import few
from splitserve.models.config import ConfigFields, ModelConfig, check_rotated_whole
from splitserve.models.experts import deepseek_experts
from splitserve.models.families.deepseek_v3 import latent_layer, num_speculator_layers
from splitserve.models.latent import latent_features
from splitserve.models.layers.decoder import Decoder


def features(given: ConfigFields) -> dict[str, Any]:
    """Read what its config.json has beside the sizes."""
    given.choice("hidden_act", ("silu",), "silu")
    check_rotated_whole(given)
    return {
        **latent_features(given),
        "rms_norm_eps": given.number("rms_norm_eps", 1e-5),
        "experts": replace(deepseek_experts(given), dense_layers=_dense_layers(given)),
        "num_speculator_layers": num_speculator_layers(given),
    }


def _dense_layers(given: ConfigFields) -> frozenset[int]:
    """Return the layers without experts, listed by layer or counted from the first one."""
    kinds, num_layers = given.items("mlp_layer_types"), given.positive("num_hidden_layers")
    if not kinds:
        return frozenset(range(given.natural("first_k_dense_replace", 1)))
    if other := [kind for kind in kinds if kind not in ("dense", "sparse")]:
        raise CheckpointError(f"config.json: mlp_layer_types has {few(other)}; supported are dense and sparse")
    if len(kinds) != num_layers:
        raise CheckpointError(f"config.json: mlp_layer_types has {len(kinds)} entries for {num_layers} layers")
    return frozenset(index for index, kind in enumerate(kinds) if kind == "dense")


def build(config: ModelConfig) -> Decoder:
    """Declare the model."""
    return Decoder(config, latent_layer)
