"""Admission of a checkpoint to the transformers backend: by proof and by a test, not by a list of names."""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import MAX_CONFIG_BYTES, few, read_json_object, shown
from splitserve.models.config import ModelConfig, TransformersSizes
from splitserve.models.fields import RECURRENT_KINDS, ConfigFields
from splitserve.models.rope import longest_context
from splitserve.models.transformers_backend.proof import LayerFacts, ModelFacts, prove
from splitserve.models.transformers_backend.self_test import check_small_copy

logger = logging.getLogger(__name__)

# The rotations of every token of a step depend on the longest of its sequences
_STEPWISE_ROTATIONS = ("dynamic", "longrope")
_LAYER_KINDS = ("full_attention", "sliding_attention")
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers")


def admitted_config(directory: Path, dtype: str) -> ModelConfig:
    """Return the config of the checkpoint in ``directory``, whose attention is proven and tested. Its tokens that end
    a text are missing. ``dtype``: the checkpoint's own.

    Raises :class:`CheckpointError` that says why the model can't be served.
    """
    file = directory / "config.json"
    return _admitted(directory.resolve(), file.stat().st_mtime_ns, dtype)


@functools.lru_cache(maxsize=8)
def _admitted(directory: Path, _changed_at: int, dtype: str) -> ModelConfig:
    model_class, config = read_config(directory)
    served = described(model_class, config, dtype)
    check_small_copy(model_class, config, served, lambda small: described(model_class, small, "float32"))
    return served


def read_config(directory: Path) -> tuple[Any, Any]:
    """Return the class that transformers has for the checkpoint's model, and its config. Nothing else is imported:
    code in the checkpoint's directory never runs. Raises :class:`CheckpointError`."""
    raw = read_json_object(directory / "config.json", MAX_CONFIG_BYTES)
    name = architecture_of(raw)
    _check_raw(raw)
    model_class = getattr(transformers, name)
    if getattr(model_class, "_is_stateful", False):
        raise CheckpointError(f"config.json: {name}: recurrent state isn't supported yet")
    try:
        config = model_class.config_class.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # of many kinds: each class checks its own fields
        raise CheckpointError(f"config.json: transformers refuses it: {error}") from error
    _check(name, config.get_text_config())
    return model_class, config


def architecture_of(raw: Mapping[str, Any]) -> str:
    """Return the first name in ``architectures`` for which transformers has a causal language model."""
    names = ConfigFields(raw).items("architectures")
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    for name in names:
        if isinstance(name, str) and name in known and not name.endswith("ForConditionalGeneration"):
            return name
    raise CheckpointError(
        f"config.json: architectures is {shown(names)}; neither Splitserve nor transformers {transformers.__version__} "
        "has a causal language model of that name (`splitserve models` lists those that are served)"
    )


def _check_raw(raw: Mapping[str, Any]) -> None:
    """Raise :class:`CheckpointError` for what must not reach transformers: it would be built for hours, or it isn't
    supported."""
    given = ConfigFields(raw)
    for field in raw:
        if field in _LAYER_COUNTS:
            given.natural("num_hidden_layers" if field == "num_hidden_layers" else field, 0)
            if isinstance(raw[field], int) and raw[field] > 1024:
                raise CheckpointError(f"config.json: {field} is {shown(raw[field])}; at most 1024 are supported")
    if raw.get("quantization_config") is not None:
        raise CheckpointError(
            "config.json: quantization_config: only unquantised weights are served through transformers"
        )


def _check(name: str, text: Any) -> None:
    kinds = set(getattr(text, "layer_types", None) or ()) - set(_LAYER_KINDS)
    if kinds & set(RECURRENT_KINDS):
        raise CheckpointError(f"config.json: {name}: recurrent state isn't supported yet")
    if kinds:
        raise CheckpointError(
            f"config.json: layer_types has {few(sorted(kinds))}; only {' and '.join(_LAYER_KINDS)} are served through "
            "transformers"
        )
    for parameters in _all_rotations(getattr(text, "rope_parameters", None)):
        if parameters.get("rope_type") in _STEPWISE_ROTATIONS:
            raise CheckpointError(
                f"config.json: rope_type is {shown(parameters['rope_type'])}: rotations would depend on other requests "
                "of the same step; it isn't served through transformers"
            )


def _all_rotations(parameters: Any) -> list[Mapping[str, Any]]:
    """Return the rotations of all kinds of layers."""
    if not isinstance(parameters, dict):
        return []
    return [parameters, *(part for part in parameters.values() if isinstance(part, dict))]


def described(model_class: Any, config: Any, dtype: str) -> ModelConfig:
    """Return what runners need to know of a model, from a forward pass without weights. Raises
    :class:`CheckpointError`."""
    facts = prove(model_class, config)
    first = facts.layers[0]
    _check_alike(facts.layers)
    text = config.get_text_config()
    head_dim = max(first.key_dim, first.value_dim)
    windows = [layer.window for layer in facts.layers]
    return ModelConfig(
        architecture=model_class.__name__,
        hidden_size=text.hidden_size,
        num_layers=len(facts.layers),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=head_dim + head_dim % 2,  # kernels rotate halves, if by nothing
        intermediate_size=getattr(text, "intermediate_size", None) or text.hidden_size,
        vocab_size=facts.vocab_size,
        max_position_embeddings=_num_positions(text),
        window=next((window for window in windows if window is not None), None),
        sliding_layers=tuple(layer for layer, window in enumerate(windows) if window is not None),
        attention_scale=first.scale,
        attention_soft_cap=first.soft_cap,
        sinks=first.has_sinks,
        rms_norm_eps=1e-6,
        rope_theta=1.0,
        tie_word_embeddings=facts.is_tied,
        eos_token_ids=(),
        bos_token_id=None,
        dtype=dtype,
        transformers=_sizes(facts, text),
    )


def _num_positions(text: Any) -> int:
    """Return the longest context of a model whose rotations have been computed, so that their fields are sound."""
    positions = getattr(text, "max_position_embeddings", None) or 2048
    for parameters in _all_rotations(getattr(text, "rope_parameters", None)):
        factor, original = parameters.get("factor"), parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "yarn" and factor and original:
            positions = longest_context(positions, factor, original)
    return positions


def _check_alike(layers: tuple[LayerFacts, ...]) -> None:
    """Raise :class:`CheckpointError` unless one memory and one kind of attention fit all layers."""
    first = layers[0]
    for field in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "soft_cap", "has_sinks"):
        found = {getattr(layer, field) for layer in layers}
        if len(found) > 1:
            raise CheckpointError(
                f"config.json: layers differ in attention's {field} ({few(sorted(found, key=str))}); through "
                "transformers, those of all layers must be the same"
            )
    if first.num_heads % first.num_kv_heads:
        raise CheckpointError(
            f"config.json: {first.num_heads} attention heads can't share {first.num_kv_heads} key/value heads evenly"
        )


def _sizes(facts: ModelFacts, text: Any) -> TransformersSizes:
    top_k = getattr(text, "num_experts_per_tok", None)
    dense = sum(rows * columns for rows, columns in facts.matrices)
    experts = sum(count * rows * columns for count, rows, columns in facts.experts)
    used = sum(min(top_k or count, count) * rows * columns for count, rows, columns in facts.experts)
    return TransformersSizes(
        backbone=facts.backbone,
        read_elements=dense + experts + facts.head_elements,
        token_elements=dense + used,
        widest=max(sum(matrix[-2:]) for matrix in (*facts.matrices, *facts.experts)),
    )
