"""The content of a checkpoint's config.json, checked and in one frozen structure. No torch here.

Reads what transformers 5 writes (``rope_parameters``, ``dtype``) and what 4.x wrote (``rope_theta``, ``rope_scaling``,
``torch_dtype``). What isn't supported is refused by name: serving it anyway would give wrong tokens with status 200.
Fields that only some families have are read by the family, in its ``features`` (:mod:`splitserve.models.families`).
A model without a family may be served by transformers' code (:mod:`splitserve.models.transformers_backend`), which only
then is imported, with torch.
"""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import MAX_CONFIG_BYTES, check_token_id, end_token_ids, few, read_json_object, shown
from splitserve.models.experts import ExpertsSpec
from splitserve.models.families.defaults import with_class_defaults
from splitserve.models.families.registry import WITH_TEXT
from splitserve.models.fields import RECURRENT_KINDS, ConfigFields
from splitserve.models.latent import LatentSizes
from splitserve.models.rope import (
    LongScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    check_alike,
    longest_context,
    read_rope,
    rope_fields,
)
from splitserve.models.text_model import has_family, named_architecture, text_config
from splitserve.models.weights.checkpoint import weights_version
from splitserve.models.weights.stored_dtype import stored_dtype
from splitserve.models.weights.tied_head import has_own_head
from splitserve.protocol.engine_config import ModelBackend

__all__ = ["ConfigFields", "ModelConfig", "RopeScaling", "load_model_config", "weights_version"]

logger = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")
MXFP4 = "mxfp4"


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Weights may be stored in FP8. ``block``: (rows, columns) that share a scale; None: a scale for each tensor."""

    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class TransformersSizes:
    """Facts on a model of transformers' code beside its attention. Elements are those of weights."""

    backbone: str  # the module that makes the last layer's output
    read_elements: int  # that a step reads
    token_elements: int  # that a token is multiplied with in the layers
    widest: int  # sum of a product's widths of input and output


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The numbers that every decoder has."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Features(DecoderSizes):
    """Features that families set or leave, with the values of those that don't have them."""

    activation: str = "silu"
    mlp_gate: bool = True  # the MLP's inner outputs are multiplied by the activations of as many gates
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False  # where a family's models differ in it
    mlp_bias: bool = False
    rotary_dim: int | None = None  # elements of a head that are rotated; None: all
    rotates_neighbours: bool = False  # elements 2 * i and 2 * i + 1 are rotated together, instead of the halves
    query_beta: float = 0.0  # queries grow with log(position): see RotaryEmbedding
    query_period: int = 1
    unrotated_layers: tuple[int, ...] = ()
    window: int | None = None  # tokens that a sliding layer attends to, the query's own included
    sliding_layers: tuple[int, ...] = ()
    sliding_rope: Rope | None = None  # of sliding layers, where it is another one
    attention_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    attention_soft_cap: float | None = None
    sinks: bool = False  # a score of each query head that no token has takes its share of the softmax
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    experts: ExpertsSpec | None = None
    latent: LatentSizes | None = None  # then there is 1 key/value head, and head_dim is the rotated part
    num_speculator_layers: int = 0  # stored behind the model's own, and not used (multi-token prediction)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer's kind of attention, which decides the memory of its keys and values, and its rotations."""

    kind: str  # "full" or "sliding"
    window: int | None
    rope: str | None  # "main", "sliding", or None: not rotated


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Features):
    """A decoder as its checkpoint's config.json describes it."""

    architecture: str  # the family: a module of :mod:`splitserve.models.families`
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Any = None  # one of splitserve.models.rope
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]  # of generation_config.json where it has them, else of config.json
    bos_token_id: int | None
    dtype: str  # the checkpoint's own
    fp8: Fp8Format | None = None
    text_of: str | None = None  # the architecture with other parts, vision for one, whose text model this is
    transformers: TransformersSizes | None = None  # then ``architecture`` is the name of transformers' class

    @property
    def backend(self) -> ModelBackend:
        """Return whose code computes the model."""
        return "native" if self.transformers is None else "transformers"

    @property
    def rope(self) -> Rope:
        """The rotations of layers that have no others."""
        return Rope(self.rope_theta, self.rope_scaling)

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Return the sizes of a KV block as kernels see it: ``[layer, kv_head, 2 (K/V), token, head_dim]``, or
        ``[layer, token, latent]``."""
        if self.latent is not None:
            return self.num_layers, block_size, self.latent.width
        return self.num_layers, self.num_kv_heads, 2, block_size, self.head_dim

    def layer(self, index: int) -> LayerSpec:
        """Return what kind of layer ``index`` is."""
        is_sliding = index in self.sliding_layers
        rope = "sliding" if is_sliding and self.sliding_rope is not None else "main"
        return LayerSpec(
            "sliding" if is_sliding else "full",
            self.window if is_sliding else None,
            None if index in self.unrotated_layers else rope,
        )


def load_model_config(path: str | Path, backend: str = "auto") -> ModelConfig:
    """Reads config.json and generation_config.json of the checkpoint directory ``path``.

    ``backend``: whose code shall compute the model; auto: ours where there is a family, else transformers'. Raises
    :class:`CheckpointError` naming the file or the field, and what is supported.
    """
    directory = Path(path)
    whole = _read_json(directory / "config.json")
    if backend == "transformers" or (backend == "auto" and not has_family(whole)):
        return _through_transformers(directory, whole)
    architecture, name = named_architecture(whole)
    is_text_of_whole = name in WITH_TEXT
    raw = with_class_defaults(architecture, text_config(whole) if is_text_of_whole else whole)
    given = ConfigFields(raw)
    config = _common(architecture, given, _fp8(raw), _dtype(raw, directory))
    family = importlib.import_module(f"splitserve.models.families.{architecture}")
    if hasattr(family, "features"):
        config = _with_features(config, architecture, family.features(given))
    given.refuse_unread()
    if config.sliding_rope is None:
        check_alike(given)
    config = replace(config, max_position_embeddings=_num_positions(config))
    _check(config)
    if is_mxfp4(given) and not (config.experts and config.experts.is_mxfp4):
        raise CheckpointError(
            "config.json: quantization_config ('mxfp4') isn't supported in this architecture; use unquantised or FP8 "
            "weights (fp8)"
        )
    if is_text_of_whole:
        logger.info("%s: its text model is served, without the other parts", name)
        config = replace(config, text_of=name)
    if config.tie_word_embeddings and has_own_head(directory, is_text_of_whole=is_text_of_whole):
        logger.info("lm_head.weight is stored and isn't the embedding: it is used, in spite of tie_word_embeddings")
        config = replace(config, tie_word_embeddings=False)
    return _with_tokens(config, raw, directory)


def _with_features(config: ModelConfig, architecture: str, features: Mapping[str, Any]) -> ModelConfig:
    """Return ``config`` with what the family's ``features`` returned."""
    if unknown := features.keys() - {field.name for field in fields(ModelConfig)}:
        raise TypeError(
            f"models/families/{architecture}.py: features() returned {few(sorted(unknown))}, which ModelConfig lacks; "
            "declare it in Features (models/config.py)"
        )
    return replace(config, **features)


