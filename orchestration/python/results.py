"""Results of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from splitserve.common.errors import SplitserveError

Message: TypeAlias = Mapping[str, Any]
"""Message of a chat, as in OpenAI's API: ``{"role": "user", "content": "Hello"}``."""


class PromptError(SplitserveError):
    """Failure of one prompt of a batch."""

    def __init__(self, index: int, reason: str, *, status: int = 0, param: str = "", code: str = "") -> None:
        super().__init__(f"prompt {index}: {reason}")
        self.index = index  # of the prompt in its batch
        self.reason = reason
        self.status = status  # HTTP status of the answer; 0: there was none
        self.param = param  # the parameter at fault, if there is one
        self.code = code  # OpenAI's error code


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a tool in an answer."""

    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class Output:
    """One answer to a prompt."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop", "length" or "tool_calls"
    reasoning: str  # the thinking part of a chat's answer
    tool_calls: list[ToolCall]
    raw: Mapping[str, Any]  # the choice as the HTTP API returned it, with log-probabilities if they were requested


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # tokens of the prompt whose KV was there already


@dataclass(frozen=True, slots=True)
class Completion:
    """Answers to a prompt."""

    prompt: str | Sequence[int]
    outputs: list[Output]
    usage: Usage
    route: Mapping[str, Any] | None  # the workers and the hand-over, if ``return_route`` requested them


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """Answers to a chat."""

    messages: Sequence[Message]
    outputs: list[Output]
    usage: Usage
    route: Mapping[str, Any] | None  # the workers and the hand-over, if ``return_route`` requested them


def outputs_of(answer: Mapping[str, Any]) -> list[Output]:
    """Return the choices of an answer of the HTTP API, in order."""
    return [_output(choice) for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))]


def _output(choice: Mapping[str, Any]) -> Output:
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return Output(
        text=message.get("content") or "",
        token_ids=choice["token_ids"],
        finish_reason=choice["finish_reason"],
        reasoning=message.get("reasoning_content") or "",
        tool_calls=calls,
        raw=choice,
    )


def usage_of(answer: Mapping[str, Any]) -> Usage:
    """Return the numbers of tokens of an answer of the HTTP API."""
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens", 0))
