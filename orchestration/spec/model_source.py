"""The source of a cluster's model: a directory, or a model id of the Hugging Face Hub."""

import re
from pathlib import Path

from splitserve.common.errors import CheckpointError

_MODEL_ID = re.compile(r"(?=[^/]{1,96}/[^/]{1,96}$)[A-Za-z0-9]\w*([.-]+\w+)*/[A-Za-z0-9]\w*([.-]+\w+)*", re.ASCII)


def is_model_id(model: str) -> bool:
    """Return whether ``model`` is an id of the Hugging Face Hub, like ``Qwen/Qwen3-0.6B``, and no directory here."""
    return _MODEL_ID.fullmatch(model) is not None and not Path(model).exists()


def check_model_directory(model: str) -> None:
    """Raise :class:`CheckpointError` unless ``model`` is a directory with a Hugging Face ``config.json``."""
    folder = Path(model)
    if not folder.exists():
        raise CheckpointError(
            f"no such directory: {model}. Give the path of a Hugging Face checkpoint on disk, or a model id of the Hub "
            "like Qwen/Qwen3-0.6B; `splitserve demo-model DIR` writes a small one"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{model} is not a Hugging Face checkpoint: it has no config.json "
            "(it needs that, *.safetensors and tokenizer.json)"
        )
