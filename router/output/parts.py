"""Parts of an assistant's message, the same for every endpoint. Each endpoint writes them in its own JSON.

A stream of parts and the whole message hold the same text: the message is the parts put together.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec


class PartKind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()  # a tool call begins
    ARGUMENTS = auto()  # more of the arguments of the call that began last


class Part(msgspec.Struct, frozen=True, gc=False):
    """Addition to a message."""

    kind: PartKind
    text: str = ""  # empty for CALL
    index: int = 0  # of the call, for CALL and ARGUMENTS
    call_id: str = ""  # for CALL
    name: str = ""  # of the function, for CALL


@dataclass(slots=True)
class ToolCall:
    """A call of a function. ``arguments`` is the model's text: JSON, unless the model wrote something else."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """An assistant's whole message."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def assembled(parts: Iterable[Part]) -> Message:
    """Return the message that ``parts`` add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[ToolCall, list[str]]] = []
    for part in parts:
        if part.kind is PartKind.CONTENT:
            content.append(part.text)
        elif part.kind is PartKind.REASONING:
            reasoning.append(part.text)
        elif part.kind is PartKind.CALL:
            calls.append((ToolCall(part.call_id, part.name), []))
        else:
            calls[part.index][1].append(part.text)
    for call, arguments in calls:
        call.arguments = "".join(arguments)
    return Message("".join(content), "".join(reasoning), [call for call, _ in calls])
