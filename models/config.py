"""The content of a checkpoint's config.json, checked and in one frozen structure. No torch here.

Reads what transformers 5 writes (``rope_parameters``, ``dtype``) and what 4.x wrote (``rope_theta``, ``rope_scaling``,
``torch_dtype``). What isn't supported is refused by name: serving it anyway would give wrong tokens with status 200.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import MAX_CONFIG_BYTES, check_token_id, end_token_ids, few, read_json_object, shown
from splitserve.models.families.registry import FAMILIES
from splitserve.models.weights.checkpoint import weights_version

__all__ = ["ModelConfig", "RopeScaling", "load_model_config", "weights_version"]

_DTYPES = ("float32", "bfloat16", "float16")
# Several times what the largest models have: more is an error of the file, and would be built for hours.
_HIGHEST = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 27,
    "original_max_position_embeddings": 1 << 27,
    "rms_norm_eps": 1.0,
    "rope_theta": 1e15,
    "factor": 1e6,
    "low_freq_factor": 1e6,
    "high_freq_factor": 1e6,
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's rescaling of the rotary frequencies ("llama3"), for contexts longer than the original one."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Weights may be stored in FP8. ``block``: (rows, columns) that share a scale; None: a scale for each tensor."""

    block: tuple[int, int] | None


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
class ModelConfig(DecoderSizes):
    """A decoder as its checkpoint's config.json describes it."""

    architecture: str  # the family: a module of :mod:`splitserve.models.families`
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]  # of generation_config.json where it has them, else of config.json
    bos_token_id: int | None
    dtype: str  # the checkpoint's own
    fp8: Fp8Format | None = None


def load_model_config(path: str | Path) -> ModelConfig:
    """Reads config.json and generation_config.json of the checkpoint directory ``path``.

    Raises :class:`CheckpointError` naming the file or the field, and what is supported.
    """
    directory = Path(path)
    raw = _read_json(directory / "config.json")
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    heads = _positive(raw, "num_attention_heads")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    hidden_size = _positive(raw, "hidden_size")
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads can't share {kv_heads} key/value heads evenly")
    head_dim = _positive(raw, "head_dim", hidden_size // heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim is {head_dim}; rotary embeddings need an even one")
    rope_theta, rope_scaling = _rope(raw)
    generation = _read_optional(directory / "generation_config.json")
    vocab_size = _positive(raw, "vocab_size")
    eos_token_ids = end_token_ids(generation.get("eos_token_id"), vocab_size, "generation_config.json")
    eos_token_ids = eos_token_ids or end_token_ids(raw.get("eos_token_id"), vocab_size, "config.json")
    bos_token_id = raw.get("bos_token_id")
    if bos_token_id is not None:
        check_token_id("bos_token_id", bos_token_id, vocab_size, "config.json")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_positive(raw, "intermediate_size"),
        vocab_size=vocab_size,
        max_position_embeddings=_positive(raw, "max_position_embeddings", 2048),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        dtype=_dtype(raw),
        fp8=_fp8(raw),
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


def _architecture(raw: Mapping[str, Any]) -> str:
    names = _list(raw, "architectures")
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    supported = ", ".join(FAMILIES)
    raise CheckpointError(f"config.json: architectures is {shown(names)}; supported are {supported}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if _flag(raw, name):
            raise CheckpointError(f"config.json: {name} is true; only projections without bias are supported")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"config.json: hidden_act is {shown(activation)}; only 'silu' is supported")
    other_layers = [kind for kind in _list(raw, "layer_types") if kind != "full_attention"]
    if other_layers or (_flag(raw, "use_sliding_window") and raw.get("sliding_window")):
        found = f"layer_types has {few(other_layers)}" if other_layers else "use_sliding_window is true"
        raise CheckpointError(f"config.json: {found}; only full attention in every layer is supported")


def _fp8(config: Mapping[str, Any]) -> Fp8Format | None:
    """Activations are quantised as they come, so a checkpoint's own scales for them aren't needed."""
    raw = _object(config, "quantization_config")
    if not raw and config.get("quantization_config") is None:
        return None
    method = raw.get("quant_method", "unknown")
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


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    parameters = _object(raw, "rope_parameters") or _object(raw, "rope_scaling")
    theta = _number(parameters, "rope_theta", _number(raw, "rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(f"config.json: partial_rotary_factor is {shown(partial)}; only 1.0 is supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(f"config.json: rope type {shown(kind)} isn't supported; 'default' and 'llama3' are")
    scaling = RopeScaling(
        factor=_number(parameters, "factor"),
        low_freq_factor=_number(parameters, "low_freq_factor"),
        high_freq_factor=_number(parameters, "high_freq_factor"),
        original_max_position_embeddings=_positive(parameters, "original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError("config.json: high_freq_factor must be larger than low_freq_factor")
    return theta, scaling


def _dtype(raw: Mapping[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise CheckpointError(f"config.json: dtype is {shown(dtype)}; supported are {', '.join(_DTYPES)}")
    return str(dtype)


def _list(raw: Mapping[str, Any], name: str) -> list[Any]:
    value = raw.get(name)
    if value is not None and not isinstance(value, list):
        raise CheckpointError(f"config.json: {name} is {shown(value)}; a list is needed")
    return value or []


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"config.json: {name} is {shown(value)}; an object is needed")
    return value or {}


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} is {shown(value)}; true or false is needed")
    return bool(value)


def _positive(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if type(value) is not int or not 1 <= value <= _HIGHEST[name]:
        raise CheckpointError(
            f"config.json: {name} is {shown(value)}; a positive integer of at most {_HIGHEST[name]} is needed"
        )
    return value


def _number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name)
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not is_number or not 0 < value <= _HIGHEST[name]:
        raise CheckpointError(
            f"config.json: {name} is {shown(value)}; a positive number of at most {_HIGHEST[name]:g} is needed"
        )
    return float(value)
