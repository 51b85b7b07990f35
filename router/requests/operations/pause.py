"""The pause of a router: which requests begin, and which workers are frozen. Pure; time is an argument.

A frozen worker must learn of each freeze and of its end, whatever happens to its link: it is sent its state anew when
its link comes up, and again when a message was not sent. Each message has the number of the pause or the resumption
that it belongs to; heartbeats say which one holds, so that an earlier freeze isn't taken for the present one.
"""

from splitserve.protocol.messages.operators import SetFrozen
from splitserve.protocol.request import Party
from splitserve.router.links.membership import Membership
from splitserve.router.links.worker_record import WorkerRecord
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
        self._number = 0  # of the last change
        self._told: dict[Party, SetFrozen] = {}  # the state that each worker was sent last
        self.repeats = False  # a worker is to be sent its state again, when the timer fires

    @property
    def is_on(self) -> bool:
        return self.mode is not None

    @property
    def freezes(self) -> bool:
        return self.mode is PauseMode.KEEP

    def begin(self, mode: PauseMode, now: float, number: int) -> None:
        """Pause, or change the mode of the pause. ``number`` is greater than all before."""
        if self.mode is None:
            self.since = now
        self.mode, self._number = mode, number
        self._has_frozen |= self.freezes
        self.tell()

    def end(self, number: int) -> None:
        """Resume. ``number`` is greater than all before."""
        self.mode, self._number = None, number
        self.tell()

    def tell(self) -> None:
        """Send the linked workers their state, unless it is the one that they were sent last."""
        self._told = {party: told for party, told in self._told.items() if self._membership.get(party) is not None}
        for record in self._membership.records():
            told = self._told.get(record.info.party, NOT_TOLD)
            if record.is_linked and told.frozen != self.freezes:
                self._send(record.info.party)

    def is_followed(self, record: WorkerRecord) -> bool:
        """Return whether a worker is frozen, or not, as this pause wants it, by its last heartbeat. One that was sent
        before the worker had the last message says nothing."""
        told = self._told.get(record.info.party, NOT_TOLD)
        is_current = told.frozen == self.freezes and record.load.freeze_number >= told.number
        return is_current and bool(record.load.frozen) == self.freezes

    def on_ready(self, worker: Party) -> None:
        """Send a worker its state whose link is up, before it gets any request."""
        if self._has_frozen:
            self._send(worker)

    def on_not_sent(self, worker: Party, now: float) -> None:
        """Try again soon. Without a link, the next one repeats the message."""
        self._told[worker] = SetFrozen(not self.freezes, self._number)
        self.repeats = True
        self._outbox.put(SetTimer(TELL, now + REPEAT_SECONDS))

    def on_timer(self) -> None:
        self.repeats = False
        self.tell()

    def _send(self, worker: Party) -> None:
        self._told[worker] = message = SetFrozen(self.freezes, self._number)
        self._outbox.put(Send(worker, message))


NOT_TOLD = SetFrozen(False, 0)
"""The state of a worker that was sent none."""
TELL = Timer(TimerKind.FREEZE, "")
