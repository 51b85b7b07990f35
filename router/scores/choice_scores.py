"""Additions to the pieces of one choice: log-probabilities, and the prompt before the output. No I/O."""

from collections.abc import Sequence

import msgspec

from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.router.requests.state import Update
from splitserve.router.scores.forms import CompletionLogprobs, Json, LogprobsForm, joined, prompt_logprobs
from splitserve.router.scores.token_texts import TokenTexts
from splitserve.router.scores.wanted import WantedScores
from splitserve.router.text.choice import Piece


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
        self._of_prompt: Logprobs | None = None
        self._is_first = True

    def note(self, update: Update) -> None:
        """Take the prompt's log-probabilities, which come before or with the first tokens."""
        if update.prompt_logprobs is not None:
            self._of_prompt = update.prompt_logprobs

    def add(self, piece: Piece, logprobs: Logprobs | None) -> Piece:
        """Return the piece with what belongs to it; ``logprobs`` are those of its tokens, or of more tokens."""
        if self.hides_output:
            piece, logprobs = msgspec.structs.replace(piece, text="", token_ids=()), None
        parts: list[Json | None] = []
        text, extension = piece.text, None
        if self._is_first:
            self._is_first = False
            if self._wanted.echo:
                text = self._text + text
                parts.append(self._of_echo())
            extension = self._extension()
            self._of_prompt = None
        if logprobs is not None and (count := len(piece.token_ids)):
            parts.append(self._form.of(piece.token_ids, logprobs.between(0, count)))
        return msgspec.structs.replace(piece, text=text, logprobs=joined(parts), prompt_logprobs=extension)

    def _of_echo(self) -> Json | None:
        """Return the echoed prompt's log-probabilities."""
        if self._echo is None or self._wanted.logprobs is None:
            return None
        of_prompt = None if self._of_prompt is None else self._of_prompt.narrowed(self._wanted.logprobs)
        return self._echo.of_prompt(self._token_ids, of_prompt)

    def _extension(self) -> list[Json | None] | None:
        """Return the extension ``prompt_logprobs``."""
        if self._wanted.prompt_logprobs is None:
            return None
        of_prompt = None if self._of_prompt is None else self._of_prompt.narrowed(self._wanted.prompt_logprobs)
        return prompt_logprobs(self._token_ids, of_prompt, self._texts)
