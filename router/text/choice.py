"""The visible output of one prompt: text, token ids, and why it ended. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.protocol.request import FinishReason
from splitserve.router.output.parts import Part, PartKind
from splitserve.router.text.detokenizer import Detokenizer, StopStrings

if TYPE_CHECKING:
    from splitserve.router.output.splitter import Splitter


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Addition of one update to a choice."""

    text: str
    token_ids: Sequence[int]  # part of the output even where they add no text yet
    finish_reason: FinishReason | None
    parts: Sequence[Part] | None = None  # ``text`` as parts of a message; None: all of it is content
    has_calls: bool = False  # the choice called tools, in this piece or before
    stop_string: str = ""  # the one that ended the choice
    logprobs: dict[str, Any] | None = None  # as the endpoint has them; None: not wanted
    prompt_logprobs: list[Any] | None = None  # the extension of that name, in a choice's first piece

    @property
    def all_parts(self) -> Sequence[Part]:
        """The parts of the message, whether or not the text was split."""
        if self.parts is not None:
            return self.parts
        return (Part(PartKind.CONTENT, self.text),) if self.text else ()


class Texts(msgspec.Struct, frozen=True, gc=False):
    """Tokens that add nothing but text to a choice, as most of a stream does."""

    texts: Sequence[str]  # one per token, in order; "" while a character is incomplete
    token_ids: Sequence[int]

    def pieces(self) -> Iterator[Piece]:
        """Yield the addition of each token."""
        for text, token_id in zip(self.texts, self.token_ids, strict=True):
            yield Piece(text, (token_id,), None)


class Choice:
    """Output tokens turned into pieces of text, up to the end token, the limit, or the first stop string.

    ``include_stop``: the text includes what ended it, a stop string or the text of a stop token. Stop strings have no
    effect in the text of the first ``min_tokens`` tokens.

    With a ``splitter`` the text is split into parts of a message. It needs the special tokens in the text, so
    ``special_texts``, by id, are then hidden by it. Stop strings are searched for in the text as the model wrote it.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        splitter: "Splitter | None" = None,
        special_texts: Mapping[int, str] | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop_strings, include_stop=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._splitter = splitter
        self._special_texts = special_texts or {}
        self.is_plain = not stop_strings and splitter is None
        """Whether all tokens but the last one add nothing but text, so that they may be pushed as texts."""
        self.num_tokens = 0  # all output tokens, including an end token and those of a stop string
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Piece:
        """Take in the next tokens; ``finish_reason`` is set if the last of them ended the sequence.

        Tokens are processed one by one, so the result doesn't depend on how they were packed into updates.
        """
        if self.is_plain and finish_reason is None:
            self.num_tokens += len(token_ids)
            return Piece(self._detokenizer.push(token_ids), token_ids, None)
        # A stop token ends the text without being part of it, unless that was requested.
        num_shown = len(token_ids) - (finish_reason is FinishReason.STOP and not self._include_stop)
        text = ""
        if self._splitter is not None:
            self._hide_special(token_ids, self._splitter)
        for count, token_id in enumerate(token_ids[:num_shown], start=1):
            new = self._detokenizer.push((token_id,))
            text += new if self.num_tokens + count <= self._min_tokens else self._stops.push(new)
            if self._stops.stopped:
                return self._piece(text, token_ids[:count], FinishReason.STOP)
        if finish_reason is not None:
            text += self._stops.push(self._detokenizer.flush())
            if self._stops.stopped:
                finish_reason = FinishReason.STOP
            text += self._stops.flush()
        return self._piece(text, token_ids, finish_reason)

    def push_texts(self, token_ids: Sequence[int]) -> Texts:
        """Take in the next tokens of a plain choice, which don't end the sequence."""
        self.num_tokens += len(token_ids)
        return Texts(self._detokenizer.push_each(token_ids), token_ids)

    def _piece(self, text: str, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Piece:
        self.num_tokens += len(token_ids)
        self.finish_reason = finish_reason
        if self._splitter is None:
            return Piece(text, token_ids, finish_reason, stop_string=self.stop_string)
        parts = self._splitter.push(text)
        if finish_reason is not None:
            parts += self._splitter.finish()
        return Piece(text, token_ids, finish_reason, parts, self.has_calls, self.stop_string)

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text, "" for none."""
        return self._stops.found

    @property
    def has_calls(self) -> bool:
        """Return whether the output calls a tool, as far as it is known."""
        return self._splitter is not None and self._splitter.num_calls > 0

    def _hide_special(self, token_ids: Sequence[int], splitter: "Splitter") -> None:
        for token_id in token_ids:
            if token_id in self._special_texts:
                splitter.hide(self._special_texts[token_id])
