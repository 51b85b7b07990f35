"""Marks of a request's progress in a worker, which travel with its tokens, and the bounded list that collects them."""

from enum import StrEnum

import msgspec

from splitserve.protocol.wire_numbers import Count, Seconds

MAX_MARKS = 64
MAX_CHUNK_MARKS = 48  # among them; further chunks extend the last one


class MarkKind(StrEnum):
    """The event at a mark's time."""

    ACCEPTED = "accepted"  # the worker has taken the request
    ASKED = "asked"  # a late grant: the prompt's turn has come at prefill; decode was asked for room
    GRANTED = "granted"  # decode has reserved room and asked for the KV; prefill has received that grant
    PREFIX = "prefix"  # the prefix that a peer had was read, or is not to be had
    BEGUN = "begun"  # the request's first step here was launched
    CHUNK = "chunk"  # a chunk of the prompt was computed; its amount is in tokens
    READING = "reading"  # the first read of the hand-over was posted
    OFFERED = "offered"  # the last offer arrived
    POSTED = "posted"  # the last read was posted
    READ = "read"  # its bytes had arrived
    VERIFIED = "verified"  # every block was verified
    DRAWN = "drawn"  # the request's first token here was drawn
    SECOND = "second"  # prefill has drawn the second token, too


class Mark(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """An event of a request in a worker, ``at`` seconds of the worker's own monotonic clock."""

    kind: MarkKind
    at: Seconds
    amount: Count = 0


class MarkList:
    """Marks of a sequence since the last message about it: at most ``MAX_MARKS``."""

    __slots__ = ("_marks", "_num_chunks", "has_begun")

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._num_chunks = 0
        self.has_begun = False  # a step with the sequence was launched

    def add(self, kind: MarkKind, at: float, amount: int = 0) -> None:
        if len(self._marks) < MAX_MARKS:
            self._marks.append(Mark(kind, at, amount))

    def begin(self, at: float) -> None:
        """Mark the launch of the first step; later ones have no effect."""
        if not self.has_begun:
            self.has_begun = True
            self.add(MarkKind.BEGUN, at)

    def add_chunk(self, at: float, num_tokens: int) -> None:
        """Mark a computed chunk of the prompt."""
        last = self._marks[-1] if self._marks else None
        if self._num_chunks >= MAX_CHUNK_MARKS and last is not None and last.kind is MarkKind.CHUNK:
            self._marks[-1] = Mark(MarkKind.CHUNK, at, last.amount + num_tokens)
        else:
            self._num_chunks += 1
            self.add(MarkKind.CHUNK, at, num_tokens)

    def take(self) -> list[Mark]:
        """Return the marks so far, and begin anew."""
        marks, self._marks = self._marks, []
        self.has_begun = False
        return marks
