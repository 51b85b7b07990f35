"""The dtype that a checkpoint's weights are stored in, for a config.json that names none."""

from pathlib import Path

from splitserve.common.errors import CheckpointError
from splitserve.models.weights.checkpoint import read_records

_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_EMBEDDING = "embed_tokens.weight"
_DEFAULT = "float32"


def stored_dtype(directory: Path) -> str:
    """Return the dtype of the embedding, or of the first unquantised tensor; float32 without readable weight files,
    which the loader reports where it needs them."""
    try:
        records = read_records(directory).values()
    except CheckpointError:
        return _DEFAULT
    unquantised = [record for record in records if record.dtype in _NAMES]
    embedding = [record for record in unquantised if record.name.endswith(_EMBEDDING)]
    first = next(iter(embedding or unquantised), None)
    return _DEFAULT if first is None else _NAMES[first.dtype]
