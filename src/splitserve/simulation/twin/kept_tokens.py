"""Tokens that a worker of the twin has drawn and not yet sent, since its router decides nothing by them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from splitserve.protocol.messages.marks import MarkKind
from splitserve.protocol.messages.requests import TokenDelta


@dataclass(slots=True)
class KeptTokens:
    """Tokens of one request that its router hasn't got."""

    deltas: list[TokenDelta] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # at which they were drawn


def is_news(delta: TokenDelta) -> bool:
    """Return whether the router's view of the request changes by more than the number of its tokens.

    The second token that prefill draws is its last one: no other would take it along.
    """
    if delta.position == 0 or delta.finish_reason is not None or delta.handover is not None:
        return True
    return any(mark.kind is MarkKind.SECOND for mark in delta.marks)


def join(parts: Sequence[TokenDelta]) -> TokenDelta:
    """Return one delta with the tokens of all ``parts`` in their order."""
    if len(parts) == 1:
        return parts[0]
    return msgspec.structs.replace(
        parts[0],
        token_ids=[token for part in parts for token in part.token_ids],
        finish_reason=parts[-1].finish_reason,
        handover=next((part.handover for part in parts if part.handover is not None), None),
        marks=[mark for part in parts for mark in part.marks],
    )
