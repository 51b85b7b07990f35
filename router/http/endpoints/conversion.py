"""Bodies of other APIs as bodies of chats."""

from collections.abc import Mapping, Sequence
from typing import Any

from splitserve.router.http.api_error import ApiError
from splitserve.router.http.chat_fields import check_tools
from splitserve.router.http.schema import ChatCompletionRequest, GenerationRequest

_NOT_SHARED = frozenset({"max_tokens", "metadata", "stop", "stream_options"})


def chat_of(
    body: GenerationRequest, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
) -> ChatCompletionRequest:
    """Return the chat with ``messages``, the parameters that ``body`` shares with chats, and ``fields`` beside them.

    Raises :class:`ApiError` 400 for tools that don't go together.
    """
    shared = {
        name: getattr(body, name)
        for name in GenerationRequest.model_fields
        if name not in _NOT_SHARED and getattr(body, name) is not None
    }
    chat = ChatCompletionRequest(messages=list(messages), **{**shared, **fields})  # type: ignore[arg-type]
    check_tools(chat.tools or (), chat.tool_choice)
    return chat


def invalid_field(param: str, message: str) -> ApiError:
    """Return the error for a part of a body that doesn't fit the rest."""
    return ApiError(400, f"{param} {message}", param=param, code="invalid_value")
