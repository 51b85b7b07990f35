"""Workloads to replay: requests with their arrivals, lengths, and the identity of their prompts' blocks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from splitserve.common.errors import ConfigError
from splitserve.workloads.traces import HASHED_TOKENS, read_trace

BLOCK_TOKENS = HASHED_TOKENS
"""Tokens of a block in Mooncake's traces; replayed workers have blocks of this size."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request. A prompt's KV can be reused as far as names of blocks agree."""

    arrives_at: float  # in seconds from the start, or from the end of the request that it follows
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: Sequence[bytes] = ()  # names of full blocks; those behind the prompt's are of its output
    session: str = ""  # the conversation, where it is known
    follows: int | None = None  # number of the request whose end it awaits

    def num_full_blocks(self, num_tokens: int) -> int:
        """Return the number of named blocks that ``num_tokens`` tokens fill."""
        return min(num_tokens // BLOCK_TOKENS, len(self.blocks))


def read_requests(path: Path) -> list[ReplayRequest]:
    """Read a trace of single requests, in a form that :func:`read_trace` knows. Raises :class:`ConfigError`."""
    requests = []
    for conversation in read_trace(path).conversations:
        if len(conversation.turns) > 1:
            raise ConfigError(f"{path} has conversations of several turns; only single requests are replayed")
        [turn] = conversation.turns
        names = [piece.name.encode() for piece in turn.pieces if piece.num_tokens == BLOCK_TOKENS]
        requests.append(ReplayRequest(conversation.start_seconds, turn.num_new_tokens, turn.num_output_tokens, names))
    return requests


def sped_up(requests: Iterable[ReplayRequest], factor: float) -> list[ReplayRequest]:
    """Return the workload with all times divided by ``factor``."""
    return [replace(request, arrives_at=request.arrives_at / factor) for request in requests]


def spread(requests: Sequence[ReplayRequest], tick_seconds: float) -> list[ReplayRequest]:
    """Return a workload whose requests of the same tick arrive evenly over it: a trace's clock may tick in seconds."""
    ticks: dict[float, int] = {}
    for request in requests:
        ticks[request.arrives_at] = ticks.get(request.arrives_at, 0) + 1
    seen: dict[float, int] = {}
    result = []
    for request in requests:
        number = seen[request.arrives_at] = seen.get(request.arrives_at, -1) + 1
        offset = tick_seconds * number / ticks[request.arrives_at]
        result.append(replace(request, arrives_at=request.arrives_at + offset))
    return result


def tick_of(requests: Sequence[ReplayRequest]) -> float:
    """Return the smallest time between different arrivals."""
    times = sorted({request.arrives_at for request in requests})
    return min((later - earlier for earlier, later in pairwise(times)), default=0.0)


def prompt_rate(requests: Sequence[ReplayRequest]) -> float:
    """Return the prompt tokens that arrive per second, from the first arrival to the last."""
    seconds = max(request.arrives_at for request in requests) - min(request.arrives_at for request in requests)
    return sum(request.num_prompt_tokens for request in requests) / seconds


def at_prompt_rate(requests: Sequence[ReplayRequest], tokens_per_second: float) -> list[ReplayRequest]:
    """Return the workload sped up or slowed down to so many prompt tokens per second."""
    return sped_up(requests, tokens_per_second / prompt_rate(requests))
