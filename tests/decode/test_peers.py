"""The table of peers, in a decode worker's core: each connection is ended once, and a peer that failed stays failed.

Bugs planted one at a time in it are found by these tests' words.
"""

from collections.abc import Callable

import pytest

from core_driver import DECODE, KEY, PREFILL, Worker, decode_request, of, sent
from peer_scenarios import (
    connecting_peers_fail_quietly,
    each_welcome_connects,
    failed_peers_fail_again,
    forgotten_peers_keep_their_socket,
    gone_peers_are_dropped_at_once,
    gone_peers_stay,
    late_connections_revive,
    ready_peers_make_no_room,
    replaced_peers_return,
    revoked_losses_count,
    used_peers_make_room,
)
from planted import Plant
from splitserve.decode.peers import PeerState, PeerTable
from splitserve.engine.effects import Connect, Dial, Disconnect, Effect, HangUp, Send
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.messages.envelope import Body
from splitserve.protocol.messages.handover import PeerHello, PeerRefused
from splitserve.protocol.messages.requests import Abort, Introduce, PeerGone, PeerRef, RequestFailed
from splitserve.protocol.request import Party, RequestKey, Role
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

    def connect(self, party: Party = PREFILL) -> None:
        """Introduce a peer that answers."""
        self.introduce(party)
        self.welcome(party)
        self.connected(party)

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


def a_lost_peer_is_dropped_and_connected_anew(decode: Decode) -> None:
    decode.connect()
    decode.hear(PeerGone(YOUNGER), ROUTER)
    assert decode.state() is PeerState.READY, "the loss of another incarnation ended a connection"
    decode.hear(PeerGone(PREFILL), ROUTER)
    assert decode.state() is None, "the router has lost a peer, and its connection stays"
    assert (decode.count(Disconnect), decode.count(HangUp)) == (1, 1)
    assert decode.worker.core.load().peers_ready == 0 and decode.worker.core.links() == []
    decode.connect()
    assert decode.state() is PeerState.READY, "a peer that is back isn't connected anew"
    decode.check()


def a_lost_peer_is_kept_while_a_request_reads_from_it(decode: Decode) -> None:
    decode.connect()
    decode.hear(decode_request(), ROUTER)
    decode.hear(PeerGone(PREFILL), ROUTER)
    assert decode.state() is PeerState.READY, "a router's error broke a hand-over"
    decode.hear(Abort(KEY), ROUTER)
    assert decode.state() is None, "the last request is over, and the connection to a lost peer stays"
    decode.check()


def an_introduction_revokes_a_loss(decode: Decode) -> None:
    decode.connect()
    decode.hear(decode_request(), ROUTER)
    decode.hear(PeerGone(PREFILL), Party("router-b", 9))
    decode.introduce()
    decode.hear(Abort(KEY), ROUTER)
    assert decode.state() is PeerState.READY, "a peer was dropped though it was introduced again"


def a_full_table_drops_the_least_recently_named_peer(decode: Decode) -> None:
    """But none that a request reads from."""
    parties = [Party(f"prefill-{number}", 1) for number in range(PROTOCOL.max_peers + 1)]
    for party in parties[:-1]:
        decode.connect(party)
    decode.hear(decode_request(prefill=parties[0]), ROUTER)
    for party in parties[2:-1]:
        decode.introduce(party)
    decode.connect(parties[-1])
    assert decode.state(parties[-1]) is PeerState.READY, "there is no room for one more peer"
    assert decode.state(parties[0]) is PeerState.READY, "a peer was dropped that a request reads from"
    assert decode.state(parties[1]) is None
    decode.check()


def a_replaced_incarnation_takes_no_place(decode: Decode) -> None:
    """A router that doesn't know of the restart yet names it: only its own request fails."""
    decode.connect()
    decode.connect(YOUNGER)
    decode.hear(decode_request(prefill=YOUNGER), ROUTER)
    late = RequestKey("late", 0)
    effects = decode.worker.hear(Party("router-b", 9), decode_request(late, prefill=PREFILL))
    assert decode.state(YOUNGER) is PeerState.READY, "a replaced incarnation took its successor's place"
    failures = [failed.key for failed in sent(effects, RequestFailed) if isinstance(failed, RequestFailed)]
    assert failures == [late], f"not only the late request failed: {failures}"
    decode.hear(Abort(KEY), ROUTER)
    decode.effects += decode.worker.wait(PROTOCOL.tombstone_seconds)
    decode.introduce()
    assert decode.state() is PeerState.GREETED, "a replaced incarnation is refused for ever"
    decode.check()


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
    gone_peers_stay: (a_lost_peer_is_dropped_and_connected_anew, "its connection stays"),
    gone_peers_are_dropped_at_once: (a_lost_peer_is_kept_while_a_request_reads_from_it, "broke a hand-over"),
    revoked_losses_count: (an_introduction_revokes_a_loss, "though it was introduced again"),
    ready_peers_make_no_room: (a_full_table_drops_the_least_recently_named_peer, "no room for one more"),
    used_peers_make_room: (a_full_table_drops_the_least_recently_named_peer, "that a request reads from"),
    replaced_peers_return: (a_replaced_incarnation_takes_no_place, "took its successor's place"),
}


@pytest.mark.parametrize("scenario", dict.fromkeys(scenario for scenario, _ in PLANTS.values()))
def test_peers(scenario: Callable[[Decode], None]) -> None:
    scenario(Decode())


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    scenario, words = PLANTS[plant]
    with pytest.raises(AssertionError) as failure:
        scenario(Decode())
    assert words in str(failure.value), f"found by another check: {failure.value}"
