"""Scenarios of a decode worker's table of peers."""

import pytest

from splitserve.decode.peers import PeerState, PeerTable
from splitserve.decode.sink import SinkSide
from splitserve.engine.effects import HangUp, Outbox
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.messages.requests import PeerRef
from splitserve.protocol.request import Party


def late_connections_revive(patch: pytest.MonkeyPatch) -> None:
    original = PeerTable.on_connected

    def on_connected(self: PeerTable, event: PeerConnected) -> None:
        peer = self.get(event.peer)
        if peer is not None and peer.state is PeerState.FAILED and event.error is None:
            peer.state, peer.link = PeerState.READY, event.link
        original(self, event)

    patch.setattr(PeerTable, "on_connected", on_connected)


def connecting_peers_fail_quietly(patch: pytest.MonkeyPatch) -> None:
    original = PeerTable.fail

    def fail(self: PeerTable, party: Party, reason: str) -> None:
        peer = self.get(party)
        if peer is not None and peer.state is PeerState.CONNECTING:
            peer.state, peer.failure = PeerState.FAILED, reason
        original(self, party, reason)

    patch.setattr(PeerTable, "fail", fail)


def failed_peers_fail_again(patch: pytest.MonkeyPatch) -> None:
    original = PeerTable.fail

    def fail(self: PeerTable, party: Party, reason: str) -> None:
        peer = self.get(party)
        if peer is not None and peer.state is PeerState.FAILED:
            peer.state = PeerState.READY
        original(self, party, reason)

    patch.setattr(PeerTable, "fail", fail)


def each_welcome_connects(patch: pytest.MonkeyPatch) -> None:
    original = PeerTable.on_welcome

    def on_welcome(self: PeerTable, welcome: PeerWelcome, sender: Party, now: float) -> None:
        peer = self.get(sender)
        if peer is not None and peer.state in (PeerState.CONNECTING, PeerState.READY):
            peer.state = PeerState.GREETED
        original(self, welcome, sender, now)

    patch.setattr(PeerTable, "on_welcome", on_welcome)


def forgotten_peers_keep_their_socket(patch: pytest.MonkeyPatch) -> None:
    original = Outbox.put
    patch.setattr(Outbox, "put", lambda self, effect: None if isinstance(effect, HangUp) else original(self, effect))


def gone_peers_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerTable, "drop_gone", lambda _self: None)


def gone_peers_are_dropped_at_once(patch: pytest.MonkeyPatch) -> None:
    def on_gone(self: PeerTable, party: Party) -> None:
        if self.get(party) is not None:
            self.forget(party)

    patch.setattr(PeerTable, "on_gone", on_gone)


def revoked_losses_count(patch: pytest.MonkeyPatch) -> None:
    original = PeerTable.introduce

    def introduce(self: PeerTable, ref: PeerRef, now: float) -> None:
        was_gone = ref.party in self._gone
        original(self, ref, now)
        if was_gone:
            self.on_gone(ref.party)

    patch.setattr(PeerTable, "introduce", introduce)


def ready_peers_make_no_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerTable, "_has_room", lambda self: len(self) < self._state.protocol.max_peers)


def used_peers_make_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SinkSide, "peers_in_use", property(lambda _self: set()))
    patch.setattr(PeerTable, "_note_use", lambda _self, _party: None)


def replaced_peers_return(patch: pytest.MonkeyPatch) -> None:
    original = PeerTable.introduce

    def introduce(self: PeerTable, ref: PeerRef, now: float) -> None:
        self._successors.take_all()
        original(self, ref, now)

    patch.setattr(PeerTable, "introduce", introduce)
