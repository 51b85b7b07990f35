"""Bodies of other APIs as bodies of chats."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from splitserve.router.http.api_error import ApiError
from splitserve.router.http.chat_fields import MAX_CALLS
from splitserve.router.http.schema import MAX_MESSAGES, ChatCompletionRequest, GenerationRequest, Off, One

_NOT_SHARED = frozenset({"max_tokens", "metadata", "stream_options"})


class SentBack(BaseModel):
    """Part of a conversation, which a client may send back as its library has read it from an answer: with null in
    fields that only other servers know, which are left out."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.keys() <= cls.model_fields.keys():
            return given
        return {name: value for name, value in given.items() if value is not None or name in cls.model_fields}


class ConvertedRequest(GenerationRequest):
    """A body that stands for a chat. Its answer has one choice, without token ids, and always has the usage."""

    n: One | None = Field(default=None, description="an answer has one choice")
    return_token_ids: Off | None = Field(default=None, description="an answer has no token ids")

    @property
    def include_usage(self) -> bool:
        return True

    @property
    def continuous_usage(self) -> bool:
        return False

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Rename the fields in errors of the chat that this body stands for."""
        try:
            yield
        except ApiError as error:
            if error.status != 400:
                raise
            message, param = self._renamed(error.message), self._renamed(error.param or "")
            raise ApiError(400, message, param=param or None, code=error.code) from None

    def chat_of(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> ChatCompletionRequest:
        """Return the chat with ``messages``, the parameters that this body shares with chats, and ``fields``.

        Raises :class:`ApiError` 400 for too many messages, and for tools that don't go together.
        """
        if len(messages) > MAX_MESSAGES:
            count = f"{len(messages)} messages of a chat, with the system prompt and each result of a tool"
            raise ApiError(
                400, f"messages: {count}; at most {MAX_MESSAGES} are allowed", param="messages", code="invalid_value"
            )
        shared = {
            name: getattr(self, name)
            for name in GenerationRequest.model_fields
            if name not in _NOT_SHARED and getattr(self, name) is not None
        }
        chat = ChatCompletionRequest(messages=list(messages), **{**shared, **fields})  # type: ignore[arg-type]
        chat.settle_tools()
        return chat

    def names(self) -> dict[str, str]:
        """Return the names that clients of this API have for fields of chats, by patterns of these in errors."""
        return {r"^(tools\[\d+\]|tool_choice)\.function\b": r"\1"}

    def _renamed(self, text: str) -> str:
        for pattern, name in self.names().items():
            text = re.sub(pattern, name, text)
        return text


def check_num_calls(calls: Sequence[Any], field: str) -> None:
    """Raise :class:`ApiError` 400 for more calls, the last of which is in ``field``, than a message may have."""
    if len(calls) > MAX_CALLS:
        raise invalid_field(field, f"is call {len(calls)} of one message; at most {MAX_CALLS} are allowed")


def invalid_field(param: str, message: str) -> ApiError:
    """Return the error for a part of a body that doesn't fit the rest."""
    return ApiError(400, f"{param} {message}", param=param, code="invalid_value")
