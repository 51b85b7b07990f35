"""The safetensors files of a checkpoint: which there are, what their headers say, and the identity of their content.

No torch here: headers are read with the standard library, so that a process without torch can compare checkpoints.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.errors import CheckpointError

_PREFIX_BYTES = 8  # the header's length
_HEADER_LIMIT_BYTES = 100 * 1024 * 1024  # the format's own limit
_HASH_WHOLE_BELOW_BYTES = 32 * 1024 * 1024
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024
_SMALL_TENSOR_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor's place in a checkpoint. ``dtype`` is the format's own name ("F32", "BF16", "F16").

    ``offset``: of its first byte in the file, from where it lies contiguous, row after row.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def weight_files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files, sorted by name (directory order differs between hosts).

    With an index, exactly the files that it names. Raises :class:`CheckpointError` if there are none or one is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} isn't a safetensors index: {error!r}") from error
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no *.safetensors file; other weight formats aren't supported")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is named by the index but missing: download the checkpoint again")
    return files


def read_records(directory: Path) -> dict[str, TensorRecord]:
    """All tensors of the checkpoint by name. Raises :class:`CheckpointError` naming a file that can't be read."""
    records: dict[str, TensorRecord] = {}
    for file in weight_files(directory):
        header, raw = _read_header(file)
        first = _PREFIX_BYTES + len(raw)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in records:
                raise CheckpointError(f"tensor {name} is in both {records[name].file.name} and {file.name}")
            try:
                offset = first + entry["data_offsets"][0]
                records[name] = TensorRecord(name, file, entry["dtype"], tuple(entry["shape"]), offset)
            except (KeyError, TypeError, IndexError) as error:
                raise CheckpointError(f"{file}: the header's entry of {name} is malformed") from error
    return records


def weights_version(path: str | Path, load_format: str = "auto") -> str:
    """Identity of a checkpoint's content, 32 hex digits, the same on every machine.

    Covers config.json and, per weight file in sorted order, name, size, header and content: all of it below 32 MiB,
    else 64 samples of 64 KiB spread evenly (a fine-tune changes every one), and all tensors of at most 64 KiB (scales
    may be all that changes). ``load_format`` "dummy" covers config.json only.
    """
    directory = Path(path)
    digest = hashlib.blake2b(digest_size=16)
    try:
        digest.update((directory / "config.json").read_bytes())
        if load_format == "dummy":
            digest.update(b"dummy")
            return digest.hexdigest()
        for file in weight_files(directory):
            header, header_bytes = _read_header(file)
            size = file.stat().st_size
            digest.update(f"\0{file.name}\0{size}\0".encode())
            digest.update(header_bytes)
            with file.open("rb") as stream:
                if size <= _HASH_WHOLE_BELOW_BYTES:
                    digest.update(stream.read())
                    continue
                for sample in range(_NUM_SAMPLES):
                    stream.seek((size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
                for begin, end in _small_tensors(header):
                    stream.seek(_PREFIX_BYTES + len(header_bytes) + begin)
                    digest.update(stream.read(end - begin))
    except OSError as error:
        raise CheckpointError(f"{directory} can't be read: {error}") from error
    return digest.hexdigest()


def _small_tensors(header: dict[str, Any]) -> list[tuple[int, int]]:
    """Where they begin and end, in the order in which they lie behind the header."""
    places = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
    return [(begin, end) for begin, end in places if end - begin <= _SMALL_TENSOR_BYTES]


def _read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    """The parsed header and its raw bytes (8 bytes of little-endian length, then JSON), checked against the size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(_PREFIX_BYTES)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == _PREFIX_BYTES else 0
            if not 0 < length <= min(_HEADER_LIMIT_BYTES, size - _PREFIX_BYTES):
                raise CheckpointError(f"{file} is no complete safetensors file: its header length is wrong")
            raw = stream.read(length)
        header = json.loads(raw)
        places = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        if not all(0 <= begin <= end for begin, end in places):
            raise ValueError("a tensor ends before it begins")
        if _PREFIX_BYTES + length + max((end for _, end in places), default=0) != size:
            raise CheckpointError(f"{file} is truncated or has bytes too many: download it again")
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no readable safetensors file: {error!r}") from error
    return header, raw