def _through_transformers(directory: Path, raw: Mapping[str, Any]) -> ModelConfig:
    admission = importlib.import_module("splitserve.models.transformers_backend.admission")
    config: ModelConfig = admission.admitted_config(directory, _dtype(raw, directory))
    return _with_tokens(config, raw, directory)


def _with_tokens(config: ModelConfig, raw: Mapping[str, Any], directory: Path) -> ModelConfig:
    """Return ``config`` with the tokens that begin and end a text."""
    generation = _read_optional(directory / "generation_config.json")
    ends = end_token_ids(generation.get("eos_token_id"), config.vocab_size, "generation_config.json")
    ends = ends or end_token_ids(raw.get("eos_token_id"), config.vocab_size, "config.json")
    bos_token_id = raw.get("bos_token_id")
    if bos_token_id is not None:
        check_token_id("bos_token_id", bos_token_id, config.vocab_size, "config.json")
    return replace(config, eos_token_ids=ends, bos_token_id=bos_token_id)


def _common(architecture: str, given: ConfigFields, fp8: Fp8Format | None, dtype: str) -> ModelConfig:
    """Return what all families read alike; the family's features come on top."""
    heads = given.positive("num_attention_heads")
    hidden_size = given.positive("hidden_size")
    head_dim = given.positive("head_dim", hidden_size // heads)
    given.get("quantization_config")
    given.only_flag("is_causal", True, default=True)
    rope = _rope(given)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=given.positive("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=given.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=given.positive("intermediate_size"),
        vocab_size=given.positive("vocab_size"),
        max_position_embeddings=given.positive("max_position_embeddings", 2048),
        rms_norm_eps=given.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=given.flag("tie_word_embeddings"),
        eos_token_ids=(),
        bos_token_id=None,
        dtype=dtype,
        fp8=fp8,
    )


def _rope(given: ConfigFields) -> Rope:
    theta = given.number("rope_theta", 10000.0)
    return read_rope(rope_fields(given), given, theta)  # by kind of layer: the family reads those of sliding layers


def _num_positions(config: ModelConfig) -> int:
    positions, scaling = config.max_position_embeddings, config.rope_scaling
    if not isinstance(scaling, YarnScaling):
        return positions
    return longest_context(positions, scaling.factor, scaling.original_max_position_embeddings)


def _check(config: ModelConfig) -> None:
    """Raise :class:`CheckpointError` for numbers that don't fit each other."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads can't share {kv_heads} key/value heads evenly")
    rotary_dim = config.rotary_dim or head_dim
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim is {head_dim}; rotary embeddings need an even one")
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise CheckpointError(
            f"config.json: partial_rotary_factor rotates {rotary_dim} of {head_dim} elements; an even number is needed"
        )
    scaling = config.rope_scaling
    if isinstance(scaling, LongScaling) and len(scaling.factors) != rotary_dim // 2:
        raise CheckpointError(
            f"config.json: rope scaling has {len(scaling.factors)} factors; {rotary_dim // 2} are needed"
        )


def check_rotated_whole(given: ConfigFields) -> None:
    """Raise :class:`CheckpointError` if only a part of each head is rotated."""
    if (factor := partial_rotary_factor(given)) != 1.0:
        raise CheckpointError(f"config.json: partial_rotary_factor is {shown(factor)}; only 1.0 is supported here")


def partial_rotary_factor(given: ConfigFields, default: float = 1.0) -> float:
    """Return the part of each head that is rotated."""
    outer = given.number("partial_rotary_factor", default)
    return ConfigFields(given.mapping("rope_parameters") or given.mapping("rope_scaling")).number(
        "partial_rotary_factor", outer
    )


def is_mxfp4(given: ConfigFields) -> bool:
    """Return whether experts are stored in MXFP4."""
    return given.mapping("quantization_config").get("quant_method") == MXFP4


def window_features(given: ConfigFields, sliding: list[int] | None = None) -> dict[str, Any]:
    """Return the features of sliding windows: ``layer_types`` says which layers have one, else ``sliding`` does."""
    window = given.optional_positive("sliding_window")
    kinds = given.items("layer_types")
    other = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if any(kind in RECURRENT_KINDS for kind in other):
        raise CheckpointError(f"config.json: layer_types has {few(other)}; recurrent state isn't supported yet")
    if other:
        raise CheckpointError(
            f"config.json: layer_types has {few(other)}; supported are full_attention and sliding_attention"
        )
    num_layers = given.positive("num_hidden_layers")
    if kinds and len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers")
    if kinds:
        sliding = [index for index, kind in enumerate(kinds) if kind == "sliding_attention"]
    if sliding and window is None:
        raise CheckpointError("config.json: sliding_window is null, but there are layers with sliding attention")
    return {"window": window if sliding else None, "sliding_layers": tuple(sliding or ())}


def full_attention_only(given: ConfigFields) -> None:
    """Raise :class:`CheckpointError` unless every layer has full attention."""
    if window_features(given)["sliding_layers"]:
        raise CheckpointError(
            "config.json: layer_types has 'sliding_attention'; only full attention is supported in this architecture"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, MAX_CONFIG_BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: give the directory of a Hugging Face checkpoint") from error


def _read_optional(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        return {}


def _fp8(config: Mapping[str, Any]) -> Fp8Format | None:
    """Activations are quantised as they come, so a checkpoint's own scales for them aren't needed."""
    raw = ConfigFields(config).mapping("quantization_config")
    if not raw and config.get("quantization_config") is None:
        return None
    method = raw.get("quant_method", "unknown")
    if method == MXFP4:
        return None  # of experts: see ExpertsSpec
    if method != "fp8":
        raise CheckpointError(
            f"config.json: quantization_config ({shown(method)}) isn't supported; use unquantised or FP8 weights (fp8)"
        )
    number_format = raw.get("fmt", "e4m3")
    if number_format not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(
            f"config.json: quantization_config.fmt is {shown(number_format)}; only 'e4m3' is supported"
        )
    block = raw.get("weight_block_size")
    if block not in (None, [128, 128]):
        raise CheckpointError(
            f"config.json: quantization_config.weight_block_size is {shown(block)}; supported are [128, 128] and none"
        )
    return Fp8Format(None if block is None else (128, 128))


def _dtype(raw: Mapping[str, Any], directory: Path) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or stored_dtype(directory)
    if dtype not in _DTYPES:
        raise CheckpointError(f"config.json: dtype is {shown(dtype)}; supported are {', '.join(_DTYPES)}")
    return str(dtype)
