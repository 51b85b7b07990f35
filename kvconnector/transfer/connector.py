"""Interface of a KV connector: read blocks from peers, let peers read from this worker. Nothing else.

A connector executes; it decides nothing. It reads data first and generations after, and returns both: the protocol
decides whether the bytes can be trusted (:mod:`splitserve.protocol.handover`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from splitserve.protocol.handover.reads import ReadCommand, Readers, ReadResult
from splitserve.protocol.memory_records import RankMemory
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party


@dataclass(frozen=True, slots=True)
class Link:
    """Connection to a peer, as measured while connecting."""

    transport: str  # in UCX's terms: cuda_ipc, cma, tcp
    bytes_per_second: float  # of one thread's large read
    problem: str = ""  # reason for an unsatisfactory speed; empty if there is none


class PeerConnected(msgspec.Struct, frozen=True, tag=True):
    """Outcome of :meth:`KVConnector.connect`; ``error`` is None on success."""

    peer: Party
    error: str | None
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class ServedMemory:
    """Memory that peers may read, as they need to know it; sent in :class:`PeerWelcome`."""

    connector: str
    generations_addresses: Sequence[int]  # by group of the cache
    ranks: Sequence[RankMemory]  # in the order of their heads


class KVConnector(Protocol):
    """KV connector. Thread-safe; no method blocks on a peer. :meth:`events` returns events after ``wake`` was
    called."""

    name: str
    awaits_beside_steps: bool  # awaited reads need no thread even while the caller runs steps

    def served(self) -> ServedMemory:
        """Return the memory that peers may read."""

    def connect(self, peer: Party, welcome: PeerWelcome) -> None:
        """Prepare reads from ``peer``; ends in a :class:`PeerConnected` event. No event of an earlier attempt to
        connect to ``peer`` follows."""

    def disconnect(self, peer: Party) -> None:
        """Remove ``peer``. Its unfinished reads become terminal: nothing writes to their blocks after their event."""

    def read(self, command: ReadCommand, *, awaited: bool = False) -> None:
        """Start a read; it always ends in one :class:`ReadResult` event, unless the peer is frozen.

        ``awaited``: the caller will call :meth:`is_landing` until that returns False, or :meth:`leave`, or with
        ``awaits_beside_steps`` call :meth:`events` before each step that it plans; a connector may then do without its
        threads."""

    def is_landing(self) -> bool:
        """Go on with the awaited reads; return whether one is about to end, so that a caller without anything else to
        do isn't to sleep."""

    def leave(self) -> None:
        """Await no reads any more: the caller has something to do. They end like others."""

    def serve(self, readers: Readers) -> None:
        """Set what peers may be doing here: their reads and connections advance accordingly."""

    def events(self) -> list[ReadResult | PeerConnected]:
        """Return the events since the last call."""

    def close(self) -> None:
        """Release everything; unfinished reads end."""
