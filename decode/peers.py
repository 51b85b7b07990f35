"""The workers that a worker pulls KV from: greeting, matching layouts, connecting. No I/O."""

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum

from splitserve.common.bounded import ExpiringMap
from splitserve.engine.effects import Connect, Dial, Disconnect, HangUp
from splitserve.engine.state import EngineState
from splitserve.kvconnector.transfer.connector import Link, PeerConnected
from splitserve.kvconnector.transfer.read_plan import num_readable_blocks
from splitserve.kvconnector.transfer.welcome_check import problem_with_memory
from splitserve.protocol.messages.handover import PeerHello, PeerRefused, PeerWelcome
from splitserve.protocol.messages.membership import PeerLink
from splitserve.protocol.messages.requests import PeerRef
from splitserve.protocol.request import Party


class PeerState(Enum):
    GREETED = "greeted"  # PeerHello is out
    CONNECTING = "connecting"  # welcome; the connector prepares reads
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True)
class Peer:
    ref: PeerRef
    state: PeerState
    hello_due_at: float
    give_up_at: float
    num_blocks: Sequence[int] = ()  # by group, as far as they can be read
    has_host_tier: bool = False
    failure: str = ""
    link: Link | None = None
    prefix_blocks: int = 0  # of prompts' prefixes that were read from it


