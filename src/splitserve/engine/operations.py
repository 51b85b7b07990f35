"""Operators' acts on a worker's core: freezes and resets of its prefix cache. Pure."""

from collections.abc import Set

from splitserve.engine.state import EngineState
from splitserve.protocol.messages.operators import PrefixCacheReset, ResetPrefixCache, SetFrozen
from splitserve.protocol.request import Party


class Operations:
    """The freeze of a core, and the reset of what it has cached."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._frozen_by: set[Party] = set()  # routers that hold the freeze

    def on_set_frozen(self, message: SetFrozen, sender: Party, now: float) -> None:
        """Freeze, or go on. A second message with the same wish has no effect. Of several routers each sends its wish;
        the last message counts, since they agree in the end."""
        if not message.frozen:
            self.thaw(now)
            return
        self._frozen_by.add(sender)
        if not self._state.is_frozen:
            self._state.frozen_since = now
            self._state.has_news = True

    def on_routers(self, routers: Set[Party], now: float) -> None:
        """Go on if other routers have taken the place of all that hold the freeze: they are not paused."""
        if self._frozen_by and routers:
            self._frozen_by &= routers
            if not self._frozen_by:
                self.thaw(now)

    def thaw(self, now: float) -> None:
        """End the freeze. The time that it took doesn't count against the requests' deadlines."""
        self._frozen_by.clear()
        since = self._state.frozen_since
        if since is None:
            return
        for sequence in self._state.sequences.values():
            sequence.deadline += now - since
        self._state.frozen_since = None
        self._state.has_news = True

    def on_reset(self, message: ResetPrefixCache, sender: Party, now: float) -> None:
        """Forget what is cached. Requests that are here keep their blocks, which nothing else will find."""
        del now
        self._state.forget_prefixes()
        self._state.outbox.send(sender, PrefixCacheReset(message.reset_id))
