"""Operators' acts on a worker's core: freezes and resets of its prefix cache. Pure."""

from collections.abc import Set

from splitserve.engine.state import EngineState
from splitserve.protocol.messages.operators import PrefixCacheReset, ResetPrefixCache, SetFrozen
from splitserve.protocol.request import Party

MAX_ROUTERS = 64
"""Routers whose last SetFrozen is kept."""
NOT_FROZEN = SetFrozen(False, 0)


class Operations:
    """The freeze of a core, and the reset of what it has cached."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._told: dict[Party, SetFrozen] = {}  # the last one of each router
        self._routers: Set[Party] = frozenset()  # that this worker is registered with; empty: not known yet

    def on_set_frozen(self, message: SetFrozen, sender: Party, now: float) -> None:
        """Freeze, or go on. Each of several routers sends the state that it knows, and their messages come in any
        order: the one with the greatest number holds."""
        self._told.pop(sender, None)
        self._told[sender] = message
        if len(self._told) > MAX_ROUTERS:
            del self._told[next(iter(self._told))]
        self._follow(now)

    def on_routers(self, routers: Set[Party], now: float) -> None:
        """Forget routers whose place others have taken. If they alone held a freeze, it ends: the others are not
        paused."""
        if routers and routers != self._routers:
            self._routers = frozenset(routers)
            self._told = {router: message for router, message in self._told.items() if router in routers}
            self._follow(now)

    def _follow(self, now: float) -> None:
        """Begin or end the freeze as the newest message says, and let the next heartbeat report its number soon. One of
        a router that isn't known yet counts once it is."""
        known = [each for router, each in self._told.items() if not self._routers or router in self._routers]
        newest = max(known, key=lambda each: each.number, default=NOT_FROZEN)
        if newest.frozen and not self._state.is_frozen:
            self._state.frozen_since = now
            self._state.has_news = True
        elif not newest.frozen and self._state.is_frozen:
            self._thaw(now)
        if self._state.freeze_number != newest.number:
            self._state.freeze_number = newest.number
            self._state.has_news = True

    def _thaw(self, now: float) -> None:
        """End the freeze. The time that it took doesn't count against the requests' deadlines."""
        since = self._state.frozen_since
        assert since is not None
        for sequence in self._state.sequences.values():
            sequence.deadline += now - since
        self._state.frozen_since = None
        self._state.has_news = True

    def on_reset(self, message: ResetPrefixCache, sender: Party, now: float) -> None:
        """Forget what is cached. Requests that are here keep their blocks, which nothing else will find."""
        del now
        self._state.forget_prefixes()
        self._state.outbox.send(sender, PrefixCacheReset(message.reset_id))
