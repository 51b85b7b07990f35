"""Output of byte-level tokenizers, token by token: each token is some bytes, and the text is their UTF-8.

The joined pieces equal what the tokenizer's own decoder makes of all tokens at once.
"""

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
_new_decoder = codecs.getincrementaldecoder("utf-8")


def _byte_of_char() -> dict[str, int]:
    """Return the bytes that the characters of byte-level vocabularies stand for: printable ones for themselves, the
    others, in order, for characters from U+0100 on (the mapping of GPT-2's tokenizer)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {chr(byte): byte for byte in printable}
    return chars | {chr(0x100 + number): byte for number, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()
_byte_of = BYTE_OF_CHAR.__getitem__


class TokenTable:
    """Bytes and texts of a vocabulary's tokens, each made at its first use.

    ``string_of`` returns a token as the vocabulary has it, "" for an id without one. Tokens with the strings
    ``hidden`` have no bytes.
    """

    def __init__(self, string_of: Callable[[int], str], hidden: Collection[str] = ()) -> None:
        self._string_of = string_of
        self._hidden = frozenset(hidden)
        self._parts: dict[int, bytes] = {}  # bytes of the tokens used so far that have parts of characters
        self.whole_texts: dict[int, str] = {}
        """Texts of the other tokens used so far: their bytes are whole characters."""

    def whole_text(self, token_id: int) -> str | None:
        """Return the text of a token whose bytes are whole characters; None for another one."""
        text = self.whole_texts.get(token_id)
        if text is None and token_id not in self._parts:
            found = self._find(token_id)
            text = found.decode(errors="replace")
            if _REPLACEMENT in text:
                self._parts[token_id] = found
                return None
            self.whole_texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes."""
        text = self.whole_text(token_id)
        return self._parts[token_id] if text is None else text.encode()

    def _find(self, token_id: int) -> bytes:
        string = self._string_of(token_id)
        if string in self._hidden:
            return b""
        try:
            return bytes(map(_byte_of, string))
        except KeyError:  # an added token is its own text
            return string.encode()


class ByteLevelDetokenizer:
    """Text of a growing list of tokens, piece by piece; it holds back the bytes of an incomplete character only."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._whole_text: Callable[[int], Any] = table.whole_texts.get
        self._decoder = _new_decoder("replace")
        self._is_pending = False  # the decoder holds bytes

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens make final."""
        return "".join(self.push_each(token_ids))

    def push_each(self, token_ids: Sequence[int]) -> list[str]:
        """Return the texts that these tokens make final, one per token."""
        texts = [*map(self._whole_text, token_ids)]
        if self._is_pending or None in texts:
            for number, text in enumerate(texts):
                if text is None or self._is_pending:
                    texts[number] = self._push_one(token_ids[number])
        return texts

    def flush(self) -> str:
        """Return the text left at the end of the output: an incomplete character becomes a replacement character."""
        self._is_pending = False
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    def _push_one(self, token_id: int) -> str:
        if not self._is_pending:
            text = self._table.whole_text(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._table.bytes_of(token_id))
        self._is_pending = bool(self._decoder.getstate()[0])
        return text
