"""The pause of a router: which requests begin, and which workers are frozen. Pure; time is an argument.

A frozen worker must learn of each freeze and of its end, whatever happens to its link: it is sent its state anew when
its link comes up, and again when a message was not sent.
"""

from splitserve.protocol.messages.operators import SetFrozen
from splitserve.protocol.request import Party
from splitserve.router.links.membership import Membership
from splitserve.router.requests.effects import Outbox, Send, SetTimer
from splitserve.router.requests.events import PauseMode, Timer, TimerKind

PAUSED = "an operator has paused the server"
ABORTED = "an operator has paused the server and ended the requests in flight"
REPEAT_SECONDS = 0.1


class Pause:
    """The pause, if there is one: ``mode`` is None while there is none, ``since`` the time when it began."""

    def __init__(self, membership: Membership, outbox: Outbox) -> None:
        self._membership = membership
        self._outbox = outbox
        self.mode: PauseMode | None = None
        self.since = 0.0
        self._has_frozen = False  # at some time: workers may have missed the end of a freeze
        self._told: dict[Party, bool] = {}  # the state that each worker was sent last
        self.repeats = False  # a worker is to be sent its state again, when the timer fires

    @property
    def is_on(self) -> bool:
        return self.mode is not None

    @property
    def freezes(self) -> bool:
        return self.mode is PauseMode.KEEP

    def begin(self, mode: PauseMode, now: float) -> None:
        """Pause, or change the mode of the pause."""
        if self.mode is None:
            self.since = now
        self.mode = mode
        self._has_frozen |= self.freezes
        self.tell()

    def end(self) -> None:
        self.mode = None
        self.tell()

    def tell(self) -> None:
        """Send the linked workers their state, unless it is the one that they were sent last."""
        self._told = {party: frozen for party, frozen in self._told.items() if self._membership.get(party) is not None}
        for record in self._membership.records():
            if record.is_linked and self._told.get(record.info.party, False) != self.freezes:
                self._send(record.info.party)

    def on_ready(self, worker: Party) -> None:
        """Send a worker its state whose link is up, before it gets any request."""
        if self._has_frozen:
            self._send(worker)

    def on_not_sent(self, worker: Party, now: float) -> None:
        """Try again soon. Without a link, the next one repeats the message."""
        self._told[worker] = not self.freezes
        self.repeats = True
        self._outbox.put(SetTimer(TELL, now + REPEAT_SECONDS))

    def on_timer(self) -> None:
        self.repeats = False
        self.tell()

    def _send(self, worker: Party) -> None:
        self._told[worker] = self.freezes
        self._outbox.put(Send(worker, SetFrozen(self.freezes)))


TELL = Timer(TimerKind.FREEZE, "")
