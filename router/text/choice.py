"""The visible output of one prompt: text, token ids, and why it ended. No I/O."""

from collections.abc import Sequence
from typing import Any

import msgspec

from splitserve.protocol.request import FinishReason
from splitserve.router.text.detokenizer import Detokenizer, StopStrings


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Addition of one update to a choice."""

    text: str
    token_ids: Sequence[int]  # part of the output even where they add no text yet
    finish_reason: FinishReason | None
    logprobs: dict[str, Any] | None = None  # as the endpoint has them; None: not wanted
    prompt_logprobs: list[Any] | None = None  # the extension of that name, in a choice's first piece


class Choice:
    """Output tokens turned into pieces of text, up to the end token, the limit, or the first stop string.

    ``include_stop``: the text includes what ended it, a stop string or the text of a stop token. Stop strings have no
    effect in the text of the first ``min_tokens`` tokens.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop_strings, include_stop=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.num_tokens = 0  # all output tokens, including an end token and those of a stop string
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Piece:
        """Take in the next tokens; ``finish_reason`` is set if the last of them ended the sequence.

        Tokens are processed one by one, so the result doesn't depend on how they were packed into updates.
        """
        # A stop token ends the text without being part of it, unless that was requested.
        num_shown = len(token_ids) - (finish_reason is FinishReason.STOP and not self._include_stop)
        text = ""
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

    def _piece(self, text: str, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Piece:
        self.num_tokens += len(token_ids)
        self.finish_reason = finish_reason
        return Piece(text, token_ids, finish_reason)
