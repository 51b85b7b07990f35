"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API, whole and as its events."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitserve.protocol.request import FinishReason
from splitserve.router.http.access.refusals import shape_errors
from splitserve.router.http.access.request_id import arrival_of, request_id_of
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.endpoints.items import Run, RunClosed, RunGrew, RunOpened, Runs, Step, runs_of
from splitserve.router.http.endpoints.messages_body import CountRequest, MessagesRequest
from splitserve.router.http.endpoints.tokens import MAX_TOKENS
from splitserve.router.http.formats import CutCalls, Format, Usage
from splitserve.router.http.serving import Serving
from splitserve.router.output.parts import PartKind
from splitserve.router.text.choice import Piece

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Messages:
    """The handlers. Their errors have Anthropic's shape."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response:
        shape_errors(request, _error_body)
        arrived_at = arrival_of(request)
        body, num_bytes = await self._serving.read(request, MessagesRequest)
        with body.own_names():
            chat = body.chat()
            return await self._serving.generate(
                request,
                body,
                num_bytes,
                MessagesFormat(self._serving.model.name(body.model), body, request_id_of(request)),
                lambda limits: self._serving.preparation.chat(chat, limits),
                arrived_at=arrived_at,
            )

    async def count(self, request: Request) -> Response:
        shape_errors(request, _error_body)
        body, _ = await self._serving.read(request, CountRequest)
        preparation = self._serving.preparation
        with self._serving.slot(request):
            with body.own_names():
                text = await preparation.chat_text(body.chat())
            token_ids = await preparation.tokens_of(text, add_special_tokens=False, most=MAX_TOKENS)
        return JSONResponse({"input_tokens": len(token_ids)})


def _error(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(_error(error))


class MessagesFormat(Format):
    """A message: blocks of thinking, text and tool use."""

    def __init__(self, model: str, body: MessagesRequest, request_id: str) -> None:
        self._model = model
        self._cut_calls = CutCalls(body.stop_token_ids)
        self._id = f"msg_{request_id}"
        self._runs = Runs()
        self._stop: dict[str, Any] = {}
        self._extra: dict[str, Any] = {}

    def answer(self, choices: Sequence[Piece], usage: Usage, extra: dict[str, Any]) -> bytes:
        blocks = [_block(run) for run in runs_of(choices[0].all_parts)]
        is_cut = self._cut_calls.push(0, choices[0])
        return msgspec.json.encode(self._whole(blocks, usage) | _stop_of(choices[0], is_cut=is_cut) | extra)

    def error_body(self, error: ApiError) -> bytes:
        return _error_body(error)

    # ---- events ----

    def begin(self, usage: Usage) -> bytes:
        return _event("message_start", message=self._whole([], usage))

    def chunk(self, index: int, piece: Piece, extra: dict[str, Any]) -> bytes:
        self._extra = extra
        is_cut = self._cut_calls.push(index, piece)
        steps = self._runs.push(piece.all_parts)
        if piece.finish_reason is not None:
            steps += self._runs.close()
            self._stop = _stop_of(piece, is_cut=is_cut)
        return b"".join([_events_of(step) for step in steps])

    def end(self, usage: Usage) -> bytes:
        return _event("message_delta", delta=self._stop, usage=_usage(usage), **self._extra) + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        content = _error(error)
        return _event(content.pop("type"), **content)

    def _whole(self, blocks: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


def _event(kind: str, **content: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **content}) + b"\n\n"


def _events_of(step: Step) -> bytes:
    run = step.run
    match step:
        case RunOpened():
            return _event("content_block_start", index=run.index, content_block=_block(run, is_empty=True))
        case RunGrew():
            return _event("content_block_delta", index=run.index, delta=_delta_of(run, step.text))
        case RunClosed():
            return _event("content_block_stop", index=run.index)


def _delta_of(run: Run, text: str) -> dict[str, Any]:
    if run.kind is PartKind.CALL:
        return {"type": "input_json_delta", "partial_json": text}
    if run.kind is PartKind.REASONING:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _block(run: Run, *, is_empty: bool = False) -> dict[str, Any]:
    text = "" if is_empty else run.text
    if run.kind is PartKind.CALL:
        return {"type": "tool_use", "id": run.call_id, "name": run.name, "input": _input(text)}
    if run.kind is PartKind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; text that is none is kept in one field."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):  # the latter: nested too deeply for the decoder
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _stop_of(piece: Piece, *, is_cut: bool) -> dict[str, Any]:
    """Return why the message ended; ``is_cut``: within a call, by a stop of the request."""
    if piece.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if piece.stop_string:
        return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_string}
    return {"stop_reason": "tool_use" if piece.has_calls and not is_cut else "end_turn", "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's object, whose ``input_tokens`` are those that were not found in the prefix cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
