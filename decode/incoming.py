"""Requests whose KV comes from a peer."""

from dataclasses import dataclass

from splitserve.engine.sequence import Sequence
from splitserve.protocol.handover.sink import SinkHandover, SinkState
from splitserve.protocol.request import Party
from splitserve.protocol.step import Draw


@dataclass(slots=True, eq=False)
class Incoming:
    """A request whose KV comes from a peer. ``handover`` is None until there's room for the whole prompt.
    ``is_unasked``: it isn't in the queue for room, before prefill asks for it.

    ``is_prefix``: the peer offers only the prefix that it already holds; the rest is computed here. ``first_token``,
    the sequence's last token, belongs to a hand-over whose blocks the peer's device had lost: they are read from the
    peer's host tier.
    """

    sequence: Sequence
    peer: Party
    is_prefix: bool = False
    first_token: Draw | None = None
    handover: SinkHandover | None = None
    is_unasked: bool = False

    @property
    def is_landing(self) -> bool:
        """Return whether prefill has offered everything, the first token included, and the last of it is being read."""
        handover = self.handover
        if self.is_prefix or handover is None:
            return False
        return handover.state is SinkState.READING and handover.last_offer_seen
