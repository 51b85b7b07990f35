"""JSON of the answers, whole and in chunks, as OpenAI's clients expect it."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import Send

from splitserve.protocol.request import FinishReason
from splitserve.router.http.api_error import ApiError
from splitserve.router.output.chat_json import TOOL_CALLS, delta_of, message_of
from splitserve.router.output.parts import PartKind
from splitserve.router.text.choice import Piece, Texts

_encoder = msgspec.json.Encoder()

_MARK = "\ue000splitserve\ue000"  # a text that nothing else of a chunk is equal to

DONE_EVENT = b"data: [DONE]\n\n"
STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    """Send a whole response straight to the ASGI server."""
    pairs = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    pairs += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def sse_event(content: Any) -> bytes:
    return b"data: " + _encoder.encode(content) + b"\n\n"


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Format(ABC):
    """The JSON of one answer, whole or as events."""

    @abstractmethod
    def answer(self, choices: Sequence[Piece], usage: Usage, extra: dict[str, Any]) -> bytes:
        """Return the whole answer; ``choices`` are whole outputs."""

    def error_body(self, error: ApiError) -> bytes:
        """Return the body of the answer to a request that fails before its first byte."""
        return error.encode()

    def begin(self, usage: Usage) -> bytes:  # noqa: ARG002
        """Return the events that begin a stream; ``usage`` has the prompt's tokens only."""
        return b""

    def opening(self, index: int, extra: dict[str, Any]) -> bytes:  # noqa: ARG002
        """Return the events that precede a choice's first chunk; ``extra`` as for :meth:`chunk`."""
        return b""

    @abstractmethod
    def chunk(self, index: int, piece: Piece, extra: dict[str, Any]) -> bytes:
        """Return the events of one piece of one choice; ``extra`` is merged into an object."""

    def texts(self, index: int, texts: Texts) -> bytes:
        """Return the events of tokens of one choice that add nothing but text: those of each token's chunk."""
        return b"".join([self.chunk(index, piece, {}) for piece in texts.pieces()])

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """Return the events that end a stream after its last chunk."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Return the events that end a stream that fails after its first byte."""


