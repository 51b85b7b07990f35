"""The table of peers, in a decode worker's core: each connection is ended once, and a peer that failed stays failed.

Bugs planted one at a time in it are found by these tests' words.
"""

from collections.abc import Callable

import pytest

from core_driver import DECODE, PREFILL, Worker, of
from peer_scenarios import (
    connecting_peers_fail_quietly,
    each_welcome_connects,
    failed_peers_fail_again,
    forgotten_peers_keep_their_socket,
    late_connections_revive,
)
from planted import Plant
from splitserve.decode.peers import PeerState, PeerTable
from splitserve.engine.effects import Connect, Dial, Disconnect, Effect, HangUp, Send
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.handover import PeerHello, PeerRefused
from splitserve.protocol.messages.requests import Introduce, PeerRef
from splitserve.protocol.request import Party, Role
from splitserve.simulation.model import PROTOCOL, ROUTER
from splitserve.simulation.worker.connector import SimConnector
from splitserve.simulation.worker.parts import sink_of

YOUNGER = Party(PREFILL.engine_id, PREFILL.incarnation + 1)


class Decode:
    """A decode worker's core, with all effects that its table of peers ever had."""

    def __init__(self) -> None:
        self.worker = Worker(Role.DECODE, DECODE)
        self.table = sink_of(self.worker.core).peers
        self.effects: list[Effect] = []

    def hear(self, body: Body, sender: Party = PREFILL) -> None:
        self.effects += self.worker.hear(sender, body)

    def introduce(self, party: Party = PREFILL) -> None:
        self.hear(Introduce(PeerRef(party, "tcp://somewhere")), ROUTER)

    def welcome(self, party: Party = PREFILL) -> None:
        self.hear(SimConnector(party, 32).welcome(), party)

    def connected(self, party: Party = PREFILL) -> None:
        self.effects += self.worker.event(PeerConnected(party, None))

    def state(self, party: Party = PREFILL) -> PeerState | None:
        peer = self.table.get(party)
        return None if peer is None else peer.state

    def count(self, kind: type) -> int:
        return len(of(self.effects, kind))

    def check(self) -> None:
        """Connections that were asked for are those that are left and those that were ended; likewise sockets."""
        num_open = sum(peer.state in (PeerState.CONNECTING, PeerState.READY) for peer in self.table.peers())
        counts = self.count(Connect), self.count(Disconnect)
        assert counts[0] == counts[1] + num_open, f"connects don't equal disconnects plus peers: {counts}, {num_open}"
        counts = self.count(Dial), self.count(HangUp)
        assert counts[0] == counts[1] + len(self.table), f"dials don't equal hang-ups plus peers: {counts}"


def a_failed_peer_stays_failed(decode: Decode) -> None:
    decode.introduce()
    decode.welcome()
    decode.hear(PeerRefused("planted"))
    assert decode.state() is PeerState.FAILED
    decode.connected()
    assert decode.state() is PeerState.FAILED, "a late connection revived a failed peer"
    assert decode.table.num_ready == 0


def a_connecting_peer_that_fails_is_disconnected(decode: Decode) -> None:
    decode.introduce()
    decode.welcome()
    decode.hear(PeerRefused("planted"))
    assert decode.count(Disconnect) == 1, "a connecting peer failed, and its connection goes on"


def a_peer_that_fails_twice_is_disconnected_once(decode: Decode) -> None:
    decode.introduce()
    decode.welcome()
    decode.connected()
    decode.hear(PeerRefused("planted"))
    decode.hear(PeerRefused("planted"))
    decode.check()


def a_repeated_welcome_connects_once(decode: Decode) -> None:
    decode.introduce()
    decode.welcome()
    decode.welcome()
    decode.connected()
    decode.welcome()
    assert decode.count(Connect) == 1, f"{decode.count(Connect)} connects for one peer"
    decode.check()


def a_new_incarnation_takes_the_old_ones_place(decode: Decode) -> None:
    decode.introduce()
    decode.welcome()
    decode.connected()
    decode.introduce(YOUNGER)
    assert decode.state(PREFILL) is None, "the old incarnation is still a peer"
    decode.welcome(YOUNGER)
    decode.connected(YOUNGER)
    decode.check()
    assert decode.state(YOUNGER) is PeerState.READY


def an_old_reads_error_spares_the_next_connection(decode: Decode) -> None:
    """It ends reads of the broken connection, after the next one was asked for."""
    decode.introduce()
    decode.welcome()
    decode.connected()
    decode.table.fail(PREFILL, "a read missed its deadline")
    decode.introduce()
    decode.table.on_read_ended(PREFILL, "disconnected")
    decode.welcome()
    decode.table.on_read_ended(PREFILL, "disconnected")
    assert decode.state() is PeerState.CONNECTING, "an error of an old read broke the next connection"


def a_silent_peer_is_greeted_again(decode: Decode) -> None:
    decode.introduce()
    decode.effects += decode.worker.wait(3 * PROTOCOL.offer_resend_seconds)
    hellos = [effect for effect in of(decode.effects, Send) if isinstance(effect, Send)]
    num_hellos = sum(isinstance(effect.body, PeerHello) for effect in hellos)
    assert num_hellos > 2, f"a peer that doesn't answer was greeted {num_hellos} times"


# ---- bugs ----


def old_errors_break_new_connections(patch: pytest.MonkeyPatch) -> None:
    def on_read_ended(self: PeerTable, party: Party, error: str | None) -> None:
        if error is not None:
            self.fail(party, f"a read from it failed: {error}")

    patch.setattr(PeerTable, "on_read_ended", on_read_ended)


def greeted_once(patch: pytest.MonkeyPatch) -> None:
    original = PeerTable.poll

    def poll(self: PeerTable, now: float) -> None:
        original(self, now)
        for peer in self.peers():
            peer.hello_due_at = float("inf")

    patch.setattr(PeerTable, "poll", poll)


PLANTS: dict[Plant, tuple[Callable[[Decode], None], str]] = {
    late_connections_revive: (a_failed_peer_stays_failed, "revived a failed peer"),
    connecting_peers_fail_quietly: (a_connecting_peer_that_fails_is_disconnected, "its connection goes on"),
    failed_peers_fail_again: (a_peer_that_fails_twice_is_disconnected_once, "connects don't equal disconnects"),
    each_welcome_connects: (a_repeated_welcome_connects_once, "connects for one peer"),
    forgotten_peers_keep_their_socket: (a_new_incarnation_takes_the_old_ones_place, "dials don't equal hang-ups"),
    old_errors_break_new_connections: (an_old_reads_error_spares_the_next_connection, "an error of an old read"),
    greeted_once: (a_silent_peer_is_greeted_again, "was greeted 1 times"),
}


@pytest.mark.parametrize("scenario", [scenario for scenario, _ in PLANTS.values()])
def test_peers(scenario: Callable[[Decode], None]) -> None:
    scenario(Decode())


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    scenario, words = PLANTS[plant]
    with pytest.raises(AssertionError) as failure:
        scenario(Decode())
    assert words in str(failure.value), f"found by another check: {failure.value}"
