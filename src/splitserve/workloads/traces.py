"""Workloads from files: traces in the forms of Mooncake and AIPerf (JSONL), and of Azure (CSV).

A line of JSONL has ``timestamp`` (milliseconds), ``input_length`` and ``output_length``; ``hash_ids`` name the prompt's
blocks of :data:`HASHED_TOKENS` tokens, equal ids being equal prefixes. Lines with the same ``session_id`` are turns of
one conversation, ``delay`` milliseconds apart. Azure's CSV has TIMESTAMP, ContextTokens and GeneratedTokens.
"""

import csv
import datetime
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from splitserve.common.errors import ConfigError
from splitserve.workloads.conversation import Conversation, Piece, Turn, Workload

HASHED_TOKENS = 512
MAX_FILE_BYTES = 1 << 30
Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request of a trace."""

    timestamp: Milliseconds = 0.0
    input_length: Length = 0
    output_length: Length = 0
    hash_ids: list[int] = []
    session_id: str | int = ""
    delay: Milliseconds = 0.0

    def pieces(self, number: int) -> tuple[Piece, ...]:
        """Return the prompt's pieces; a line without hashes has one of its own."""
        if not self.hash_ids:
            return (Piece(f"line {number}", max(1, self.input_length)),)
        whole = [Piece(f"block {each}", HASHED_TOKENS) for each in self.hash_ids]
        last = self.input_length - HASHED_TOKENS * (len(whole) - 1)
        if not 0 < last <= HASHED_TOKENS:
            wanted = -(-self.input_length // HASHED_TOKENS)
            raise ValueError(
                f"{len(whole)} hash_ids don't fit input_length {self.input_length}: each stands for "
                f"{HASHED_TOKENS} tokens, the last one for the rest, so it has {wanted}"
            )
        return (*whole[:-1], Piece(whole[-1].name, last))


def read_trace(path: str | Path) -> Workload:
    """Read a trace; its kind follows from the file's name (``.csv``, else JSONL).

    Raises :class:`ConfigError` that names the file, the line and the fault.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB; cut it")
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(_azure_lines(file, path) if path.suffix == ".csv" else _json_lines(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if not lines:
        raise ConfigError(f"{path} has no requests")
    return Workload(path.stem, tuple(_conversations(lines, path)))


def at_rate(workload: Workload, rate: float, num_requests: int, max_tokens: int = 0) -> Workload:
    """Return the first ``num_requests`` requests of a trace, sped up or slowed down to ``rate`` per second on average.

    A trace that has fewer is repeated with other tokens. Conversations that outgrow ``max_tokens`` (0: no limit) are
    left out. Raises :class:`ConfigError` if none is left.
    """
    fitting = [c for c in workload.conversations if not max_tokens or _num_tokens(c) <= max_tokens]
    if not fitting:
        raise ConfigError(f"no conversation of {workload.name} fits {max_tokens} tokens: raise --max-tokens")
    chosen: list[Conversation] = []
    found = 0
    for conversation in _repeated(fitting):
        if found >= num_requests:
            break
        chosen.append(conversation)
        found += len(conversation.turns)
    begin, seconds = chosen[0].start_seconds, chosen[-1].start_seconds - chosen[0].start_seconds
    factor = found / rate / seconds if seconds else 0.0
    moved = (Conversation(c.name, (c.start_seconds - begin) * factor, c.turns) for c in chosen)
    return Workload(workload.name, tuple(moved))


def _num_tokens(conversation: Conversation) -> int:
    return sum(turn.num_new_tokens + turn.num_output_tokens for turn in conversation.turns)


def _repeated(conversations: Sequence[Conversation]) -> Iterator[Conversation]:
    """Yield the conversations, and them again without end: each time later, under other names, and so with other
    tokens."""
    yield from conversations
    first, last = conversations[0].start_seconds, conversations[-1].start_seconds
    period = (last - first) * (1 + 1 / max(1, len(conversations) - 1))
    for number in itertools.count(1):
        prefix = f"round {number} "
        for each in conversations:
            turns = tuple(_renamed(turn, prefix) for turn in each.turns)
            yield Conversation(prefix + each.name, each.start_seconds + number * period, turns)


def _renamed(turn: Turn, prefix: str) -> Turn:
    pieces = tuple(Piece(prefix + piece.name, piece.num_tokens) for piece in turn.pieces)
    return Turn(pieces, turn.num_output_tokens, turn.think_seconds)


def _json_lines(file: Iterable[str], path: Path) -> Iterator[TraceLine]:
    decoder = msgspec.json.Decoder(TraceLine)
    for number, text in enumerate(file, 1):
        if text.strip():
            try:
                yield decoder.decode(text)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


def _azure_lines(file: Iterable[str], path: Path) -> Iterator[TraceLine]:
    rows = csv.DictReader(file)
    begin: datetime.datetime | None = None
    for number, row in enumerate(rows, 2):
        try:
            at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
            begin = begin or at
            milliseconds = 1e3 * (at - begin).total_seconds()
            yield TraceLine(milliseconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {number}: needs TIMESTAMP, ContextTokens and GeneratedTokens ({error})"
            ) from error


def _conversations(lines: Iterable[TraceLine], path: Path) -> Iterator[Conversation]:
    sessions: dict[str, list[Turn]] = {}
    starts: dict[str, float] = {}
    for number, line in enumerate(lines):
        name = str(line.session_id) or f"line-{number}"
        try:
            pieces = line.pieces(number)
        except ValueError as error:
            raise ConfigError(f"{path}, request {number + 1}: {error}") from error
        starts.setdefault(name, line.timestamp / 1e3)
        turn = Turn(pieces, max(1, line.output_length), line.delay / 1e3 if name in sessions else 0.0)
        sessions.setdefault(name, []).append(turn)
    first = min(starts.values(), default=0.0)
    for name in sorted(sessions, key=starts.__getitem__):
        yield Conversation(name, starts[name] - first, tuple(sessions[name]))
