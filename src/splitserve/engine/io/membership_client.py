"""A worker's side of membership: it registers with each router, sends heartbeats, and reports where no answer comes."""

import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import psutil

from splitserve.common.errors import HandshakeError
from splitserve.engine.core import EngineCore
from splitserve.engine.io.membership_link import MembershipLink
from splitserve.engine.io.sockets import WorkerSockets
from splitserve.engine.steps.step_fit import StepFit
from splitserve.protocol.config import WorkerConfig
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.membership import (
    Draining,
    Heartbeat,
    Leave,
    Register,
    Registered,
    RegisterRefused,
    WorkerInfo,
)
from splitserve.protocol.request import Party

logger = logging.getLogger(__name__)

REGISTER_INTERVAL_SECONDS = 5.0
COMPLAINT_INTERVAL_SECONDS = 5.0
OTHERS_SECONDS = 5.0
"""Time after the first acceptance in which the other routers should accept a worker, too; one may be starting again."""
REFUSED_PERIODS = 2.0
"""Times ``dead_after_seconds`` that a worker is refused for now until it counts as refused for good."""


class MembershipClient:
    """Keeps a worker registered with all routers. Called by the engine loop in each of its rounds."""

    def __init__(
        self, config: WorkerConfig, info: WorkerInfo, sockets: WorkerSockets, rank_pids: Sequence[int] = ()
    ) -> None:
        """Prepare for registering. ``rank_pids``: processes of the worker's other ranks; their memory counts, too."""
        self._config = config
        self._sockets = sockets
        self._pids = (os.getpid(), *rank_pids)
        self._is_draining = False
        self._registrations = [_Registration(config, info, sockets, link) for link in sockets.memberships]
        self.routers: frozenset[Party] = frozenset()  # whose memberships accepted it last
        self._first_accepted_at = math.inf
        self._heartbeat_due_at = 0.0

    @property
    def registered(self) -> bool:
        """Return whether membership has accepted this worker: that of each router, or, after a while, of some."""
        accepted = [each.registered for each in self._registrations]
        return all(accepted) or (any(accepted) and time.monotonic() > self._first_accepted_at + OTHERS_SECONDS)

    def receive(self, now: float) -> HandshakeError | None:
        """Take the memberships' answers. Returns an error if this worker is refused for good."""
        error = None
        for each in self._registrations:
            before = each.router
            error = each.receive(now) or error
            if each.router != before:
                self._first_accepted_at = min(self._first_accepted_at, now)
                self.routers = frozenset(known.router for known in self._registrations if known.router is not None)
        return error

    def drain(self) -> None:
        """Announce that this worker takes no more requests."""
        self._is_draining = True
        self._send(Draining())

    def leave(self, error: str) -> None:
        """Announce the end of this worker. ``error``: its reason, "" if it leaves in order."""
        self._send(Leave(error))

    def keep(self, core: EngineCore, steps: StepFit, now: float) -> None:
        """Send what is due: a registration, a heartbeat, a line in the log where no answer comes."""
        for each in self._registrations:
            each.keep(now, is_draining=self._is_draining)
        if core.take_news() or now >= self._heartbeat_due_at:
            self._heartbeat_due_at = now + self._config.protocol.heartbeat_seconds
            self._send_heartbeat(core, steps)

    def _send_heartbeat(self, core: EngineCore, steps: StepFit) -> None:
        load = msgspec.structs.replace(
            core.load(),
            resident_bytes=_resident_bytes(self._pids),
            undeliverable_messages=self._sockets.num_undeliverable,
            malformed_messages=self._sockets.num_malformed,
            step_error=steps.relative_error,
            minute_error=steps.minute_error,
        )
        self._send(Heartbeat(load=load, step_model=steps.model, links=core.links(), clock_seconds=time.time()))
        if self._is_draining:  # after the heartbeat, which makes a lost worker a candidate again
            self._send(Draining())

    def _send(self, body: Draining | Heartbeat | Leave) -> None:
        for link in self._sockets.memberships:
            self._sockets.send_membership(link, body)

    def next_deadline(self) -> float:
        """Return the time at which :meth:`keep` has something to send, if nothing happens before."""
        if self._is_draining:
            return self._heartbeat_due_at
        return min(self._heartbeat_due_at, *(each.due_at for each in self._registrations))


class _Registration:
    """The registration with one router. ``due_at``: time of the next attempt, or of the next repetition."""

    def __init__(self, config: WorkerConfig, info: WorkerInfo, sockets: WorkerSockets, link: MembershipLink) -> None:
        self._config = config
        self._info = info
        self._sockets = sockets
        self._link = link
        self.registered = False  # membership has accepted this worker
        self.router: Party | None = None  # whose membership accepted it last
        self.due_at = 0.0
        self._token = ""
        self._refusal = ""
        self._refused_since = math.inf
        self._complaint_due_at = time.monotonic() + COMPLAINT_INTERVAL_SECONDS

    def receive(self, now: float) -> HandshakeError | None:
        """Take the answers. Returns an error if this worker is refused for good."""
        error = None
        for envelope in self._sockets.receive_membership(self._link):
            error = self._on_answer(envelope, now) or error
        return error

    def _on_answer(self, envelope: Envelope, now: float) -> HandshakeError | None:
        if envelope.to != self._info.party:
            return None
        if isinstance(envelope.body, RegisterRefused):
            return self._on_refused(envelope.body, now)
        if isinstance(envelope.body, Registered):
            self.registered, self._token = True, envelope.body.token
            self.router = envelope.sender
            self._refusal, self._refused_since = "", math.inf
        return None

    def _on_refused(self, refused: RegisterRefused, now: float) -> HandshakeError | None:
        """Ask again, unless that is of no use: then the worker ends, and its launcher starts another incarnation."""
        self.registered, self._refusal = False, refused.reason
        self._refused_since = min(self._refused_since, now)
        has_waited = now - self._refused_since > REFUSED_PERIODS * self._config.protocol.dead_after_seconds
        if refused.for_good or has_waited:
            return HandshakeError(f"the router refuses {self._config.engine_id}: {refused.reason}")
        return None

    def keep(self, now: float, *, is_draining: bool) -> None:
        """Send a registration if it is due, and complain where no answer comes."""
        if self._sockets.has_new_membership_connection(self._link):
            self.due_at = now
        if now >= self.due_at and not is_draining:  # repeated: membership may have restarted
            interval = REGISTER_INTERVAL_SECONDS if self.registered else self._config.protocol.heartbeat_seconds
            self.due_at = now + interval
            self._sockets.send_membership(self._link, Register(info=self._info, token=self._token))
        if now >= self._complaint_due_at:
            self._complaint_due_at = now + COMPLAINT_INTERVAL_SECONDS
            self._complain()

    def _complain(self) -> None:
        """Log the reason that no request comes here."""
        if self._refusal:
            logger.error("the router refuses this worker: %s", self._refusal)
        elif not self.registered:
            endpoint = self._link.endpoint
            logger.warning("no answer from %s: is the router there, and has it the same shared secret?", endpoint)
            self._sockets.revive_membership(self._link)


def _resident_bytes(pids: Sequence[int]) -> int:
    """Return the resident memory of those processes that live."""
    num_bytes = 0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            num_bytes += psutil.Process(pid).memory_info().rss
    return num_bytes
