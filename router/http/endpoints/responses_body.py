"""Bodies of ``/v1/responses``, and the chats that they stand for.

Nothing is stored, so that each request has the whole conversation in ``input``; what needs a store is refused by name.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from splitserve.router.http.chat_fields import MAX_PARTS, MAX_TOOLS, CallId, FunctionName
from splitserve.router.http.endpoints.conversion import ConvertedRequest, SentBack, check_num_calls, invalid_field
from splitserve.router.http.schema import MAX_MESSAGES, NEUTRAL_ONLY, ChatCompletionRequest

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: NEUTRAL_ONLY[name] for name in ("moderation", "store")},
    "top_logprobs": (0,),
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
"""Parameters of the API that need a store or aren't supported, with their neutral values besides null."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class InputPart(SentBack):
    """Part of an item's content. A client may send the fields after ``text`` back from an answer."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Parts = Annotated[list[InputPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class InputItem(SentBack):
    """A message, a function call of the model, its output, or the model's reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    call_id: CallId | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    encrypted_content: str | None = None


class FlatTool(_Strict):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(_Strict):
    """The one function to call."""

    type: Literal["function"]
    name: FunctionName

    def nested(self) -> dict[str, Any]:
        """Return the choice in the form of chats."""
        return {"type": self.type, "function": {"name": self.name}}


class FlatAllowed(_Strict):
    """The tools that may be called, and whether one must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatChoice], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]

    def nested(self) -> dict[str, Any]:
        """Return the choice in the form of chats."""
        return {
            "type": self.type,
            "allowed_tools": {"mode": self.mode, "tools": [each.nested() for each in self.tools]},
        }


class ReasoningWish(_Strict):
    """The wanted effort of reasoning. Reasoning is answered as it is, without summaries."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextForm(_Strict):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextWish(_Strict):
    format: TextForm | None = None
    verbosity: str | None = None


class ResponsesStreamOptions(_Strict):
    include_obfuscation: bool | None = None


class ResponsesRequest(ConvertedRequest):
    """A conversation, and how to answer. Sampling parameters of chats are accepted as well."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | FlatAllowed | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningWish | None = None
    text: TextWish | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=16)] | None = None
    stream_options: ResponsesStreamOptions | None = None  # type: ignore[assignment]

    def names(self) -> dict[str, str]:
        """See :class:`ConvertedRequest`."""
        names = super().names() | {r"^messages\b": "input"}
        names[r"^tool_choice\.allowed_tools\.tools(\[\d+\])\.function\b"] = r"tool_choice.tools\1"
        if self.max_tokens is None:
            names[r"\bmax_tokens\b"] = "max_output_tokens"
        if self.response_format is None and self.text is not None and self.text.format is not None:
            names[r"^response_format(\.json_schema)?\b"] = "text.format"
        return names

    def chat(self) -> ChatCompletionRequest:
        """Return the chat of the body. Raises :class:`ApiError` 400."""
        messages = _Messages(self.instructions)
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for index, item in enumerate(items):
            messages.add(item, f"input[{index}]")
        if not (found := messages.finish()):
            raise invalid_field("input", "has no message to answer: add one, of the user for instance")
        fields = self._chat_fields()
        if (form := self._response_format()) is not None:
            fields["response_format"] = form
        return self.chat_of(found, fields)

    def _chat_fields(self) -> dict[str, Any]:
        """Return the parameters that chats write in another form."""
        fields: dict[str, Any] = {}
        if None not in (self.max_tokens, self.max_output_tokens) and self.max_tokens != self.max_output_tokens:
            raise invalid_field("max_output_tokens", "and max_tokens differ: give one of them")
        if (most := self.max_output_tokens or self.max_tokens) is not None:
            fields["max_tokens"] = most
        if self.tools is not None:
            fields["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools
            ]
        if isinstance(self.tool_choice, FlatChoice | FlatAllowed):
            fields["tool_choice"] = self.tool_choice.nested()
        elif self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice
        if self.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        return fields

    def _response_format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        if self.response_format is not None:
            raise invalid_field("response_format", "and text.format are both set; give text.format")
        if form.type != "json_schema":
            return {"type": form.type}
        if form.name is None or form.schema_ is None:
            raise invalid_field("text.format", "of type json_schema needs name and schema")
        schema = {"name": form.name, "schema": form.schema_, "strict": form.strict, "description": form.description}
        return {"type": "json_schema", "json_schema": {name: each for name, each in schema.items() if each is not None}}


class _Messages:
    """Messages of a chat, from items in order: reasoning and calls join the assistant's message."""

    def __init__(self, instructions: str | None) -> None:
        self._messages: list[dict[str, Any]] = []
        if instructions:
            self._messages.append({"role": "system", "content": instructions})
        self._reasoning = ""

    def finish(self) -> list[dict[str, Any]]:
        return self._messages

    def add(self, item: InputItem, field: str) -> None:
        """Add the item in ``field`` of the body. Raises :class:`ApiError` 400 for one that lacks a part."""
        match item.type:
            case "message":
                self._add_message(item, field)
            case "reasoning":
                self._reasoning += _text(item.content) or _text(item.summary)
            case "function_call":
                self._add_call(item, field)
            case "function_call_output":
                if item.call_id is None or item.output is None:
                    raise invalid_field(field, "of type function_call_output needs call_id and output")
                output = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                self._messages.append(output)

    def _add_message(self, item: InputItem, field: str) -> None:
        if item.role is None or item.content is None:
            raise invalid_field(field, "of type message needs role and content")
        message = {"role": item.role, "content": _text(item.content)}
        if item.role == "assistant":
            message |= self._taken_reasoning()
        self._messages.append(message)

    def _add_call(self, item: InputItem, field: str) -> None:
        if item.call_id is None or item.name is None or item.arguments is None:
            raise invalid_field(field, "of type function_call needs call_id, name and arguments")
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == "assistant" and not self._reasoning:
            calls = last.setdefault("tool_calls", [])
            calls.append(call)
            check_num_calls(calls, field)
        else:
            assistant: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
            self._messages.append(assistant | self._taken_reasoning())

    def _taken_reasoning(self) -> dict[str, str]:
        reasoning, self._reasoning = self._reasoning, ""
        return {"reasoning_content": reasoning} if reasoning else {}


def _text(content: str | list[InputPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)
