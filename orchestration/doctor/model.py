"""Check of a checkpoint's files without loading them."""

from collections.abc import Collection
from pathlib import Path

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import MAX_TOKENIZER_BYTES, parse_json, read_text
from splitserve.models.config import ModelConfig, load_model_config
from splitserve.models.declared import stored_weights
from splitserve.models.weights.checkpoint import read_records, weight_files, weights_version
from splitserve.orchestration.doctor.report import Check, Problem, check, few
from splitserve.orchestration.spec.model_source import check_model_directory

DUMMY = "dummy"


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
    config = _check_directory(directory, backend)
    files = weight_files(directory)
    records = read_records(directory)
    expected = stored_weights(config)
    missing = [name for name in expected if name not in records]
    if missing:
        raise CheckpointError(f"{directory} lacks {len(missing)} tensors that config.json requires: {few(missing)}")
    for name, weight in expected.items():
        if records[name].shape != weight.shape:
            found = list(records[name].shape)
            raise CheckpointError(
                f"{records[name].file}: {name} has shape {found}; config.json requires {list(weight.shape)}"
            )
    return f"{len(records)} tensors in {len(files)} file{'' if len(files) == 1 else 's'}"
