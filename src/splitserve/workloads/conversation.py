"""A workload's parts: conversations of turns, whose prompts are made of pieces."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple


class Piece(NamedTuple):
    """A run of prompt tokens; pieces of one workload with the same name have the same tokens."""

    name: str
    num_tokens: int

    def token_ids(self, vocabulary: Sequence[int], seed: int) -> list[int]:
        """Return the piece's tokens, drawn from ``vocabulary``: the same ones for the same seed and name."""
        return Random(f"{seed} {self.name}").choices(vocabulary, k=self.num_tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation. Its prompt is that of the turn before, the answer to it, and ``pieces``."""

    pieces: tuple[Piece, ...]
    num_output_tokens: int
    think_seconds: float = 0.0  # from the end of the answer before until this turn is sent

    @property
    def num_new_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other; ``start_seconds`` is the arrival of the first one, from the load's start."""

    name: str
    start_seconds: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations in the order of their arrival."""

    name: str
    conversations: tuple[Conversation, ...] = field(repr=False)

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def num_output_tokens(self) -> int:
        return sum(turn.num_output_tokens for turn in self.turns())

    def turns(self) -> Iterable[Turn]:
        """Yield the turns of all conversations, one conversation after the other."""
        for conversation in self.conversations:
            yield from conversation.turns

    def longest_context(self) -> int:
        """Return the number of tokens that the longest conversation has at its end."""
        return max(
            (sum(t.num_new_tokens + t.num_output_tokens for t in c.turns) for c in self.conversations), default=0
        )
