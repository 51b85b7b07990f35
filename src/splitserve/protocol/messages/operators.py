"""Messages by which operators act on running workers: freezes, resets of the prefix cache, drains."""

from splitserve.protocol.messages.base import Message
from splitserve.protocol.wire_numbers import Count


class SetFrozen(Message, frozen=True):
    """Begin or end a freeze: a frozen worker runs no step, and keeps its requests with their KV. The request's time
    stands still meanwhile; hand-overs go on. A freeze ends with the router that began it. ``number``: that of the pause
    or the resumption that wants it (PauseStamp); of those of several routers the greatest holds."""

    frozen: bool
    number: Count


class ResetPrefixCache(Message, frozen=True):
    """Reuse no KV that was computed so far, on the device or in a tier, nor KV that is computed from it."""

    reset_id: Count


class PrefixCacheReset(Message, frozen=True):
    """The confirmation of a ResetPrefixCache."""

    reset_id: Count


class BeginDrain(Message, frozen=True):
    """Take no more requests, finish those that are there, leave."""
