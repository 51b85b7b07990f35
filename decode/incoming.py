"""Requests whose KV comes from a peer."""

from dataclasses import dataclass

from splitserve.engine.sequence import Sequence
from splitserve.protocol.handover.sink import SinkHandover, SinkState
from splitserve.protocol.messages.handover import Offer
from splitserve.protocol.request import Party
from splitserve.protocol.step import Draw


@dataclass(slots=True, eq=False)
class Incoming:
    """A request whose KV comes from a peer. ``handover`` is None until there's room for the whole prompt.
    ``is_unasked``: it isn't in the queue for room, before prefill asks for it.

    ``is_prefix``: the peer offers only the prefix that it already holds; the rest is computed here. ``first_tokens``,
    the sequence's last ones, belong to a hand-over whose blocks the peer's device had lost: they are read from the
    peer's host tier.
    """

    sequence: Sequence
    peer: Party
    is_prefix: bool = False
    first_tokens: Draw | None = None
    handover: SinkHandover | None = None
    is_unasked: bool = False

    def problem_with_tokens(self, offer: Offer, vocab_size: int) -> str | None:
        """Return why the request can't have an offer's output tokens, in words, or None."""
        if any(token_id >= vocab_size for token_id in (*offer.first_tokens, offer.second_token or 0)):
            return f"prefill sent a token outside the vocabulary of {vocab_size}"
        num_left, num_choices = self.sequence.end_length - len(self.sequence.token_ids), self.sequence.num_choices
        if offer.second_token is not None and (num_choices > 1 or num_left <= 2):
            return f"prefill sent a second token; the request has {num_choices} choices of {num_left} tokens at most"
        return None

    @property
    def is_landing(self) -> bool:
        """Return whether prefill has offered everything, the first token included, and the last of it is being read."""
        handover = self.handover
        if self.is_prefix or handover is None:
            return False
        return handover.state is SinkState.READING and handover.last_offer_seen
