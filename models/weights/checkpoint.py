"""The safetensors files of a checkpoint: their names, their headers, and the identity of their content.

No torch here: headers are read with the standard library, so that a process without torch can compare checkpoints.
"""

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import (
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    parse_json,
    read_bounded,
    read_json_object,
    shown,
)

_PREFIX_BYTES = 8  # the header's length
_HEADER_LIMIT_BYTES = 16 * 1024 * 1024  # the format allows 100 MB; a thousand tensors take 0.1 MB
_MAX_FILES = 4096
_MAX_TENSORS = 1 << 18
_MAX_DIMENSIONS = 8
_MAX_NAME_CHARS = 512
ITEM_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8}
ITEM_BITS |= {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8}  # of other types the size isn't checked
_HASH_WHOLE_BELOW_BYTES = 32 * 1024 * 1024
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024
_SMALL_TENSOR_BYTES = 64 * 1024


# transformers 5, 4.52 and later, and before
_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor's location in a checkpoint. ``dtype`` is the format's own name ("F32", "BF16", "F16").

    ``offset``: of its first byte in the file, from where it lies contiguous, row after row. ``section``: an index of
    the stored tensor's first dimension, and rows of its second, where it is a part of that; None: all of it.
    ``is_transposed``: it lies there column after column, as all of its index.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    section: tuple[int, range] | None = None
    is_transposed: bool = False

    def of_stored(self, tensor: Any) -> Any:
        """Return this tensor of ``tensor``, the stored one."""
        if self.section is None:
            return tensor
        index, rows = self.section
        if self.is_transposed:
            return tensor[index].t()
        return tensor[index, rows.start : rows.stop].reshape(self.shape)


def weight_files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files, sorted by name (directory order differs between hosts).

    With an index, exactly the files that it names. Raises :class:`CheckpointError` if there are none or one is missing.
    """
    try:
        files = [directory / name for name in _indexed_names(directory / "model.safetensors.index.json")]
    except FileNotFoundError:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no *.safetensors file; other weight formats aren't supported")
    if len(files) > _MAX_FILES:
        raise CheckpointError(f"{directory} has {len(files)} weight files; at most {_MAX_FILES} are supported")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is named by the index but missing: download the checkpoint again")
    return files


def _indexed_names(index: Path) -> list[str]:
    """Names of the files in a safetensors index, sorted. Raises :class:`CheckpointError`, FileNotFoundError."""
    by_tensor = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(by_tensor, dict):
        raise CheckpointError(f"{index} isn't a safetensors index: weight_map is {shown(by_tensor)}, not an object")
    for name in by_tensor.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or "/" in name or "\0" in name:
            raise CheckpointError(
                f"{index}: weight_map has {shown(name)}; names of *.safetensors files beside it are needed"
            )
    return sorted(set(by_tensor.values()))


def read_records(directory: Path) -> dict[str, TensorRecord]:
    """Return all tensors of the checkpoint by name. Raises :class:`CheckpointError` with a file that can't be read."""
    records: dict[str, TensorRecord] = {}
    for file in weight_files(directory):
        header, raw = _read_header(file)
        first = _PREFIX_BYTES + len(raw)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in records:
                raise CheckpointError(f"tensor {name} is in both {records[name].file.name} and {file.name}")
            begin, _ = entry["data_offsets"]
            records[name] = TensorRecord(name, file, entry["dtype"], tuple(entry["shape"]), first + begin)
        if len(records) > _MAX_TENSORS:
            raise CheckpointError(f"{directory} has more than {_MAX_TENSORS} tensors, the most that is supported")
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
        digest.update(read_bounded(directory / "config.json", MAX_CONFIG_BYTES))
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
    """Return the begin and end offsets of small tensors, in the order in which they lie behind the header."""
    ranges = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
    return [(begin, end) for begin, end in ranges if end - begin <= _SMALL_TENSOR_BYTES]


def _read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    """The parsed header and its raw bytes (8 bytes of little-endian length, then JSON), checked against the size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(_PREFIX_BYTES)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == _PREFIX_BYTES else 0
            if not 0 < length <= size - _PREFIX_BYTES:
                raise CheckpointError(f"{file} is no complete safetensors file: its header length is wrong")
            if length > _HEADER_LIMIT_BYTES:
                limit = _HEADER_LIMIT_BYTES
                raise CheckpointError(f"{file}: the header has {length} bytes; at most {limit} are supported")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} is no readable safetensors file: {error}") from error
    header = parse_json(raw, file)
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is no readable safetensors file: its header is a {type(header).__name__}")
    for name, entry in header.items():
        if name != "__metadata__" and not _is_tensor(name, entry):
            raise CheckpointError(f"{file}: the header's entry of {shown(name)} is malformed: {shown(entry)}")
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if _PREFIX_BYTES + length + max(ends, default=0) != size:
        raise CheckpointError(f"{file} is truncated or has bytes too many: download it again")
    return header, raw


def _is_tensor(name: str, entry: Any) -> bool:
    """Return whether a header's entry has a type, a shape and a range, and they agree."""
    if not isinstance(entry, dict) or len(name) > _MAX_NAME_CHARS:
        return False
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not (_are_sizes(shape) and _are_sizes(span)):
        return False
    if len(shape) > _MAX_DIMENSIONS or len(span) != 2 or span[0] > span[1]:
        return False
    bits = ITEM_BITS.get(dtype)
    return bits is None or math.prod(shape) * bits == (span[1] - span[0]) * 8


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def text_records(records: Mapping[str, TensorRecord]) -> dict[str, TensorRecord]:
    """Return the tensors of the text model of a checkpoint with other parts, by the names that they have in a
    checkpoint of the text model alone."""
    found: dict[str, TensorRecord] = {}
    for name, record in records.items():
        for prefix, text_prefix in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                found[text_prefix + name.removeprefix(prefix)] = record
    return found


def without_layers(records: Mapping[str, TensorRecord], first: int, count: int) -> dict[str, TensorRecord]:
    """Return ``records`` without the tensors of ``count`` layers from number ``first`` on."""
    prefixes = tuple(f"model.layers.{index}." for index in range(first, first + count))
    return {name: record for name, record in records.items() if not name.startswith(prefixes)}
