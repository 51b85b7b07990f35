"""``/v1/responses`` without a store: OpenAI's Responses API, whole and as its events."""

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from splitserve.protocol.request import FinishReason
from splitserve.router.http.access.request_id import arrival_of, request_id_of
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.endpoints.items import Run, RunClosed, RunGrew, RunOpened, Runs, Step
from splitserve.router.http.endpoints.responses_body import ResponsesRequest
from splitserve.router.http.formats import CutCalls, Format, Usage
from splitserve.router.http.serving import Serving
from splitserve.router.output.parts import PartKind
from splitserve.router.text.choice import Piece

_PREFIXES = {PartKind.CONTENT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}
_DELTAS = {
    PartKind.CONTENT: "response.output_text.delta",
    PartKind.REASONING: "response.reasoning_text.delta",
    PartKind.CALL: "response.function_call_arguments.delta",
}
_DONE = {
    PartKind.CONTENT: "response.output_text.done",
    PartKind.REASONING: "response.reasoning_text.done",
    PartKind.CALL: "response.function_call_arguments.done",
}


_NUM_FIRST_EVENTS = 2  # those that begin a stream


class Responses:
    """The handler."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response:
        arrived_at = arrival_of(request)
        body, num_bytes = await self._serving.read(request, ResponsesRequest)
        model = self._serving.model.name(body.model)
        with body.own_names():
            chat = body.chat()
            return await self._serving.generate(
                request,
                body,
                num_bytes,
                ResponsesFormat(model, body, request_id_of(request)),
                lambda limits: self._serving.preparation.chat(chat, limits),
                arrived_at=arrived_at,
            )


class ResponsesFormat(Format):
    """A response: items of reasoning, text and function calls. Each event names its type and its number."""

    def __init__(self, model: str, body: ResponsesRequest, request_id: str) -> None:
        self._response = _echo(body) | {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._runs = Runs()
        self._ids: list[str] = []
        self._num_events = _NUM_FIRST_EVENTS
        self._finish_reason: FinishReason | None = None
        self._cut_calls = CutCalls(body.stop_token_ids)
        self._is_call_cut = False  # by a stop of the request
        self._extra: dict[str, Any] = {}

    # ---- one object ----

    def answer(self, choices: Sequence[Piece], usage: Usage, extra: dict[str, Any]) -> bytes:
        self._take(choices[0])
        return msgspec.json.encode(self._whole(usage) | extra)

    # ---- events ----

    def begin(self, usage: Usage) -> bytes:
        del usage
        response = self._in_state("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join([_event(kind, number, response=response) for number, kind in enumerate(kinds)])

    def chunk(self, index: int, piece: Piece, extra: dict[str, Any]) -> bytes:
        del index
        self._extra = extra
        return self._events_of(self._take(piece))

    def end(self, usage: Usage) -> bytes:
        response = self._whole(usage) | self._extra
        return self._named(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        fault = {"code": "server_error", "message": error.message}
        response = self._in_state("failed", output=self._items("incomplete")) | {"error": fault}
        return self._named("response.failed", response=response)

    def _take(self, piece: Piece) -> list[Step]:
        """Add a piece of the answer; the last one ends it."""
        steps = self._runs.push(piece.all_parts)
        self._is_call_cut = self._cut_calls.push(0, piece)
        if piece.finish_reason is not None:
            self._finish_reason = piece.finish_reason
            steps += self._runs.close()
        return steps

    def _events_of(self, steps: Iterable[Step]) -> bytes:
        return b"".join([self._events_of_step(step) for step in steps])

    def _events_of_step(self, step: Step) -> bytes:
        run = step.run
        position: dict[str, Any] = {"output_index": run.index, "item_id": self._id(run)}
        if run.kind is not PartKind.CALL:
            position["content_index"] = 0
        logprobs: dict[str, Any] = {"logprobs": []} if run.kind is PartKind.CONTENT else {}
        match step:
            case RunOpened():
                empty = self._item(Run(run.index, run.kind, run.call_id, run.name), "in_progress")
                events = self._named("response.output_item.added", output_index=run.index, item=empty)
                if run.kind is PartKind.CALL:
                    return events
                return events + self._named("response.content_part.added", **position, part=_part(run.kind, ""))
            case RunGrew():
                return self._named(_DELTAS[run.kind], **position, delta=step.text, **logprobs)
            case RunClosed():
                field = "arguments" if run.kind is PartKind.CALL else "text"
                name = {"name": run.name} if run.kind is PartKind.CALL else {}
                events = self._named(_DONE[run.kind], **position, **{field: run.text}, **logprobs, **name)
                if run.kind is not PartKind.CALL:
                    events += self._named("response.content_part.done", **position, part=_part(run.kind, run.text))
                item = self._item(run, self._status_of(run))
                return events + self._named("response.output_item.done", output_index=run.index, item=item)

    def _named(self, kind: str, **content: Any) -> bytes:
        self._num_events += 1
        return _event(kind, self._num_events - 1, **content)

    # ---- the response ----

    def _whole(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._finish_reason is FinishReason.LENGTH
        response = self._in_state("incomplete" if is_cut else "completed", output=self._items("completed"))
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response | {"usage": _usage(usage)}

    def _in_state(self, status: str, output: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {**self._response, "status": status, "output": list(output)}

    def _items(self, status: str) -> list[dict[str, Any]]:
        return [self._item(run, self._status_of(run) if status == "completed" else status) for run in self._runs.runs]

    def _status_of(self, run: Run) -> str:
        is_last = run.index == len(self._runs.runs) - 1
        is_cut = self._finish_reason is FinishReason.LENGTH or (self._is_call_cut and run.kind is PartKind.CALL)
        return "incomplete" if is_last and is_cut else "completed"

    def _id(self, run: Run) -> str:
        while len(self._ids) <= run.index:
            self._ids.append(secrets.token_hex(12))
        return f"{_PREFIXES[run.kind]}_{self._ids[run.index]}"

    def _item(self, run: Run, status: str) -> dict[str, Any]:
        item = {"id": self._id(run), "status": status}
        if run.kind is PartKind.CALL:
            call = {"call_id": run.call_id, "name": run.name, "arguments": run.text}
            return {"type": "function_call", **item, **call}
        content = [_part(run.kind, run.text)] if run.text or status != "in_progress" else []
        if run.kind is PartKind.REASONING:
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}


def _event(kind: str, number: int, **content: Any) -> bytes:
    data = msgspec.json.encode({"type": kind, "sequence_number": number, **content})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _part(kind: PartKind, text: str) -> dict[str, Any]:
    if kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's object; tokens of reasoning are output tokens, and not counted apart."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a response that repeat the request."""
    given = body.model_dump(
        include={"instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user", "safety_identifier"}
    )
    tools = [tool.model_dump() for tool in body.tools or ()]
    choice = body.tool_choice
    text = None if body.text is None or body.text.format is None else body.text.format
    return {
        **given,
        "error": None,
        "incomplete_details": None,
        "previous_response_id": None,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": None if body.reasoning is None else body.reasoning.model_dump(include={"effort", "summary"}),
        "store": False,
        "text": {"format": {"type": "text"} if text is None else text.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
        "tools": tools,
        "truncation": "disabled",
        "usage": None,
    }
