"""Parts of a message in the JSON of chat completions."""

from collections.abc import Sequence
from typing import Any

from splitserve.router.output.parts import Part, PartKind, assembled

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that calls tools."""


def delta_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the parts as one delta. Clients add deltas up: a call has one entry in each, with its id in the first."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind is PartKind.CALL:
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"index": part.index, "id": part.call_id, "type": "function", "function": function}
        elif part.kind is PartKind.ARGUMENTS:
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
        else:
            field = "content" if part.kind is PartKind.CONTENT else "reasoning_content"
            delta[field] = delta.get(field, "") + part.text
    return delta | {"tool_calls": list(calls.values())} if calls else delta


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Return a whole message."""
    message = assembled(parts)
    content: dict[str, Any] = {
        "role": "assistant",
        "content": message.content or (None if message.calls else ""),
        "refusal": None,
    }
    if message.reasoning:
        content["reasoning_content"] = message.reasoning
    if message.calls:
        content["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return content
