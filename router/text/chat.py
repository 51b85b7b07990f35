"""Chat bodies as their templates read them, and the split of the outputs into messages."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.router.http.api_error import ApiError
from splitserve.router.http.chat_fields import CalledTool, ChatMessage, FunctionSpec, NamedTool
from splitserve.router.http.schema import ChatCompletionRequest
from splitserve.router.output.catalog import ResponseFormat
from splitserve.router.output.forced import ForcedCalls, Reasoning, SchemaText

if TYPE_CHECKING:
    from splitserve.router.output.splitter import Splitter

RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Switches of reasoning in chat templates: accepted for any model, since one without reasoning has none to switch."""


class ChatForm:
    """The form of a model's chats: what its template reads (``variables``), and its response format, if known."""

    def __init__(self, response_format: ResponseFormat | None, variables: frozenset[str]) -> None:
        self._format = response_format
        self._variables = variables

    def messages(self, request: ChatCompletionRequest) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""
        return [self._message(message) for message in request.messages]

    def tools(self, request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
        """Return the tools that the model may call: for the template, and for the types of arguments.

        Raises :class:`ApiError` 400 for tools that the model has no place for.
        """
        if not request.tools or request.tool_choice == "none":
            return None
        if self._variables and "tools" not in self._variables:
            message = "tools: the chat template of this model has no place for tools; serve it with one that has"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        if self._format is None or not self._format.has_tools:
            message = (
                "tools: it is not known how this model writes tool calls; serve it with --response-template, "
                "the name of a known form or a file"
            )
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        return [tool.for_template() for tool in request.tools]

    def forced_grammar(
        self, request: ChatCompletionRequest, token_ids: Mapping[str, int], prompt: str, schema_text: SchemaText
    ) -> str | None:
        """Return the grammar of an output that has to call a tool; None if it needn't.

        ``token_ids``: the vocabulary's added tokens. Raises :class:`ApiError` 400 if a call can't be forced.
        """
        choice = request.tool_choice
        if choice != "required" and not isinstance(choice, NamedTool):
            return None
        found = self._format
        form = None if found is None else found.file.forced_call
        if found is None or form is None:
            message = "tool_choice must be none or auto for this model: the form of its calls has no grammar"
            raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
        reasoning = _reasoning(found, prompt) if found.has_reasoning else Reasoning.NONE
        calls = ForcedCalls(form, token_ids, schema_text)
        return calls.grammar(
            [function.model_dump(exclude_none=True) for function in forced_functions(request)],
            reasoning,
            is_parallel=request.parallel_tool_calls is not False,
        )

    def after_reasoning(self, grammar: str, prompt: str, token_ids: Mapping[str, int]) -> str:
        """Return a grammar that applies to the answer alone, after reasoning if the model reasons."""
        found = self._format
        if found is None or found.file.forced_call is None:
            return grammar
        reasoning = _reasoning(found, prompt) if found.has_reasoning else Reasoning.NONE
        return ForcedCalls(found.file.forced_call, token_ids, _no_schema).after_reasoning(grammar, reasoning)

    def variables(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """Return the template's variables that a request sets. Raises :class:`ApiError` 400 for one it can't set."""
        given = dict(request.chat_template_kwargs or {})
        for name in given:
            self._check_variable(name)
        variables: dict[str, Any] = {}
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
            if request.reasoning_effort == "none":
                variables |= dict.fromkeys(THINKING_VARIABLES, False)
        if request.enable_thinking is not None:
            variables |= dict.fromkeys(THINKING_VARIABLES, request.enable_thinking)
        return {name: value for name, value in (variables | given).items() if name in self._variables}

    def splitter(
        self, request: ChatCompletionRequest, prompt: str, tools: list[dict[str, Any]] | None
    ) -> "Splitter | None":
        """Return the split of an output; None if all of it is content."""
        found = self._format
        if found is None or not (tools or found.has_reasoning):
            return None
        from splitserve.router.output.splitter import Splitter  # models without a format don't need it

        segmentation = found.with_tools if tools else found.without_tools
        max_calls = 1 if request.parallel_tool_calls is False else None
        return Splitter(segmentation, prompt, tools or [], id_style=found.file.call_ids, max_calls=max_calls)

    def _check_variable(self, name: str) -> None:
        param = f"chat_template_kwargs.{name}"
        if name in RESERVED_VARIABLES or (name not in self._variables and name not in THINKING_VARIABLES):
            allowed = sorted((self._variables | set(THINKING_VARIABLES)) - RESERVED_VARIABLES)
            message = f"{param} can't be set; the variables of this model's chat template are: {', '.join(allowed)}"
            raise ApiError(400, message, param=param, code="invalid_value")

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        """Return one message for the template; its fields are those that such templates read."""
        role = "system" if message.role == "developer" else message.role
        has_null = self._format is not None and self._format.file.null_content
        result: dict[str, Any] = {"role": role, "content": message.text if has_null else message.text or ""}
        if message.name is not None:
            result["name"] = message.name
        if message.tool_call_id is not None:
            result["tool_call_id"] = message.tool_call_id
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            field = "reasoning_content" if self._format is None else self._format.file.reasoning_in_prompt
            result[field] = reasoning
        if message.tool_calls:
            result["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return result

    def _call(self, call: CalledTool) -> dict[str, Any]:
        as_text = self._format is not None and self._format.file.arguments_in_prompt == "text"
        arguments = call.function.arguments if as_text else _object_of(call.function.arguments)
        return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def forced_functions(request: ChatCompletionRequest) -> list[FunctionSpec]:
    """Return the functions that a forced call may call: the named one, or all of them."""
    choice = request.tool_choice
    name = choice.function.name if isinstance(choice, NamedTool) else ""
    return [tool.function for tool in request.tools or () if not name or tool.function.name == name]


def _no_schema(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    raise AssertionError(f"an answer has no schema of a call, but {schema} was asked for ({is_strict=})")


def _reasoning(response_format: ResponseFormat, prompt: str) -> Reasoning:
    """Return how the output of a prompt may reason before its answer."""
    from splitserve.router.output.splitter import Splitter

    splitter = Splitter(response_format.with_tools, prompt, [])
    if splitter.is_reasoning:
        return Reasoning.OPEN
    return Reasoning.NONE if splitter.has_reasoned else Reasoning.OPTIONAL


def _object_of(arguments: str) -> Mapping[str, Any] | str:
    """Return arguments as the object that most templates read; as they are if they are no object of JSON, or one that
    has half a character (``\\ud800``) or a number that nothing holds."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
