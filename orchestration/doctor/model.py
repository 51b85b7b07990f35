"""Check of a checkpoint's files without loading them."""

from collections.abc import Collection
from pathlib import Path

from splitserve.common.errors import CheckpointError, ConfigError
from splitserve.common.model_files import MAX_TOKENIZER_BYTES, parse_json, read_text
from splitserve.models.cache_groups import cache_layout
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.declared import declare
from splitserve.models.kv_plan import longest_sequences, plan_kv_memory, sequence_bytes, token_bytes
from splitserve.models.weights.checkpoint import read_records, weight_files, weights_version
from splitserve.orchestration.doctor.report import Check, Problem, check, skipped
from splitserve.orchestration.spec.model_source import check_model_directory
from splitserve.protocol.cache_layout import CacheGroup, CacheLayout
from splitserve.protocol.config import EngineConfig

DUMMY = "dummy"
_LINES = {"native": "Splitserve's own code", "transformers": "transformers' code over Splitserve's attention"}


def look_at_model(
    path: str, load_format: str = "auto", backend: str = "auto", served_versions: Collection[str] = ()
) -> Check:
    """Check config.json, tokenizer, every weight file's header and size, every tensor's name and shape.

    ``served_versions``: identities of the weights of this checkpoint that running workers have loaded.
    """
    try:
        if load_format == DUMMY or (served_versions and weights_version(path, DUMMY) in served_versions):
            _check_directory(Path(path), backend)
            return check("model files", f"{path}: random weights of its shape")
        text = f"{path}: {_read_weights(Path(path), backend)}"
        if not served_versions or weights_version(path) in served_versions:
            return check("model files", text)
    except CheckpointError as error:
        advice = (
            "download the checkpoint again (config.json, every *.safetensors file, tokenizer.json), or correct MODEL"
        )
        return check("model files", path, [Problem("missing_weights", str(error), advice)])
    advice = "put the old files back, or start the cluster again: a restarted worker would be rejected"
    changed = "the files are not those that the workers have loaded"
    return check("model files", text, [Problem("changed_weights", changed, advice)])


def look_at_cache(engine: EngineConfig, *, has_gpu: bool, available_bytes: int) -> Check:
    """Describe by whose code the model is computed, its cache's groups, and what fits into a worker's KV memory.

    ``available_bytes`` of host memory are for workers on CPU whose KV memory isn't set; a GPU's is measured at its
    start. ``has_gpu``: of this machine. Nothing is loaded.
    """
    from splitserve.models.weights.loader import dtype_name  # loads torch

    device = "cuda" if engine.device == "cuda" or (engine.device == "auto" and has_gpu) else "cpu"
    engine = engine.on(device)
    try:
        config = load_model_config(engine.model, engine.model_backend)
        dtype = "float8_e4m3fn" if engine.kv_cache_dtype == "fp8" else dtype_name(engine.dtype, config, device)
        cache = cache_layout(config, engine.block_size, dtype, engine.tensor_parallel_size)
        fits = _fitting(engine, config, cache, available_bytes)
    except CheckpointError:  # the check of its files says so
        return skipped("model", "its files aren't in order")
    except ConfigError as error:
        return check("model", engine.model, [Problem("kv_memory", str(error), "change the memory or the length")])
    backend = _LINES["native" if config.transformers is None else "transformers"]
    groups = ", ".join(_group_text(group) for group in cache.groups)
    own = f"{token_bytes(cache):,} bytes a token"
    if fixed := sequence_bytes(cache):
        own += f", {fixed / 2**20:.1f} MiB a sequence for windows"
    return check("model", f"{backend}; cache: {groups} in {dtype}; {own}; {fits}")


def _fitting(engine: EngineConfig, config: ModelConfig, cache: CacheLayout, available_bytes: int) -> str:
    """Return what fits into a worker's KV memory. Raises :class:`ConfigError` if the settings don't fit."""
    if engine.device == "cuda" and not engine.kv_memory_bytes:
        return "the GPU's memory for KV is measured at the start; --kv-memory SIZE says here what fits into SIZE"
    longest = config.max_position_embeddings
    plan = plan_kv_memory(engine, cache, max_position_embeddings=longest, available_bytes=available_bytes)
    tokens = plan.num_blocks[0] * engine.block_size
    number = longest_sequences(cache, plan)
    return f"a worker's KV memory holds {tokens:,} tokens, or {number:,} sequences of {plan.max_model_len:,}"


def _group_text(group: CacheGroup) -> str:
    kind = f"window of {group.window}" if group.window else "full"
    return f"{kind} ({group.num_layers} layer{'s' if group.num_layers > 1 else ''})"


def _check_directory(directory: Path, backend: str) -> ModelConfig:
    """Check all files but the weights; return the config. Raises :class:`CheckpointError`."""
    check_model_directory(str(directory))
    config = load_model_config(directory, backend)
    tokenizer = directory / "tokenizer.json"
    try:
        parse_json(read_text(tokenizer, MAX_TOKENIZER_BYTES), tokenizer)
    except FileNotFoundError as error:
        raise CheckpointError(f"{tokenizer} can't be read: {error}") from error
    return config


def _read_weights(directory: Path, backend: str) -> str:
    """Check the weight files; returns a summary. Raises :class:`CheckpointError`."""
    from splitserve.models.weights.model_records import model_records  # loads torch

    config = _check_directory(directory, backend)
    files = weight_files(directory)
    # The tensors of a model of transformers' code are that library's to know.
    records = read_records(directory) if config.transformers else model_records(directory, config, declare(config))
    return f"{len(records)} tensors in {len(files)} file{'' if len(files) == 1 else 's'}"
