"""Token messages that came together are handled as one.

A worker sends a message per step, so that tokens are never late. While the router is busy, messages pile up: to join
those of a request costs less than to take each through the request's state and its client's task, and so the router is
quickest when it has most to do. It waits for nothing: what a link's socket has is joined.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import cast

from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.requests import StepTokens, TokenDelta


def joined(bodies: list[Body]) -> list[Body]:
    """Return a worker's messages with adjacent ones of tokens as one, in which adjacent tokens of a request are one
    delta, where these have nothing but tokens."""
    if len(bodies) < 2:
        return bodies
    messages: list[Body] = []
    for kind, run in groupby(bodies, type):
        if kind is StepTokens:
            messages.append(_joined_tokens(cast("Iterable[StepTokens]", run)))
        else:
            messages += run
    return messages


def _joined_tokens(messages: Iterable[StepTokens]) -> StepTokens:
    runs: list[list[TokenDelta]] = []
    growing: dict[str, list[TokenDelta]] = {}  # by request: tokens and nothing else, which more may follow
    for message in messages:
        for delta in message.deltas:
            request_id = delta.key.request_id
            is_plain = delta.logprobs is None and delta.handover is None and not delta.marks
            run = growing.get(request_id) if is_plain else None
            if run is not None and _follows(delta, run[-1]):
                run.append(delta)
                continue
            run = [delta]
            runs.append(run)
            if is_plain:
                growing[request_id] = run
            else:
                growing.pop(request_id, None)
    return StepTokens([run[0] if len(run) == 1 else _joined_run(run) for run in runs])


def _follows(delta: TokenDelta, before: TokenDelta) -> bool:
    is_next = delta.position == before.position + len(before.token_ids) and before.finish_reason is None
    return is_next and delta.key.attempt == before.key.attempt


def _joined_run(deltas: Sequence[TokenDelta]) -> TokenDelta:
    first = deltas[0]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    num_cached_tokens = max([delta.num_cached_tokens for delta in deltas])
    return TokenDelta(first.key, first.position, token_ids, deltas[-1].finish_reason, num_cached_tokens)
