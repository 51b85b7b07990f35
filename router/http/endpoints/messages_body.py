"""Bodies of ``/v1/messages``, and the chats that they stand for."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from splitserve.router.http.chat_fields import MAX_PARTS, MAX_TOOLS, CallId, FunctionName
from splitserve.router.http.endpoints.conversion import ConvertedRequest, SentBack, check_num_calls, invalid_field
from splitserve.router.http.schema import (
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    ChatCompletionRequest,
    Off,
    StopString,
)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "billing_policy": (),
    "compaction": (),
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "fallback_credit_token": (),
    "fallbacks": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
    "user_profile_id": (),
    "workspace_id": (),
}
"""Parameters of the API that aren't supported, with their neutral values besides null."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class CacheControl(_Strict):
    """A wish about a prompt cache; the prefix cache here needs none."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class ResultPart(SentBack):
    """Text in a tool's result."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class Block(SentBack):
    """Text, a call of a tool, its result, or the model's reasoning."""

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    text: str | None = None
    id: CallId | None = None
    name: FunctionName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: str | Annotated[list[ResultPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None
    caller: dict[str, Any] | None = None


class InputMessage(_Strict):
    """A turn of the user or of the model."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]


class AnthropicTool(_Strict):
    """A tool that the model may call; ``input_schema`` is a JSON schema."""

    name: FunctionName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None


class AnthropicChoice(_Strict):
    """Which tools to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Strict):
    """The switch for reasoning. Its budget is accepted, and bounds nothing."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: str | None = None


class OutputFormat(_Strict):
    """The form of the answer: a document that ``schema`` allows."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class OutputConfig(_Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesStreamOptions(_Strict):
    include_usage: bool | None = None  # a stream has it in any case
    include_obfuscation: Off | None = None


class CountRequest(ConvertedRequest):
    """A conversation whose tokens are counted."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[ResultPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    stream_options: MessagesStreamOptions | None = None  # type: ignore[assignment]

    def names(self) -> dict[str, str]:
        """See :class:`ConvertedRequest`."""
        has_other = self.response_format is not None
        return super().names() | ({} if has_other else {r"^response_format(\.json_schema)?\b": "output_config.format"})

    def chat(self) -> ChatCompletionRequest:
        """Return the chat of the body. Raises :class:`ApiError` 400."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for index, message in enumerate(self.messages):
            field = f"messages[{index}]"
            if isinstance(message.content, str):
                messages.append({"role": message.role, "content": message.content})
            elif message.role == "user":
                messages += _user_messages(message.content, field)
            else:
                messages.append(_assistant_message(message.content, field))
        return self.chat_of(messages, self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        """Return the parameters that chats write in another form."""
        fields: dict[str, Any] = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        if self.stop_sequences:
            if self.stop:
                raise invalid_field("stop", "and stop_sequences are both set; give stop_sequences")
            fields["stop"] = self.stop_sequences
        if self.tools is not None:
            fields["tools"] = [_tool(tool) for tool in self.tools]
        if self.thinking is not None:
            fields["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None:
            fields |= self._output_fields(self.output_config)
        choice = self.tool_choice
        if choice is not None:
            if choice.type == "any" and not self.tools:
                raise invalid_field("tool_choice", "any needs tools, but the request has none")
            fields["tool_choice"] = _choice(choice)
            if choice.disable_parallel_tool_use is not None:
                fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return fields

    def _output_fields(self, config: OutputConfig) -> dict[str, Any]:
        fields: dict[str, Any] = {} if config.effort is None else {"reasoning_effort": config.effort}
        if config.format is not None:
            if self.response_format is not None:
                raise invalid_field("response_format", "and output_config.format are both set; give the latter")
            schema = {"name": "output", "schema": config.format.schema_, "strict": config.format.strict}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


class MessagesRequest(CountRequest):
    """A conversation, and how to answer."""

    max_tokens: Annotated[int, Field(ge=1)]

    def chat(self) -> ChatCompletionRequest:
        """See :class:`CountRequest`. Raises :class:`ApiError` 400 also for a last message that is the assistant's."""
        if self.messages[-1].role == "assistant":
            words = "is the assistant's, and continuing it is not supported: the last message must be the user's"
            raise invalid_field(f"messages[{len(self.messages) - 1}]", words)
        return super().chat()


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: AnthropicChoice) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise invalid_field("tool_choice.name", "is missing; type tool names the tool to call")
    return {"type": "function", "function": {"name": choice.name}}


def _user_messages(blocks: list[Block], field: str) -> list[dict[str, Any]]:
    """Return a user's turn: results of tools are messages of their own, before the text."""
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        where = f"{field}.content[{index}]"
        if block.type == "tool_result":
            if block.tool_use_id is None:
                raise invalid_field(
                    f"{where}.tool_use_id", "is missing; a tool_result answers the tool_use with that id"
                )
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)})
        elif block.type == "text":
            texts.append(_needed(block.text, f"{where}.text"))
        else:
            raise invalid_field(f"{where}.type", f"is {block.type}, which belongs into assistant messages")
    return [*results, {"role": "user", "content": "\n".join(texts)}] if texts else results


def _assistant_message(blocks: list[Block], field: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where = f"{field}.content[{index}]"
        if block.type == "text":
            texts.append(_needed(block.text, f"{where}.text"))
        elif block.type == "thinking":
            thoughts.append(_needed(block.thinking, f"{where}.thinking"))
        elif block.type == "tool_use":
            name = _needed(block.name, f"{where}.name")
            arguments = msgspec.json.encode(block.input or {}).decode()
            function = {"name": name, "arguments": arguments}
            calls.append({"id": _needed(block.id, f"{where}.id"), "type": "function", "function": function})
            check_num_calls(calls, where)
        else:
            raise invalid_field(f"{where}.type", f"is {block.type}, which belongs into user messages")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise invalid_field(where, "is missing; a block of this type needs it")
    return value


def _text(content: str | list[ResultPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)
