"""Texts and bytes of single tokens, for log-probabilities. No I/O."""

import re

from tokenizers import Tokenizer

from splitserve.router.text.tokens.byte_level import BYTE_OF_CHAR

_REPLACEMENT = "\ufffd"
_SPACE_MARK = "\u2581"  # begins a word in vocabularies of SentencePiece, whose decoders drop it at the beginning
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class TokenTexts:
    """Texts of a tokenizer's tokens, each found once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, tuple[str, list[int] | None]] = {}

    def shown(self, token_id: int) -> str:
        """Return a token's text; of one that is part of a character, its bytes as ``bytes:\\xe2\\x82``."""
        return self._look_up(token_id)[0]

    def content(self, token_id: int) -> list[int] | None:
        """Return a token's bytes; None if they can't be determined."""
        return self._look_up(token_id)[1]

    def _look_up(self, token_id: int) -> tuple[str, list[int] | None]:
        found = self._found.get(token_id)
        if found is None:
            found = self._found[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> tuple[str, list[int] | None]:
        name = self._tokenizer.id_to_token(token_id)
        if name is None:  # the model's vocabulary may be larger than the tokenizer's
            return f"token_id:{token_id}", None
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if name.startswith(_SPACE_MARK) and not text.startswith(" "):
            text = f" {text}"
        if _REPLACEMENT not in text or name == text:
            return text, list(text.encode())
        content = _bytes_of(name)
        if content is None:
            return text, None
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content


def _bytes_of(name: str) -> list[int] | None:
    """Return the bytes for which a token stands by its name in the vocabulary."""
    if byte := _BYTE_TOKEN.fullmatch(name):
        return [int(byte[1], 16)]
    return [BYTE_OF_CHAR[char] for char in name] if all(char in BYTE_OF_CHAR for char in name) else None
