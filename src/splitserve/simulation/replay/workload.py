"""Workloads to replay: requests with their arrivals, lengths, and the identity of their prompts' blocks."""

import csv
import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from splitserve.common.errors import ConfigError

BLOCK_TOKENS = 512
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


class _TraceLine(msgspec.Struct):
    """A line of a trace in Mooncake's form. Each of its ids names a block together with all before it."""

    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_mooncake(path: Path) -> list[ReplayRequest]:
    """Read a trace of JSON lines with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``.

    Raises :class:`ConfigError` that names the line.
    """
    decoder = msgspec.json.Decoder(_TraceLine)
    return [_of_line(line) for line in _decoded(path, decoder)]


def _decoded(path: Path, decoder: "msgspec.json.Decoder[_TraceLine]") -> Iterator[_TraceLine]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"line {number} of {path} is not a request of a Mooncake trace: {error}") from error


def _of_line(line: _TraceLine) -> ReplayRequest:
    names = [b"%d" % hash_id for hash_id in line.hash_ids[: line.input_length // BLOCK_TOKENS]]
    return ReplayRequest(line.timestamp / 1e3, max(1, line.input_length), max(1, line.output_length), names)


def read_azure(path: Path) -> list[ReplayRequest]:
    """Read a CSV with TIMESTAMP, ContextTokens and GeneratedTokens; its prompts share nothing.

    Raises :class:`ConfigError` that names the line.
    """
    requests: list[ReplayRequest] = []
    begin = None
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                time = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, ValueError, TypeError) as error:
                raise ConfigError(f"line {number} of {path} is not a request of an Azure trace: {error!r}") from error
            begin = begin or time
            requests.append(ReplayRequest((time - begin).total_seconds(), max(1, prompt), max(1, output)))
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
