"""Incremental detokenisation of output tokens, and stop strings. No I/O.

All hold text back only while it could still change: a :class:`Detokenizer` holds the bytes of an incomplete
character, :class:`StopStrings` holds text that could be the beginning of a stop string.
"""

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
# An incomplete UTF-8 character is at most three bytes long: one replacement character from byte-level decoders, up to
# three from byte-fallback decoders. A longer run is invalid output that no further token can repair.
_MAX_INCOMPLETE_CHARS = 3
_WINDOW_TOKENS = 16
_MAX_WINDOW_TOKENS = 64


class Detokenizer(Protocol):
    """Text of a growing list of token ids, piece by piece."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens make final."""

    def push_each(self, token_ids: Sequence[int]) -> list[str]:
        """Return the texts that these tokens make final, one per token."""

    def flush(self) -> str:
        """Return the text left at the end of the output; an incomplete character becomes a replacement character."""


class WindowDetokenizer:
    """Text of a growing list of token ids, piece by piece, without special tokens unless they are to be kept.

    For any tokenizer; :mod:`splitserve.router.text.tokens.byte_level` is faster where it applies. For byte-level
    tokenizers the joined pieces equal ``tokenizer.decode(all_ids, skip_special_tokens=...)``. Each step decodes only a
    short window of tokens. The window begins where a decoding was complete, so its text doesn't change when tokens are
    appended.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._window: list[int] = []
        self._num_emitted_chars = 0
        self._complete_at = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens make final."""
        return "".join(self.push_each(token_ids))

    def push_each(self, token_ids: Sequence[int]) -> list[str]:
        """Return the texts that these tokens make final, one per token."""
        return [self._push_one(token_id) for token_id in token_ids]

    def flush(self) -> str:
        """Return the text left at the end of the output; an incomplete character becomes a replacement character."""
        text = self._decode()
        piece = text[self._num_emitted_chars :]
        self._num_emitted_chars = len(text)
        return piece

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode()
        certain = _num_certain_chars(text)
        piece = text[self._num_emitted_chars : certain]
        self._num_emitted_chars = max(self._num_emitted_chars, certain)
        if certain == len(text):
            if len(self._window) >= _WINDOW_TOKENS:
                self._restart_window(self._complete_at)
            self._complete_at = len(self._window)
        elif len(self._window) >= _MAX_WINDOW_TOKENS:
            self._restart_window(len(self._window) - _WINDOW_TOKENS)
        return piece

    def _restart_window(self, first: int) -> None:
        num_pending_chars = len(self._decode()) - self._num_emitted_chars
        self._window = self._window[first:]
        self._num_emitted_chars = len(self._decode()) - num_pending_chars
        self._complete_at = 0

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skips_special)


def _num_certain_chars(text: str) -> int:
    """Return the length of ``text`` without trailing replacement characters that may yet become a character."""
    if not text.endswith(_REPLACEMENT):
        return len(text)
    run = len(text) - len(text.rstrip(_REPLACEMENT))
    return len(text) - min(run, _MAX_INCOMPLETE_CHARS)


class StopStrings:
    """Cut of a text at the first stop string completed in it, independent of how the text is split into pieces."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """``stops`` must not hold an empty string; ``include_stop``: the text ends with the stop string."""
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found = ""  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        """Return whether a stop string has ended the text."""
        return bool(self.found)

    def push(self, piece: str) -> str:
        """Return the text that can be shown now. Once a stop string is found: the text up to it, and then nothing."""
        if self.stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = self._find(text, len(self._held))
        if found is not None:
            self._held = ""
            begin, end = found
            self.found = text[begin:end]
            return text[: end if self._include_stop else begin]
        keep = self._num_chars_to_hold(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_searched: int) -> tuple[int, int] | None:
        """Return start and end of the stop string that ends first; if several end together, of the longest.

        The first ``num_searched`` characters are known to hold none: searching them again for long stop strings of
        repeated characters would cost more than a millisecond per token.
        """
        best: tuple[int, int] | None = None
        for stop in self._stops:
            begin = text.find(stop, max(0, num_searched - len(stop) + 1))
            if begin >= 0 and (best is None or (begin + len(stop), begin) < best):
                best = (begin + len(stop), begin)
        return None if best is None else (best[1], best[0])

    def _num_chars_to_hold(self, text: str) -> int:
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-count:]
            if any(stop.startswith(tail) for stop in self._stops):
                return count
        return 0
