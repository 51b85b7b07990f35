"""Token messages that came together are handled as one.

A worker sends a message per step, so that tokens are never late. While the router is busy, messages pile up: to join
those of a request costs less than to take each through the request's state and its client's task, and so the router is
quickest when it has most to do. It waits for nothing: what a link's socket has is joined.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from splitserve.protocol.messages.requests import StepTokens, TokenDelta
from splitserve.protocol.request import Party, RequestKey

Arrived: TypeAlias = tuple[Party, StepTokens]


class Arrivals:
    """Messages that wait for :meth:`handle_all`, which calls ``handle``. Must be used on the event loop's thread."""

    def __init__(self, handle: Callable[[Party, StepTokens], None]) -> None:
        self._handle = handle
        self._waiting: list[Arrived] = []
        self._loop = asyncio.get_running_loop()

    @property
    def is_empty(self) -> bool:
        """Return whether no message waits."""
        return not self._waiting

    def add(self, sender: Party, message: StepTokens) -> None:
        """Take a message."""
        self._waiting.append((sender, message))

    def handle_all(self) -> None:
        """Handle the messages that wait. An error in one doesn't keep the others from being handled."""
        if not self._waiting:
            return
        arrived, self._waiting = self._waiting, []
        for sender, message in arrived if len(arrived) < 2 else joined(arrived):
            try:
                self._handle(sender, message)
            except Exception as error:
                self._loop.call_exception_handler({"message": f"tokens of worker {sender}", "exception": error})


def joined(arrived: Sequence[Arrived]) -> list[Arrived]:
    """Return the messages with adjacent tokens of a request as one delta, where these have nothing but tokens."""
    runs: list[tuple[Party, list[TokenDelta]]] = []
    growing: dict[RequestKey, tuple[Party, list[TokenDelta]]] = {}  # runs that a plain delta may continue
    for sender, message in arrived:
        for delta in message.deltas:
            run = growing.get(delta.key)
            is_plain = delta.logprobs is None and delta.handover is None and not delta.marks
            if run is not None and is_plain and run[0] == sender and _follows(delta, run[1][-1]):
                run[1].append(delta)
            else:
                run = sender, [delta]
                runs.append(run)
            if is_plain:
                growing[delta.key] = run
            else:
                growing.pop(delta.key, None)
    messages: list[Arrived] = []
    for sender, deltas in runs:
        delta = deltas[0] if len(deltas) == 1 else _joined_run(deltas)
        if messages and messages[-1][0] == sender:
            messages[-1][1].deltas.append(delta)
        else:
            messages.append((sender, StepTokens([delta])))
    return messages


def _follows(delta: TokenDelta, before: TokenDelta) -> bool:
    return delta.position == before.position + len(before.token_ids) and before.finish_reason is None


def _joined_run(deltas: Sequence[TokenDelta]) -> TokenDelta:
    first = deltas[0]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    num_cached_tokens = max(delta.num_cached_tokens for delta in deltas)
    return TokenDelta(first.key, first.position, token_ids, deltas[-1].finish_reason, num_cached_tokens)
