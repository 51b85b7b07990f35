"""Reads in flight of hand-overs, and those that outlive theirs: their blocks stay in quarantine. No I/O."""

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from splitserve.decode.incoming import Incoming
from splitserve.decode.peers import PeerTable
from splitserve.engine.effects import StartRead
from splitserve.engine.state import EngineState
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.request import Party


@dataclass(slots=True)
class QuarantinedRead:
    """A read whose request is over, but which may still write to its blocks."""

    peer: Party
    group: int  # of the blocks
    local_blocks: ListLike[int]
    deadline: float


class ReadsInFlight:
    """Every read that was started and isn't terminal, by its ID: a posted read cannot be cancelled.

    Each is waited for by its hand-over, or, once that is over, keeps its local blocks in quarantine.
    """

    def __init__(self, state: EngineState, peers: PeerTable) -> None:
        self._state = state
        self._peers = peers
        self._waited_for: dict[int, Incoming] = {}
        self._quarantined: dict[int, QuarantinedRead] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._waited_for) + len(self._quarantined)

    @property
    def next_id(self) -> int:
        """The ID of the next read that is started; those of reads that start with it follow."""
        return self._next_id

    def owner(self, read_id: int) -> Incoming | None:
        """Return whose hand-over waits for a read; None if it is over, or the read is terminal."""
        return self._waited_for.get(read_id)

    def start(self, read: ReadCommand, incoming: Incoming) -> None:
        """Start a read of a hand-over, which waits for its result."""
        self._waited_for[read.read_id] = incoming
        self._next_id = read.read_id + 1
        self._state.outbox.put(StartRead(read))

    def end(self, result: ReadResult) -> Incoming | None:
        """Forget a read that is terminal; return whose hand-over waited for it.

        If that is over, the read's local blocks leave their quarantine, and None is returned.
        """
        quarantined = self._quarantined.pop(result.read_id, None)
        if quarantined is not None:
            self._peers.on_read_ended(quarantined.peer, result.error)
            self._state.blocks.pools[quarantined.group].lift_quarantine(quarantined.local_blocks)
            return None
        if result.error is None:
            self._state.counters.count_read(result.path)
        incoming = self._waited_for.pop(result.read_id)
        self._peers.on_read_ended(incoming.peer, result.error)
        return incoming

    def abandon(self, incoming: Incoming) -> None:
        """Put blocks of the sequence that reads may still write to into quarantine: its hand-over is over."""
        assert incoming.handover is not None
        for read_id, read in incoming.handover.reads_in_flight.items():
            del self._waited_for[read_id]
            quarantined = QuarantinedRead(incoming.peer, read.group, read.local_blocks, read.deadline)
            self._quarantined[read_id] = quarantined
            self._state.blocks.quarantine(incoming.sequence, read.group, read.local_blocks)

    def poll(self, now: float) -> None:
        """Fail the peers of abandoned reads that missed their deadline: only that makes these terminal."""
        for read in self._quarantined.values():
            if now >= read.deadline:
                read.deadline = float("inf")  # once: the peer may be greeted anew before the read is terminal
                self._peers.fail(read.peer, "a read missed its deadline")

    def next_deadline(self) -> float:
        """Return when ``poll`` has something to do next, in seconds of the caller's clock."""
        return min((read.deadline for read in self._quarantined.values()), default=float("inf"))

    def check_invariants(self, every_incoming: Iterable[Incoming]) -> None:
        """Raise AssertionError unless each read is waited for by a hand-over that lives or keeps its blocks in
        quarantine."""
        in_flight = {
            read_id: incoming
            for incoming in every_incoming
            for read_id in (incoming.handover.reads_in_flight if incoming.handover else ())
        }
        assert in_flight == self._waited_for, "the reads in flight aren't those of the hand-overs"
        for read_id, read in self._quarantined.items():
            pool = self._state.blocks.pools[read.group]
            states = {pool.state(block_id) for block_id in read.local_blocks}
            assert states <= {BlockState.QUARANTINED}, f"read {read_id} is in flight to blocks that aren't quarantined"
