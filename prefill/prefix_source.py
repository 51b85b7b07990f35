"""Prefixes that peers read from here: blocks that are on the device or in the host tier already; nothing is computed.

The same lease, offers and release as those of a hand-over, and the same reader's check of generations.
"""

from splitserve.engine.block_manager import HeldPrefix
from splitserve.engine.state import DRAINING_REASON, EngineState
from splitserve.protocol.handover.source import SourceHandover, SourceState
from splitserve.protocol.messages.handover import Grant, OfferAck, OfferedBlock, PrefixGrant, Release, Withdrawn
from splitserve.protocol.request import Party, RequestKey

NOTHING_HERE = "nothing of the prefix is here"


class PrefixSource:
    """The source of prefixes for peers. ``why_not``: why no peer may read from here, in words; "" if peers may."""

    def __init__(self, state: EngineState, why_not: str = "") -> None:
        self._state = state
        self._why_not = why_not
        self._held: dict[tuple[RequestKey, Party], tuple[SourceHandover, HeldPrefix]] = {}

    def on_grant(self, grant: PrefixGrant, sender: Party, now: float) -> None:
        """Hold what is here, and offer it; a repeated grant renews the lease."""
        known = self._held.get((grant.key, sender))
        if known is not None:
            known[0].renew(now)
            return
        protocol, block_size = self._state.protocol, self._state.blocks.block_size
        why_not = self._why_not
        if self._state.is_draining:
            why_not = DRAINING_REASON
        elif len(self._held) >= protocol.max_requests:
            why_not = f"{len(self._held)} prefixes are being read here already"
        elif not 0 < grant.lease_seconds <= protocol.request_deadline_seconds:
            why_not = f"a lease of {grant.lease_seconds} s can't be"
        held = HeldPrefix() if why_not else self._state.blocks.hold_prefix(grant.hashes)
        if not held.locations:
            self._state.outbox.send(sender, Withdrawn(key=grant.key, reason=why_not or NOTHING_HERE))
            return
        num_tokens = (grant.first_block + len(held.locations)) * block_size
        whole = Grant(grant.key, num_tokens, grant.first_block * block_size, grant.lease_seconds)
        handover = SourceHandover(whole, sender, block_size, protocol, now)
        handover.offer_last([[OfferedBlock(*location) for location in held.locations]], num_tokens, [], now)
        self._held[grant.key, sender] = handover, held

    def on_ack(self, ack: OfferAck, sender: Party) -> bool:
        """Acknowledge offers; return whether ``ack`` belongs to a prefix."""
        known = self._held.get((ack.key, sender))
        if known is not None:
            known[0].acknowledge(ack)
        return known is not None

    def on_release(self, release: Release, sender: Party) -> bool:
        """End a hand-over; return whether ``release`` belongs to a prefix."""
        known = self._held.pop((release.key, sender), None)
        if known is not None:
            known[0].release("complete" if release.complete else "given up by the reader")
            self._state.blocks.give_prefix_back(known[1])
        return known is not None

    def poll(self, now: float) -> None:
        """Send the offers that are due, and end hand-overs whose leases weren't renewed."""
        for holder, (handover, held) in list(self._held.items()):
            offer = handover.poll(now)
            if offer is not None:
                self._state.outbox.send(handover.peer, offer)
            if handover.state is SourceState.RELEASED:
                del self._held[holder]
                self._state.blocks.give_prefix_back(held)
                self._state.outbox.send(handover.peer, Withdrawn(key=handover.key, reason="the lease expired"))

    def next_deadline(self) -> float:
        return min((handover.next_deadline() for handover, _ in self._held.values()), default=float("inf"))

    @property
    def num_live(self) -> int:
        return len(self._held)

    @property
    def num_references(self) -> int:
        """The number of references to device blocks."""
        return sum(len(held.block_ids) for _, held in self._held.values())

    @property
    def num_slots(self) -> int:
        """The number of slots of the host tier that are held."""
        return sum(len(held.slots) for _, held in self._held.values())
