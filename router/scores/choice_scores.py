"""Additions to the pieces of one choice: log-probabilities, and the prompt before the output. No I/O.

A prompt's log-probabilities are made in slices, between which the caller may do other work, and each position's
alternatives are encoded with its slice: those of a long prompt are megabytes of JSON.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.router.scores.forms import CompletionLogprobs, Json, LogprobsForm, joined, prompt_logprobs
from splitserve.router.scores.token_texts import TokenTexts
from splitserve.router.scores.wanted import WantedScores
from splitserve.router.text.choice import Piece

_NUMBERS_IN_SLICE = 500  # log-probabilities: a millisecond of work, some more where texts of tokens are new
_encoder = msgspec.json.Encoder()


class ChoiceScores:
    """Adds to the pieces of one choice, in their order. ``form`` writes log-probabilities, ``echo`` those of an echoed
    prompt, whose text is ``text``."""

    def __init__(
        self,
        wanted: WantedScores,
        token_ids: Sequence[int],
        text: str,
        form: LogprobsForm,
        texts: TokenTexts,
        *,
        echo: CompletionLogprobs | None = None,
    ) -> None:
        self.hides_output = wanted.hides_output
        self._wanted = wanted
        self._token_ids = token_ids
        self._text = text
        self._form = form
        self._echo = echo
        self._texts = texts
        self._echoed: list[Json | None] = []  # the echoed prompt's log-probabilities, by slice
        self._extension: list[Any] = []  # the extension ``prompt_logprobs``, after the first token's
        self._is_first = True

    def take_prompt(self, logprobs: Logprobs) -> Iterator[None]:
        """Take the prompt's log-probabilities, before the first piece; yields after each slice."""
        echo = self._echo if self._wanted.echo and self._wanted.logprobs is not None else None
        if echo is not None:
            self._echoed.append(echo.of_first(self._token_ids[0]))
        step = max(1, _NUMBERS_IN_SLICE // (1 + logprobs.num_top))
        for start in range(0, logprobs.num_positions, step):
            part = logprobs.between(start, min(start + step, logprobs.num_positions))
            token_ids = self._token_ids[1 + start : 1 + start + part.num_positions]
            if echo is not None:
                of_part = echo.of(token_ids, part.narrowed(self._wanted.logprobs or 0))
                self._echoed.append(of_part | {"top_logprobs": _encoded(of_part["top_logprobs"])})
            if (num_top := self._wanted.prompt_logprobs) is not None:
                self._extension += _encoded(prompt_logprobs(token_ids, part.narrowed(num_top), self._texts))
            yield

    def add(self, piece: Piece, logprobs: Logprobs | None) -> Piece:
        """Return the piece with what belongs to it; ``logprobs`` are those of its tokens, or of more tokens."""
        if self.hides_output:
            piece, logprobs = msgspec.structs.replace(piece, text="", token_ids=(), parts=None), None
        parts: list[Json | None] = []
        text, extension = piece.text, None
        if self._is_first:
            self._is_first = False
            if self._wanted.echo:
                text = self._text + text
                parts += self._of_echo()
            if self._wanted.prompt_logprobs is not None:
                extension = [None, *self._extension]
            self._echoed, self._extension = [], []
        if logprobs is not None and (count := len(piece.token_ids)):
            parts.append(self._form.of(piece.token_ids, logprobs.between(0, count)))
        return msgspec.structs.replace(piece, text=text, logprobs=joined(parts), prompt_logprobs=extension)

    def _of_echo(self) -> list[Json | None]:
        """Return the echoed prompt's log-probabilities; a prompt of one token has none to take."""
        if self._echo is None or self._wanted.logprobs is None:
            return []
        return self._echoed or [self._echo.of_first(self._token_ids[0])]


def _encoded(values: Sequence[Any]) -> list[msgspec.Raw]:
    """Return values as JSON that an encoder copies."""
    return [msgspec.Raw(_encoder.encode(value)) for value in values]
