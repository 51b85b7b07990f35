"""The interface between a worker's core and its parts, which extend it without the core knowing them."""

from collections.abc import Callable, Mapping
from typing import Any

from splitserve.engine.sequence import Sequence
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.messages.membership import PeerLink
from splitserve.protocol.request import Party
from splitserve.protocol.step import Draw

Handler = Callable[[Any, Party, float], None]
"""Takes a message's body, its sender, and the time."""


class Part:
    """One thing that a worker does with requests besides computing them. Each method does nothing by default.

    A part owns the sequences whose KV it moves: the core asks the owner before it continues with them.
    """

    # ---- messages and events ----

    def handlers(self) -> Mapping[type, Handler]:
        """Return the handler of each message type that this part takes."""
        return {}

    def on_connector_event(self, event: ReadResult | PeerConnected, now: float) -> None:
        """Take what the KV connector reports."""

    # ---- sequences that it owns ----

    def owns(self, sequence: Sequence) -> bool:
        """Return whether this part moves the sequence's KV, or is to move it."""
        del sequence
        return False

    def on_computed(self, sequence: Sequence, now: float) -> None:
        """Take note that KV of a sequence's prompt has been computed."""

    def goes_on(self, sequence: Sequence, draw: Draw, now: float) -> bool:
        """Return whether a sequence that this part is to take over draws its second token before that. If so, it has
        the first one, which is in ``draw``, and room for its KV."""
        del sequence, draw, now
        return False

    def on_token(self, sequence: Sequence, draw: Draw, now: float) -> None:
        """Take over a sequence that has left the scheduler: the last token that it draws here is drawn, and is not its
        last one."""

    def on_loaded(self, sequence: Sequence, now: float) -> None:
        """Continue with a sequence whose load from a tier is over."""

    def on_late_load(self, sequence: Sequence) -> None:
        """Start anew with a sequence that gave up its load and all its blocks."""

    def on_end(self, sequence: Sequence, reason: str, now: float, *, attempt_over: bool) -> None:
        """Cancel what is in flight for a request that ends. The part may go on to own it while a peer reads it."""

    # ---- time ----

    def poll(self, now: float) -> None:
        """Do what is due by ``now``."""

    def admit(self, now: float) -> None:
        """Reserve room for sequences that wait for it outside the scheduler. Called after each event."""

    def before_plan(self, now: float) -> None:
        """Make room for the sequences of the next step."""

    def after_plan(self, now: float) -> None:
        """Prepare the step that will follow the one just planned."""

    def next_deadline(self) -> float:
        """Return the time at which :meth:`poll` has something to do, if nothing happens before."""
        return float("inf")

    def drain(self) -> None:
        """Reject what waits for new requests: none will be accepted any more."""

    # ---- state ----

    @property
    def num_live(self) -> int:
        """Things that this part keeps besides the worker's sequences. Zero when idle."""
        return 0

    @property
    def is_landing(self) -> bool:
        """Return whether nothing but the end of a read keeps a sequence from drawing its next token here."""
        return False

    @property
    def arriving(self) -> list[Sequence]:
        """Sequences that decode here as soon as their KV is here: they hold their room."""
        return []

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait outside the scheduler."""
        return []

    @property
    def num_references(self) -> int:
        """References to device blocks that no sequence holds."""
        return 0

    @property
    def num_slots(self) -> int:
        """Host-tier slots in use by peers that no sequence holds."""
        return 0

    def links(self) -> list[PeerLink]:
        """Return how KV comes here, by peer."""
        return []

    def report(self, load: WorkerLoad) -> WorkerLoad:
        """Return a heartbeat's load with this part's numbers filled in."""
        return load

    def check_invariants(self) -> None:
        """Raise AssertionError if this part is in a state that can't be."""