class ChunksFormat(Format):
    """An answer whose events are chunks without names, up to ``[DONE]``."""

    id_prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(
        self, model: str, *, include_usage: bool = False, return_token_ids: bool = False, request_id: str = ""
    ) -> None:
        self._head = {
            "id": f"{self.id_prefix}-{request_id or secrets.token_hex(12)}",
            "object": self.chunk_kind,
            "created": int(time.time()),
            "model": model,
        }
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by choice: the bytes around the text of its usual chunks
        self._include_usage = include_usage
        self._return_token_ids = return_token_ids

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the event of the usage, after the last chunk."""

    def end(self, usage: Usage) -> bytes:
        return (self.usage_chunk(usage) if self._include_usage else b"") + DONE_EVENT

    def failure(self, error: ApiError) -> bytes:
        return sse_event(error.body()) + DONE_EVENT


class ChoicesFormat(ChunksFormat):
    """An answer with a list of choices. Subclasses define the differences between the endpoints."""

    def chunk(self, index: int, piece: Piece, extra: dict[str, Any]) -> bytes:
        if not extra and _has_text_only(piece) and not self._return_token_ids:
            before, after = self._frames.get(index) or self._frame(index)
            return before + _encoder.encode(piece.text) + after
        has_more = piece.finish_reason or self._return_token_ids or scores_of(piece)
        if piece.parts is not None and not (piece.parts or has_more):
            return b""  # the text so far belongs to no part yet
        return self._chunk(index, piece, extra)

    def texts(self, index: int, texts: Texts) -> bytes:
        if self._return_token_ids or not all(texts.texts):
            return super().texts(index, texts)
        before, after = self._frames.get(index) or self._frame(index)
        return before + (after + before).join(map(_encoder.encode, texts.texts)) + after

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes around the text of a choice's usual chunks."""
        chunk = self._chunk(index, Piece(_MARK, (), None), {})
        before, after = chunk.split(_encoder.encode(_MARK))
        self._frames[index] = before, after
        return before, after

    def _chunk(self, index: int, piece: Piece, extra: dict[str, Any]) -> bytes:
        choice = self._choice(index, self._reason(index, piece)) | self._delta(piece)
        if self._return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        return self._event([choice | scores_of(piece)], extra)

    def usage_chunk(self, usage: Usage) -> bytes:
        return sse_event({**self._head, "choices": [], "usage": usage.as_json()})

    def answer(self, choices: Sequence[Piece], usage: Usage, extra: dict[str, Any]) -> bytes:
        entries = []
        for index, piece in enumerate(choices):
            entry = self._choice(index, self._reason(index, piece)) | self._message(piece)
            if self._return_token_ids:
                entry["token_ids"] = list(piece.token_ids)
            entries.append(entry | scores_of(piece))
        head = {**self._head, "object": self.whole_kind}
        return _encoder.encode({**head, "choices": entries, "usage": usage.as_json(), **extra})

    def _event(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        content = {**self._head, "choices": choices, **extra}
        if self._include_usage:
            content.setdefault("usage", None)
        return sse_event(content)

    def _reason(self, index: int, piece: Piece) -> str | None:  # noqa: ARG002
        return piece.finish_reason

    def _choice(self, index: int, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "logprobs": None, "finish_reason": finish_reason}

    @abstractmethod
    def _delta(self, piece: Piece) -> dict[str, Any]:
        """Return the JSON of a choice's new text in a chunk."""

    @abstractmethod
    def _message(self, piece: Piece) -> dict[str, Any]:
        """Return the JSON of a choice's whole text."""


def _has_text_only(piece: Piece) -> bool:
    return bool(
        piece.text
        and piece.parts is None
        and piece.finish_reason is None
        and piece.logprobs is None
        and piece.prompt_logprobs is None
    )


def scores_of(piece: Piece) -> dict[str, Any]:
    """Return the log-probabilities among the fields of a choice; none if they aren't wanted."""
    found: dict[str, Any] = {} if piece.logprobs is None else {"logprobs": piece.logprobs}
    return found if piece.prompt_logprobs is None else found | {"prompt_logprobs": piece.prompt_logprobs}


class CompletionFormat(ChoicesFormat):
    id_prefix = "cmpl"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def _delta(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    def _message(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}


class CutCalls:
    """Finder of outputs that a stop string or a stop token of the request ended within a tool call.

    A call is whole if its arguments are an object: a stop at the text that closes the call leaves it whole.
    """

    def __init__(self, stop_token_ids: Collection[int] | None) -> None:
        """``stop_token_ids``: those of the request's body."""
        self._stop_token_ids = frozenset(stop_token_ids or ())
        self._arguments: dict[int, list[str]] = {}  # by choice: those of its last call, as they came

    def push(self, index: int, piece: Piece) -> bool:
        """Take in the next piece of a choice; return whether the choice has ended within a call by such a stop."""
        for part in piece.parts or ():
            if part.kind is PartKind.CALL:
                self._arguments[index] = []
            elif part.kind is PartKind.ARGUMENTS:
                self._arguments.setdefault(index, []).append(part.text)
        if piece.finish_reason is not FinishReason.STOP or index not in self._arguments:
            return False
        is_stopped = piece.stop_string or (piece.token_ids and piece.token_ids[-1] in self._stop_token_ids)
        return bool(is_stopped) and not _is_object("".join(self._arguments[index]))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class ChatFormat(ChoicesFormat):
    id_prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, model: str, *, stop_token_ids: Collection[int] | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        self._cut_calls = CutCalls(stop_token_ids)

    def opening(self, index: int, extra: dict[str, Any]) -> bytes:
        choice = self._choice(index, None) | {"delta": {"role": "assistant", "content": ""}}
        return self._event([choice], extra)

    def _reason(self, index: int, piece: Piece) -> str | None:
        is_cut = self._cut_calls.push(index, piece)
        has_called = piece.has_calls and piece.finish_reason is FinishReason.STOP and not is_cut
        return TOOL_CALLS if has_called else piece.finish_reason

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.parts is None:
            return {"delta": {"content": piece.text} if piece.text else {}}
        return {"delta": delta_of(piece.parts)}

    def _message(self, piece: Piece) -> dict[str, Any]:
        if piece.parts is None:
            return {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
        return {"message": message_of(piece.parts)}
