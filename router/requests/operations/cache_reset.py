"""Resets of all workers' prefix caches. Pure; time is an argument.

Each worker is sent the reset before any later request, on the same link. One that has not confirmed it is asked for no
prefix by other workers. If some worker's link does not take the message, all are sent a new one, so that no request
comes between the resets of the two workers of a hand-over.
"""

from collections.abc import Callable

from splitserve.protocol.messages.operators import PrefixCacheReset, ResetPrefixCache
from splitserve.protocol.request import Party
from splitserve.router.links.membership import Membership
from splitserve.router.placement.placer import Placer
from splitserve.router.requests.effects import Outbox, Send, SetTimer
from splitserve.router.requests.events import Timer, TimerKind

REPEAT_SECONDS = 0.1
MAX_UNCONFIRMED = 4096


class CacheResets:
    """The resets. ``unconfirmed``: workers that may still have content from before the last one. ``on_done`` is called
    when all workers with a link have confirmed it."""

    def __init__(self, membership: Membership, placer: Placer, outbox: Outbox, on_done: Callable[[], None]) -> None:
        self._membership = membership
        self._placer = placer
        self._outbox = outbox
        self._on_done = on_done
        self._reset_id = 0
        self.unconfirmed = placer.unreset
        self.repeats = False  # all are to be reset again, when the timer fires

    @property
    def awaited(self) -> list[Party]:
        """Workers with a link that have yet to confirm."""
        return [party for party in self.unconfirmed if self._is_linked(party)]

    def begin(self) -> None:
        """Reset the caches of all workers, and what the router believes that they hold."""
        self._reset_id += 1
        self._placer.forget_prefixes()
        self.unconfirmed.update({record.info.party: None for record in self._membership.records()})
        while len(self.unconfirmed) > MAX_UNCONFIRMED:
            del self.unconfirmed[next(iter(self.unconfirmed))]
        for party in self.awaited:
            self._send(party)
        self._note_progress()

    def on_ready(self, worker: Party) -> None:
        """Reset a worker that missed it, before it gets any request. Its earlier incarnations are gone."""
        for party in [each for each in self.unconfirmed if each.engine_id == worker.engine_id and each != worker]:
            del self.unconfirmed[party]
        if worker in self.unconfirmed:
            self._send(worker)

    def on_lost(self) -> None:
        self._note_progress()

    def on_confirmed(self, worker: Party, message: PrefixCacheReset) -> bool:
        """Take a confirmation; return False if it is of an earlier reset."""
        if message.reset_id != self._reset_id or worker not in self.unconfirmed:
            return False
        del self.unconfirmed[worker]
        self._note_progress()
        return True

    def on_not_sent(self, now: float) -> None:
        self.repeats = True
        self._outbox.put(SetTimer(AGAIN, now + REPEAT_SECONDS))

    def on_timer(self) -> None:
        self.repeats = False
        self.begin()

    def _send(self, worker: Party) -> None:
        self._outbox.put(Send(worker, ResetPrefixCache(self._reset_id)))

    def _is_linked(self, worker: Party) -> bool:
        record = self._membership.get(worker)
        return record is not None and record.is_linked

    def _note_progress(self) -> None:
        if not self.awaited and not self.repeats:
            self._on_done()


AGAIN = Timer(TimerKind.CACHE_RESET, "")
