"""Latent attention (MLA, arXiv:2405.04434) as config.json describes it. No torch here."""

import math
from dataclasses import dataclass
from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.kernels.latent.shape import LatentShape
from splitserve.models.fields import ConfigFields
from splitserve.models.rope import mscale


@dataclass(frozen=True, slots=True)
class LatentSizes(LatentShape):
    """Sizes of a layer's projections."""

    query_rank: int | None = None  # elements of the vector that queries are expanded from; None: projected directly


def latent_features(given: ConfigFields) -> dict[str, Any]:
    """Return the features of a model with latent attention. Raises :class:`CheckpointError`."""
    sizes = LatentSizes(
        query_rank=given.optional_positive("q_lora_rank"),
        rank=given.positive("kv_lora_rank"),
        plain_dim=given.positive("qk_nope_head_dim"),
        rotated_dim=given.positive("qk_rope_head_dim"),
        value_dim=given.positive("v_head_dim"),
    )
    _check(given, sizes)
    return {
        "latent": sizes,
        "num_kv_heads": 1,
        "head_dim": sizes.rotated_dim,
        "attention_scale": _scale(given, sizes),
        "rotates_neighbours": given.flag("rope_interleave", default=True),
    }


def _check(given: ConfigFields, sizes: LatentSizes) -> None:
    heads = given.positive("num_attention_heads")
    kv_heads = given.positive("num_key_value_heads", heads)
    if kv_heads != heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads is {kv_heads}; latent attention has keys and values for each of the "
            f"{heads} attention heads"
        )
    if given.flag("attention_bias"):
        raise CheckpointError("config.json: attention_bias is true; latent attention is supported without biases")
    allowed = (sizes.rotated_dim, sizes.query_dim)
    for name in ("head_dim", "qk_head_dim"):
        size = given.optional_positive(name)
        if size is not None and size not in allowed:
            raise CheckpointError(
                f"config.json: {name} is {size}; qk_nope_head_dim and qk_rope_head_dim make it {allowed[0]} or "
                f"{allowed[1]}"
            )


def _scale(given: ConfigFields, sizes: LatentSizes) -> float:
    """Return the factor of scores: where contexts are stretched, these families sharpen the softmax, too."""
    scale = 1.0 / math.sqrt(sizes.query_dim)
    rope = ConfigFields(given.mapping("rope_parameters") or given.mapping("rope_scaling"))
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if kind != "default" and rope.get("mscale_all_dim"):
        scale *= mscale(rope.number("factor"), rope.number("mscale_all_dim")) ** 2
    return scale
