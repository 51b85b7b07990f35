"""Small files of a model directory, read within bounds: size, kind of file, nesting, numbers.

A checkpoint comes from elsewhere: a file that is too large, endless, or nested too deeply gives an error that names it,
before anything is built from it.
"""

import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from splitserve.common.errors import CheckpointError

GENERATION_CONFIG = "generation_config.json"
MIB = 1 << 20
MAX_CONFIG_BYTES = 4 * MIB
MAX_TOKENIZER_CONFIG_BYTES = 16 * MIB
MAX_TOKENIZER_BYTES = 256 * MIB
MAX_TEMPLATE_BYTES = MIB
MAX_INDEX_BYTES = 64 * MIB
MAX_END_TOKENS = 256


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file. Raises :class:`CheckpointError` for any other, and for one that is too large;
    FileNotFoundError where there is none."""
    try:
        check_file(path, max_bytes)
        with path.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if len(content) > max_bytes:
        raise _too_large(path, max_bytes)
    return content


def check_file(path: Path, max_bytes: int) -> None:
    """Raises :class:`CheckpointError` unless ``path`` is a regular file of at most ``max_bytes``; OSError."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is no regular file")
    if found.st_size > max_bytes:
        raise _too_large(path, max_bytes)


def read_text(path: Path, max_bytes: int) -> str:
    """Raises as :func:`read_bounded` does, and :class:`CheckpointError` for what isn't UTF-8."""
    try:
        return read_bounded(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The object in a JSON file. Raises as :func:`read_text` does, and :class:`CheckpointError` for anything else."""
    value = parse_json(read_text(path, max_bytes), path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, but it holds a {type(value).__name__}")
    return value


def parse_json(text: str | bytes, path: Path) -> Any:
    """The value of JSON ``text``, which is from ``path``. Raises :class:`CheckpointError`."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply to be read as JSON") from error
    except ValueError as error:  # numbers of more than 4300 digits, too
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from error


def end_token_ids(value: Any, vocab_size: int | None, where: str) -> tuple[int, ...]:
    """``eos_token_id`` of ``where``: nothing, one id or several, each below ``vocab_size`` (None: not known).

    Raises :class:`CheckpointError`.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MAX_END_TOKENS:
        raise CheckpointError(f"{where}: eos_token_id has {len(ids)} entries; at most {MAX_END_TOKENS} are supported")
    for token_id in ids:
        check_token_id("eos_token_id", token_id, vocab_size, where)
    return tuple(ids)


def check_token_id(name: str, value: Any, vocab_size: int | None, where: str) -> None:
    """Raises :class:`CheckpointError` unless ``value`` is the id of a token."""
    if type(value) is int and value >= 0 and (vocab_size is None or value < vocab_size):
        return
    allowed = "a token id" if vocab_size is None else f"between 0 and {vocab_size - 1}, vocab_size being {vocab_size}"
    raise CheckpointError(f"{where}: {name} is {shown(value)}; it must be {allowed}")


def shown(value: Any) -> str:
    """``value`` for an error message: short, however long it is."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    text = f"a {type(value).__name__}" if isinstance(value, dict | list) and len(value) > 8 else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def few(names: Iterable[Any]) -> str:
    """The first three of ``names``, and how many more there are."""
    texts = [shown(name) for name in names]
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")


def _too_large(path: Path, max_bytes: int) -> CheckpointError:
    return CheckpointError(f"{path} is larger than {max_bytes >> 20} MiB, the most that is read of such a file")
