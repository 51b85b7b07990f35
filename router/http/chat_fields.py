"""Tools, tool calls and messages of chat bodies, and what of them fits together."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from splitserve.router.http.api_error import ApiError

MAX_TOOLS = 512
MAX_CALLS = 512  # in one message
MAX_PARTS = 1024
MAX_NAME_CHARS = 256
MAX_ID_CHARS = 512

FunctionName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9_.:/\-]+$")]
CallId = Annotated[str, Field(max_length=MAX_ID_CHARS)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class FunctionSpec(_Strict):
    """A function that the model may call. ``parameters`` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class FunctionChoice(_Strict):
    """The function to call."""

    name: FunctionName


class NamedTool(_Strict):
    """The one tool to call."""

    type: Literal["function"]
    function: FunctionChoice


class AllowedFunctions(_Strict):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(_Strict):
    """A choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class CalledFunction(_Strict):
    """A function that the model called, with its arguments as text."""

    name: FunctionName
    arguments: str


class CalledTool(_Strict):
    """A tool call of an earlier answer."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a streamed answer, which a client may send back as it is


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One message. A client may send the fields after ``reasoning`` back from an answer; they must be empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str | None:
        """The content, with text parts joined by newlines."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise :class:`ApiError` 400 for a message whose fields don't go with its role."""
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if message.tool_calls and message.role != "assistant":
            raise _invalid(
                f"{field}.tool_calls", f"is only allowed in assistant messages, not with role {message.role}"
            )
        if message.tool_call_id is not None and message.role != "tool":
            raise _invalid(f"{field}.tool_call_id", f"is only allowed in tool messages, not with role {message.role}")
        if message.role == "tool" and message.tool_call_id is None:
            raise _invalid(f"{field}.tool_call_id", "is missing; a tool message answers the call with that id")
        has_other = message.role == "assistant" and (
            message.tool_calls or message.reasoning_content or message.reasoning
        )
        if message.content is None and not has_other:
            raise _invalid(f"{field}.content", "is missing; only an assistant message with tool_calls may leave it out")


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise :class:`ApiError` 400 for tools of the same name, and for a choice that the tools don't allow."""
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _invalid(
                f"tools[{index}].function.name", f"is {name!r}, like an earlier tool's; give each its own name"
            )
    if choice == "required" and not tools:
        raise _invalid("tool_choice", "required needs tools, but the request has none")
    if isinstance(choice, NamedTool):
        _check_chosen(choice, names, "tool_choice")
    elif isinstance(choice, AllowedTools):
        for index, each in enumerate(choice.allowed_tools.tools):
            _check_chosen(each, names, f"tool_choice.allowed_tools.tools[{index}]")


def _check_chosen(chosen: NamedTool, names: Sequence[str], field: str) -> None:
    if chosen.function.name not in names:
        message = (
            f"is {chosen.function.name!r}, which is no tool of the request; its tools are: {', '.join(names) or 'none'}"
        )
        raise _invalid(f"{field}.function.name", message)


def usable_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> tuple[Sequence[Tool], ToolChoice | None]:
    """Return the tools and the choice of a request without the tools that an :class:`AllowedTools` leaves out."""
    if not isinstance(choice, AllowedTools):
        return tools, choice
    names = {each.function.name for each in choice.allowed_tools.tools}
    return [tool for tool in tools if tool.function.name in names], choice.allowed_tools.mode


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param} {message}", param=param, code="invalid_value")
