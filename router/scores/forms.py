"""Log-probabilities as OpenAI's clients expect them, as values for JSON. No I/O."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.router.scores.token_texts import TokenTexts
from splitserve.router.text.detokenizer import Detokenizer

Json: TypeAlias = dict[str, Any]


def joined(parts: Sequence[Json | None]) -> Json | None:
    """Return adjacent ``logprobs`` objects as one; None if there are none."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    return {
        name: None if value is None else [each for part in given for each in part[name]]
        for name, value in given[0].items()
    }


class LogprobsForm(ABC):
    """The ``logprobs`` objects of one choice, in the order of its tokens."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    @abstractmethod
    def of(self, token_ids: Sequence[int], logprobs: Logprobs) -> Json:
        """Return the object of the next tokens of the output."""


class CompletionLogprobs(LogprobsForm):
    """The form of ``/v1/completions``. ``text_offset`` counts characters of the choice's text."""

    def __init__(self, texts: TokenTexts, detokenizer: Detokenizer) -> None:
        super().__init__(texts)
        self._detokenizer = detokenizer
        self._offset = 0

    def of(self, token_ids: Sequence[int], logprobs: Logprobs) -> Json:
        rows = logprobs.rows()
        return {
            "tokens": [self._texts.shown(token_id) for token_id in token_ids],
            "token_logprobs": [values[0] for values, _ in rows],
            "top_logprobs": [
                self._alternatives(token_id, values, top_ids)
                for token_id, (values, top_ids) in zip(token_ids, rows, strict=True)
            ],
            "text_offset": [self._next_offset(token_id) for token_id in token_ids],
        }

    def of_first(self, token_id: int) -> Json:
        """Return the object of an echoed prompt's first token, which has no log-probability."""
        return {
            "tokens": [self._texts.shown(token_id)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._next_offset(token_id)],
        }

    def _alternatives(self, token_id: int, values: list[float], top_ids: list[int]) -> dict[str, float]:
        """Return the most probable tokens, and the token itself. Of tokens with the same text the better one counts."""
        found: dict[str, float] = {}
        for top_id, value in zip(top_ids, values[1:], strict=True):
            found.setdefault(self._texts.shown(top_id), value)
        found.setdefault(self._texts.shown(token_id), values[0])
        return found

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._detokenizer.push((token_id,)))
        return offset


class ChatLogprobs(LogprobsForm):
    """The form of ``/v1/chat/completions``."""

    def of(self, token_ids: Sequence[int], logprobs: Logprobs) -> Json:
        content = [
            self._entry(token_id, values[0])
            | {"top_logprobs": [self._entry(*each) for each in zip(top_ids, values[1:], strict=True)]}
            for token_id, (values, top_ids) in zip(token_ids, logprobs.rows(), strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, value: float) -> Json:
        return {"token": self._texts.shown(token_id), "logprob": value, "bytes": self._texts.content(token_id)}


class TokenIdLogprobs(LogprobsForm):
    """The form of ``/v1/generate``: pairs of a token's id and its log-probability."""

    def of(self, token_ids: Sequence[int], logprobs: Logprobs) -> Json:
        del token_ids
        rows = logprobs.rows()
        return {
            "token_logprobs": [values[0] for values, _ in rows],
            "top_logprobs": [list(zip(top_ids, values[1:], strict=True)) for values, top_ids in rows],
        }


def prompt_logprobs(token_ids: Sequence[int], logprobs: Logprobs, texts: TokenTexts) -> list[Json]:
    """Return the extension ``prompt_logprobs`` of adjacent tokens after the prompt's first one: by position, the
    token's own and its alternatives' by token id.

    ``rank`` counts from 1; it is null for a token that isn't among the alternatives.
    """
    found: list[Json] = []
    for token_id, (values, top_ids) in zip(token_ids, logprobs.rows(), strict=True):
        ranks: dict[int, int | None] = {top_id: rank for rank, top_id in enumerate(top_ids, start=1)}
        by_id = {token_id: values[0]} | dict(zip(top_ids, values[1:], strict=True))
        found.append(
            {
                str(each): {"logprob": value, "rank": ranks.get(each), "decoded_token": texts.shown(each)}
                for each, value in by_id.items()
            }
        )
    return found
