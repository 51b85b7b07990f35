"""Check of a simulated worker's connections to its peers."""

from typing import TYPE_CHECKING

from splitserve.decode.peers import PeerState
from splitserve.engine.effects import Connect, Dial, Disconnect, HangUp
from splitserve.simulation.worker.parts import sink_of

if TYPE_CHECKING:
    from splitserve.simulation.worker.driver import SimWorker


def check_peers(worker: "SimWorker") -> None:
    """Check that connections are those of the peer table, and links those of its peers."""
    peers = sink_of(worker.core).peers.peers()
    num_open = sum(peer.state in (PeerState.CONNECTING, PeerState.READY) for peer in peers)
    connects, disconnects = worker.num_effects[Connect], worker.num_effects[Disconnect]
    assert connects == disconnects + num_open, (
        f"connects don't equal disconnects plus current peers: {connects}, {disconnects}, {num_open}"
    )
    dials, hang_ups = worker.num_effects[Dial], worker.num_effects[HangUp]
    assert dials == hang_ups + len(peers), f"dials don't equal hang-ups plus peers: {dials}, {hang_ups}, {peers}"