class PeerTable:
    """Peers by party, so that a new incarnation is a new peer. The old one of the same engine is forgotten.

    ``in_use`` returns the peers that a request reads from, or is to read from.
    """

    def __init__(self, state: EngineState, connector: str, in_use: Callable[[], Container[Party]]) -> None:
        self._state = state
        self._connector = connector
        self._in_use = in_use
        self._peers: dict[Party, Peer] = {}  # the one that was named least recently first
        self._gone: dict[Party, None] = {}  # peers that are forgotten once they aren't in use
        self._successors: ExpiringMap[Party, Party] = ExpiringMap(  # of incarnations that were replaced
            max_size=state.protocol.max_peers, ttl_seconds=state.protocol.tombstone_seconds
        )
        self._awaited: dict[Party, Peer] = {}  # those whose welcome is out, and some of which have come since

    @property
    def num_ready(self) -> int:
        """Peers that reads can start from at once."""
        return sum(peer.state is PeerState.READY for peer in self._peers.values())

    def links(self) -> list[PeerLink]:
        """The links to peers that reads can start from at once, and to peers that can't be read from."""
        links = []
        for party, peer in self._peers.items():
            if peer.state is PeerState.READY and peer.link is not None:
                link = PeerLink(
                    party.engine_id,
                    peer.link.transport,
                    peer.link.bytes_per_second,
                    peer.link.problem,
                    peer.prefix_blocks,
                    party.incarnation,
                )
                links.append(link)
            elif peer.state is PeerState.FAILED:
                links.append(PeerLink(party.engine_id, "", 0.0, peer.failure, incarnation=party.incarnation))
        return links

    def transport(self, party: Party) -> str:
        """Return the transport of KV from ``party``, like ``nixl/cma``; the connector's name if it isn't known."""
        peer = self._peers.get(party)
        return self._connector if peer is None or peer.link is None else f"{self._connector}/{peer.link.transport}"

    def note_prefix(self, party: Party, num_blocks: int) -> None:
        """Count blocks of a prefix that were read from a peer."""
        peer = self._peers.get(party)
        if peer is not None:
            peer.prefix_blocks += num_blocks
            self._note_use(party)

    def get(self, party: Party) -> Peer | None:
        return self._peers.get(party)

    def peers(self) -> list[Peer]:
        return list(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)

    def introduce(self, ref: PeerRef, now: float) -> None:
        """Record the peer; greet it if it is new, or if it failed before.

        If there is no room left, or if a newer incarnation is known, the peer stays unknown, and hand-overs from it
        fail.
        """
        self._gone.pop(ref.party, None)
        known = self._peers.get(ref.party)
        if known is not None and known.state is not PeerState.FAILED:
            self._note_use(ref.party)
            return
        incarnations = [party for party in self._peers if party.engine_id == ref.party.engine_id]
        if known is None and incarnations and self._successors.get(ref.party, now) is not None:
            return  # a router that doesn't know of the restart yet has named the old one
        for party in incarnations:
            self.forget(party)
            if party != ref.party:
                self._successors.put(party, ref.party, now)
        if not self._has_room():
            return
        give_up_at = now + self._state.protocol.dead_after_seconds
        peer = Peer(ref, PeerState.GREETED, hello_due_at=now, give_up_at=give_up_at)
        self._peers[ref.party] = self._awaited[ref.party] = peer
        self._state.outbox.put(Dial(ref))
        self.poll(now)

    def on_welcome(self, welcome: PeerWelcome, sender: Party, now: float) -> None:
        del now
        peer = self._peers.get(sender)
        if peer is None or peer.state is not PeerState.GREETED:
            return
        problem = self._problem_with(welcome)
        if problem:
            self.fail(sender, problem)
            return
        peer.state = PeerState.CONNECTING
        peer.num_blocks = num_readable_blocks(welcome)
        peer.has_host_tier = welcome.ranks[0].host is not None
        self._state.outbox.put(Connect(sender, welcome))

    def on_refused(self, refused: PeerRefused, sender: Party, now: float) -> None:
        del now
        if sender in self._peers:
            self.fail(sender, f"refused: {refused.reason}")

    def on_connected(self, event: PeerConnected) -> None:
        peer = self._peers.get(event.peer)
        if peer is None or peer.state is not PeerState.CONNECTING:
            return
        if event.error is None:
            peer.state, peer.link = PeerState.READY, event.link
        else:
            self.fail(event.peer, f"the connector couldn't connect: {event.error}")

    def on_read_ended(self, party: Party, error: str | None) -> None:
        """Drop the connection after an error, and with it all reads in flight: the next request makes a new one.

        Reads that ended because of a disconnect are reported before a new connection is ready, and don't break it.
        """
        peer = self._peers.get(party)
        if error is not None and peer is not None and peer.state is PeerState.READY:
            self.fail(party, f"a read from it failed: {error}")

    def fail(self, party: Party, reason: str) -> None:
        """Reads from this peer end; its next request greets it anew. No effect on one that failed or was forgotten."""
        peer = self._peers.get(party)
        if peer is not None and peer.state is not PeerState.FAILED:
            if peer.state in (PeerState.CONNECTING, PeerState.READY):
                self._state.outbox.put(Disconnect(party))
            peer.state, peer.failure = PeerState.FAILED, reason

    def forget(self, party: Party) -> None:
        self.fail(party, "forgotten")
        del self._peers[party]
        self._awaited.pop(party, None)
        self._gone.pop(party, None)
        self._state.outbox.put(HangUp(party))

    def on_gone(self, party: Party) -> None:
        """Take note that a router has lost a peer. The router may be wrong, so requests that read from it go on, and a
        new introduction revokes this."""
        if party in self._peers:
            self._gone[party] = None

    def drop_gone(self) -> None:
        """Forget the peers that are gone, except for those in use."""
        if self._gone:
            in_use = self._in_use()
            for party in [party for party in self._gone if party not in in_use]:
                self.forget(party)
                self._state.has_news = True

    def poll(self, now: float) -> None:
        """Greet again where no answer came, for a while."""
        for party, peer in list(self._awaited.items()):
            if peer.state is not PeerState.GREETED:
                del self._awaited[party]
            elif now >= peer.give_up_at:
                self.fail(party, "it doesn't answer")
            elif now >= peer.hello_due_at:
                peer.hello_due_at = now + self._state.protocol.offer_resend_seconds
                self._state.outbox.send(party, PeerHello(layout=self._state.layout))

    def next_deadline(self) -> float:
        if not self._awaited:
            return float("inf")
        due = (
            min(peer.hello_due_at, peer.give_up_at)
            for peer in self._awaited.values()
            if peer.state is PeerState.GREETED
        )
        return min(due, default=float("inf"))

    def check_invariants(self) -> None:
        """Raise AssertionError unless each engine has one incarnation here, and the table its bound."""
        names = [party.engine_id for party in self._peers]
        assert len(set(names)) == len(names), "two incarnations of one engine are peers"
        assert len(names) <= self._state.protocol.max_peers, f"{len(names)} peers are known, more than allowed"
        assert self._gone.keys() <= self._peers.keys(), "peers are to be dropped that aren't known"

    def _note_use(self, party: Party) -> None:
        self._peers[party] = self._peers.pop(party)

    def _has_room(self) -> bool:
        """Return whether one more peer can be kept, if need be in place of one that failed, or else of one that is
        ready and not in use: of these the least recently named one."""
        if len(self._peers) >= self._state.protocol.max_peers:
            in_use = self._in_use()
            failed = (party for party, peer in self._peers.items() if peer.state is PeerState.FAILED)
            ready = (party for party, peer in self._peers.items() if peer.state is PeerState.READY)
            idle = (party for party in ready if party not in in_use)
            if (oldest := next(itertools.chain(failed, idle), None)) is not None:
                self.forget(oldest)
        return len(self._peers) < self._state.protocol.max_peers

    def _problem_with(self, welcome: PeerWelcome) -> str | None:
        difference = self._state.layout.mismatch(welcome.layout)
        if difference:
            return f"its KV differs in {difference}"
        if welcome.connector != self._connector:
            return f"its connector is {welcome.connector!r}, ours {self._connector!r}"
        return problem_with_memory(welcome)
