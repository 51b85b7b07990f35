"""What a worker needs of a KV connector: read blocks from peers, let peers read from here. Nothing else.

A connector carries out; it decides nothing. It reads data first and generations after, and hands both facts up:
whether the bytes can be trusted is the protocol's judgement (:mod:`splitserve.protocol.handover`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.memory_records import RankMemory
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party


@dataclass(frozen=True, slots=True)
class Link:
    """How reads from a peer travel, as found out while connecting.

    ``transport`` in UCX's words (``cuda_ipc``, ``cma``, ``tcp``), ``bytes_per_second`` of one thread's large read;
    ``problem`` says why that isn't as it should be, and is empty if it is.
    """

    transport: str
    bytes_per_second: float
    problem: str = ""


class PeerConnected(msgspec.Struct, frozen=True, tag=True):
    """Outcome of :meth:`KVConnector.connect`; ``error`` is None on success."""

    peer: Party
    error: str | None
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class ServedMemory:
    """What peers need to read from here; travels in :class:`PeerWelcome`. ``ranks`` are in the order of their heads."""

    connector: str
    generations_address: int
    ranks: Sequence[RankMemory]


class KVConnector(Protocol):
    """Thread-safe; no method blocks on a peer. Events are handed out by :meth:`events` after ``wake`` was called."""

    name: str

    def served(self) -> ServedMemory:
        """The memory that peers may read."""

    def connect(self, peer: Party, welcome: PeerWelcome) -> None:
        """Prepare reads from ``peer``; ends in a :class:`PeerConnected` event."""

    def disconnect(self, peer: Party) -> None:
        """Forget ``peer``. Its unfinished reads become terminal: nothing writes to their blocks after their event."""

    def read(self, command: ReadCommand) -> None:
        """Start a read; it always ends in one :class:`ReadResult` event, unless the peer is frozen."""

    def serve(self, active: bool) -> None:
        """Whether peers may be reading from here: only then is progress made for them."""

    def events(self) -> list[ReadResult | PeerConnected]:
        """Events since the last call."""

    def close(self) -> None:
        """Release everything; unfinished reads are over."""
