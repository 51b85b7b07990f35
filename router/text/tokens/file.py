"""The model's tokenizer.json, which two processes read: they must find the same."""

import hashlib
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from splitserve.common.errors import CheckpointError
from splitserve.common.model_files import MAX_TOKENIZER_BYTES, read_bounded

_MAX_ERROR_CHARS = 500


class TokenizerFile(msgspec.Struct, frozen=True):
    """A tokenizer.json as it was read."""

    path: str
    sha256: str  # of its content, hexadecimal


def load_tokenizer(path: Path) -> tuple[Tokenizer, TokenizerFile]:
    """Return the tokenizer in a file, without truncation and padding. Raises :class:`CheckpointError`."""
    try:
        content = read_bounded(path, MAX_TOKENIZER_BYTES)
    except FileNotFoundError:
        message = f"{path} is missing: the model directory must hold the tokenizer's tokenizer.json"
        raise CheckpointError(message) from None
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the binding raises bare Exception
        raise CheckpointError(f"{path} is not a usable tokenizer: {str(error)[:_MAX_ERROR_CHARS]}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, TokenizerFile(str(path), hashlib.sha256(content).hexdigest())
