"""A checkpoint's tensors as views of its memory-mapped files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from splitserve.common.errors import CheckpointError
from splitserve.models.weights.checkpoint import TensorRecord


class StoredTensors:
    """Views of the tensors in a checkpoint's files, each of which is opened when its first tensor is read."""

    def __init__(self, records: Mapping[str, TensorRecord]) -> None:
        self._records = records
        self._open: dict[Path, Any] = {}

    def view(self, name: str) -> Tensor:
        """Return a tensor in the checkpoint's own dtype. Raises :class:`CheckpointError`."""
        record = self._records[name]
        try:
            if record.file not in self._open:
                self._open[record.file] = safe_open(record.file, framework="pt", device="cpu")
            tensor: Tensor = record.of_stored(self._open[record.file].get_tensor(record.name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{record.file}: tensor {name} can't be read: {error}") from error
        return tensor

    def close(self) -> None:
        """Close the files. Views keep theirs mapped, and a later read opens them again."""
        self._open.clear()
