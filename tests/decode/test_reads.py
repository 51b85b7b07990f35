"""Reads in flight: a result goes to the hand-over that waits for it; blocks of one that is over stay in quarantine."""

import pytest

from core_driver import DECODE, NUM_BLOCKS, PREFILL, Worker
from scheduled_sequences import make_sequence
from splitserve.decode.incoming import Incoming
from splitserve.decode.peers import PeerState
from splitserve.decode.reads import ReadsInFlight
from splitserve.engine.effects import Disconnect, StartRead
from splitserve.engine.stage import Stage
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.handover.pull import Pull, PullSpan
from splitserve.protocol.handover.reads import ReadCommand, ReadPath, ReadResult
from splitserve.protocol.handover.sink import SinkHandover
from splitserve.protocol.messages.handover import Offer, OfferedBlock, OfferedSpan
from splitserve.protocol.messages.requests import Introduce, PeerRef
from splitserve.protocol.request import Role
from splitserve.simulation.model import PROTOCOL, ROUTER
from splitserve.simulation.worker.connector import SimConnector
from splitserve.simulation.worker.parts import sink_of

NUM_TOKENS = 8


class Reading:
    """Reads in flight of a worker that knows one peer, and a hand-over from that, which has begun a read."""

    def __init__(self) -> None:
        worker = Worker(Role.DECODE, DECODE)
        worker.hear(ROUTER, Introduce(PeerRef(PREFILL, "tcp://prefill-0")))
        worker.hear(PREFILL, SimConnector(PREFILL, NUM_BLOCKS).welcome())
        worker.event(PeerConnected(PREFILL, None))
        self.state, self.peers = worker.core.state, sink_of(worker.core).peers
        self.reads = ReadsInFlight(self.state, self.peers)
        self.first = self.begin("a")

    def begin(self, name: str) -> ReadCommand:
        """Start the read of a new request's two blocks."""
        sequence = make_sequence(name, NUM_TOKENS)
        sequence.enter(Stage.UNADMITTED)
        assert self.state.blocks.reserve(sequence)
        sequence.enter(Stage.PULLING)
        pull = Pull(NUM_TOKENS, 0, self.state.blocks.block_size, [PullSpan(0, sequence.block_ids, 1)])
        self.incoming = Incoming(sequence, PREFILL)
        self.incoming.handover = handover = SinkHandover(sequence.key, PREFILL, pull, PROTOCOL, 0.0)
        blocks = [OfferedBlock(block_id, 100) for block_id in range(2)]
        handover.on_offer(Offer(sequence.key, [OfferedSpan(0, 0, blocks)], NUM_TOKENS, False), [NUM_BLOCKS], 0.0)
        [read] = handover.poll(0.0, can_read=True, next_read_id=self.reads.next_id).reads
        self.reads.start(read, self.incoming)
        return read

    def states(self, read: ReadCommand) -> set[BlockState]:
        return {self.state.blocks.pool.state(block_id) for block_id in read.local_blocks}

    def abandon(self) -> None:
        self.reads.abandon(self.incoming)
        self.state.blocks.give_back(self.incoming.sequence)


@pytest.fixture
def reading() -> Reading:
    return Reading()


def test_the_result_of_a_read_goes_to_its_handover(reading: Reading) -> None:
    first, waits_for_first = reading.first, reading.incoming
    second = reading.begin("b")
    reading.reads.check_invariants([waits_for_first, reading.incoming])
    assert reading.reads.owner(first.read_id) is waits_for_first
    assert len(reading.reads) == 2 and first.read_id != second.read_id
    assert [effect.command for effect in reading.state.outbox.take() if isinstance(effect, StartRead)] == [
        first,
        second,
    ]
    assert reading.reads.end(ReadResult(second.read_id, None, path=ReadPath.STAGED)) is reading.incoming
    assert reading.reads.end(ReadResult(first.read_id, None)) is waits_for_first
    assert len(reading.reads) == 0


def test_blocks_of_an_abandoned_read_stay_in_quarantine_until_it_is_terminal(reading: Reading) -> None:
    reading.abandon()
    assert reading.states(reading.first) == {BlockState.QUARANTINED}
    assert not reading.incoming.sequence.block_ids and len(reading.reads) == 1
    reading.reads.check_invariants([])
    assert reading.reads.end(ReadResult(reading.first.read_id, None)) is None
    assert reading.states(reading.first) == {BlockState.FREE} and len(reading.reads) == 0


def test_an_abandoned_read_past_its_deadline_fails_its_peer_once(reading: Reading) -> None:
    assert reading.reads.next_deadline() == float("inf"), "its hand-over looks after it"
    reading.abandon()
    deadline = reading.reads.next_deadline()
    assert deadline == pytest.approx(PROTOCOL.read_deadline_seconds, abs=0.01)
    reading.reads.poll(deadline - 0.1)
    assert (peer := reading.peers.get(PREFILL)) is not None and peer.state is PeerState.READY
    reading.reads.poll(deadline)
    assert peer.state is PeerState.FAILED
    reading.reads.poll(deadline + 1.0)
    assert reading.state.outbox.take().count(Disconnect(PREFILL)) == 1
    assert reading.reads.next_deadline() == float("inf")
    assert reading.states(reading.first) == {BlockState.QUARANTINED}, "the read may still write"


def test_a_failed_read_of_either_kind_drops_the_connection(reading: Reading) -> None:
    reading.abandon()
    reading.begin("b")
    reading.reads.end(ReadResult(reading.first.read_id, "reset by peer"))
    assert (peer := reading.peers.get(PREFILL)) is not None and peer.state is PeerState.FAILED


def test_reads_that_none_accounts_for_are_noticed(reading: Reading) -> None:
    with pytest.raises(AssertionError, match="aren't those of the hand-overs"):
        reading.reads.check_invariants([])
    reading.abandon()
    reading.state.blocks.pool.lift_quarantine(reading.first.local_blocks)
    with pytest.raises(AssertionError, match="aren't quarantined"):
        reading.reads.check_invariants([])
