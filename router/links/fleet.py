"""The workers, with I/O: the membership socket, a link per ready worker, and the timer that detects missing heartbeats.

Carries out the decisions of :mod:`splitserve.router.links.membership`. Messages about requests go to ``on_messages``,
those of a link that came together at once. A worker that died or left is reported once to ``on_lost``, with the reason
in words.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence

import zmq

from splitserve.common.errors import ConfigError, WireError
from splitserve.common.logs import RateLimitedLog
from splitserve.common.security import SocketSecurity, check_exposure
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.config import RouterConfig
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.membership import (
    Draining,
    Heartbeat,
    Leave,
    PeerLink,
    Register,
    Registered,
    RegisterRefused,
    WorkerInfo,
)
from splitserve.protocol.messages.requests import Introduce, PeerGone, PeerRef, ReadClock
from splitserve.protocol.request import Party, Role
from splitserve.protocol.wire import decode, encode
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.links.kv_event_link import KVEventLink
from splitserve.router.links.links import FailedHandshakes, LoopSocket, WorkerLink, bind_router_socket
from splitserve.router.links.membership import MAX_WORKERS, Membership
from splitserve.router.links.rejected_attempts import UNKNOWN, RejectedAttempts
from splitserve.router.placement.prefix_view import PrefixView

log = logging.getLogger(__name__)

_MAX_TICK_SECONDS = 0.25
_CLOCK_SECONDS = 0.5  # between two readings of a worker's clock, at least
_STRANGER_LOG_INTERVAL_SECONDS = 30.0
_SOCKETS_PER_WORKER = 4  # its link, both ends of the link's monitor, its KV events
_OTHER_SOCKETS = 16
_SOCKETS_PER_ROUTER = 3  # a link, both ends of its monitor
_MAX_PATIENCE_SECONDS = 30.0  # ZMQ gives up a handshake after as long
_TIDIED_PER_TICK = 4096  # blocks of lost workers, in some milliseconds


class Fleet:
    """The workers and their sockets. Must be created, used and closed on the event loop's thread.

    Raises :class:`ConfigError` if the membership address can't be bound.
    """

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        *,
        on_messages: Callable[[Party, list[Body]], None],
        on_lost: Callable[[Party, str], None],
        on_ready: Callable[[Party], None],
    ) -> None:
        protocol = config.protocol
        self.party = Party(config.name, secrets.randbits(63))
        self.on_router: Callable[[Party, Body], bool] = lambda _sender, _body: False  # takes messages of other routers
        self.membership = Membership(protocol.dead_after_seconds, protocol.tombstone_seconds)
        self._dead_after_seconds = protocol.dead_after_seconds
        self._living_seconds = 2 * protocol.dead_after_seconds
        self._metrics = metrics
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._on_ready = on_ready
        self.rejected_attempts = RejectedAttempts()
        self._links: dict[Party, WorkerLink] = {}
        self.prefixes = PrefixView()
        self._kv_event_links: dict[Party, KVEventLink] = {}
        self._clock_asked_at: dict[Party, float] = {}
        self._peers_due_at: dict[Party, float] = {}  # time from which a worker's peers are to be checked
        self._stale_log = RateLimitedLog(log, logging.INFO)  # stale messages are normal after an abort
        self._wire_log = RateLimitedLog(log, logging.WARNING)
        self._refusal_log = RateLimitedLog(log, logging.WARNING)
        self._stranger_log = RateLimitedLog(log, logging.WARNING, _STRANGER_LOG_INTERVAL_SECONDS)
        self._loop = asyncio.get_running_loop()
        check_exposure(config.membership_host, config.secret)
        self.context = zmq.Context()
        others = _OTHER_SOCKETS + _SOCKETS_PER_ROUTER * len(config.peers)
        self.context.set(zmq.MAX_SOCKETS, _SOCKETS_PER_WORKER * MAX_WORKERS + others)
        self.security = SocketSecurity(self.context, config.secret)
        try:
            socket, self.endpoint = bind_router_socket(
                self.context, config.membership_host, self.security, config.membership_port
            )
        except ConfigError:
            self.security.close()
            raise
        self._handshakes = FailedHandshakes(socket, self._on_stranger)
        self._socket = LoopSocket(socket, self._on_membership_frames)
        self._tick_seconds = min(_MAX_TICK_SECONDS, protocol.dead_after_seconds / 4)
        self._last_tick = self._loop.time()
        self._mend_due_at = 0.0
        self._timer = self._loop.call_later(self._tick_seconds, self._tick)

    def send(self, worker: Party, body: Body) -> bool:
        """Send a message; return False if the worker has no link, or the link's queue is full."""
        link = self._links.get(worker)
        return link is not None and link.send(body)

    @property
    def num_ready(self) -> int:
        """Number of workers that requests can be placed on."""
        return sum(record.state is WorkerState.READY for record in self.membership.records())

    def drop_stale(self, kind: str, detail: object, sender: Party) -> None:
        """Count and log a message that came too late or from an unknown sender."""
        self._metrics.stale_messages.inc()
        self._stale_log.write(self._loop.time(), f"dropped a stale message from {sender}: {kind}, {detail}")

    def close(self) -> None:
        self._timer.cancel()
        for link in self._links.values():
            link.close()
        self._links.clear()
        for events in self._kv_event_links.values():
            events.close()
        self._kv_event_links.clear()
        self._handshakes.close()
        self._socket.close()
        self.security.close()
        self.context.term()

    def check_invariants(self) -> None:
        """Assert that a LOST or forgotten worker has no link: its requests were notified, and none can follow."""
        self.membership.check_invariants()
        for party in self._links:
            record = self.membership.get(party)
            assert record is not None, f"there is a link to {party}, which isn't known"
            assert record.state is not WorkerState.LOST, f"there is a link to {party}, which is lost"
        assert self._kv_event_links.keys() <= self._links.keys(), "KV events are followed without a link"

    # ---- the membership socket ----

    def _on_membership_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self._count_wire_error("membership", f"{len(frames)} frames instead of an identity and a message")
            return
        identity, payload = frames
        envelope = self._decode("membership", payload)
        if envelope is None:
            return
        sender, body = envelope.sender, envelope.body
        if isinstance(body, Register):
            self._on_register(identity, sender, body)
        elif not isinstance(body, Heartbeat | Draining | Leave):
            if not self.on_router(sender, body):
                self.drop_stale(type(body).__name__, "on the membership socket", sender)
        elif not self.membership.speaks_for(identity, sender):
            self.drop_stale(type(body).__name__, "from a connection that hasn't registered it", sender)
        elif isinstance(body, Heartbeat):
            self._on_heartbeat(sender, body)
        elif isinstance(body, Draining):
            if self.membership.drain(sender):
                log.info("worker %s drains", sender)
        elif self.membership.leave(sender):
            why = f"has ended: {body.error}" if body.error else "has left"
            self._end_link(sender, why, in_order=not body.error)

    def _on_register(self, identity: bytes, sender: Party, body: Register) -> None:
        registration = self.membership.register(sender, body.info, self._loop.time(), identity, body.token)
        refusal, for_good = registration.refusal, registration.for_good
        if refusal is None and registration.must_dial:
            # Sockets may be short for a while only: the worker asks again, and ends when that doesn't help.
            refusal, for_good = self._dial(sender), False
        if refusal is not None:
            self.rejected_attempts.refuse(body.info, refusal, self._loop.time())
            self._metrics.workers_refused.inc()
            self._refusal_log.write(self._loop.time(), f"refused worker {sender}: {refusal}")
            answer = RegisterRefused(refusal, for_good)
            self._socket.send([identity, encode(Envelope(self.party, sender, answer))])
            return
        self.rejected_attempts.forgive(sender.engine_id)
        if registration.must_dial:
            log.info("worker %s (%s) registered from %s", sender, body.info.role, body.info.endpoint)
        self._socket.send([identity, encode(Envelope(self.party, sender, Registered(registration.token)))])

    def _on_heartbeat(self, sender: Party, body: Heartbeat) -> None:
        clock_offset_seconds = body.clock_seconds - time.time() if body.clock_seconds else None
        before = self.membership.heartbeat(
            sender, body.load, self._loop.time(), body.links, clock_offset_seconds, step_model=body.step_model
        )
        if before is WorkerState.LOST:
            log.info("worker %s is heard again", sender)
            self._redial(sender)
        self._read_clock(sender)
        self._check_peers(sender, body.links)
        record = self.membership.get(sender)
        if record is not None and record.is_linked:
            self._follow(record.info)

    def _check_peers(self, worker: Party, links: Sequence[PeerLink]) -> None:
        """Report those peers of a worker that are gone: they were lost while this router, or its link to the worker,
        was down. Once per link, after the time that living workers have to register."""
        if self._loop.time() < self._peers_due_at.get(worker, float("inf")):
            return
        del self._peers_due_at[worker]
        for peer in (Party(link.peer, link.incarnation) for link in links):
            record = self.membership.get(peer)
            if record is None or record.state is WorkerState.LOST:
                self.send(worker, PeerGone(peer))

    def _on_stranger(self, address: str) -> None:
        """Record a connection without the shared secret: usually a worker with another one, which can't report it."""
        self.rejected_attempts.stranger(address, self._loop.time())
        self._metrics.handshakes_failed.inc()
        self._stranger_log.write(
            self._loop.time(),
            f"refused a connection from {address or UNKNOWN}: it doesn't show this cluster's shared secret",
        )

    # ---- links ----

    def _redial(self, worker: Party, patience_seconds: float = 0.0) -> None:
        """Open the link of a worker that is registered. If that fails, the worker is forgotten until it registers."""
        refusal = self._dial(worker, patience_seconds)
        if refusal is not None:
            log.warning("worker %s must register again: %s", worker, refusal)

    def _dial(self, worker: Party, patience_seconds: float = 0.0) -> str | None:
        """Open the worker's link; return None, or the reason in words why it can't be opened.

        ``patience_seconds``: time after which a link that isn't up is dialled anew; 0: as for a first one.
        """
        record = self.membership.get(worker)
        assert record is not None
        try:
            self._links[worker] = WorkerLink(
                self.context,
                record.info,
                self.party,
                self.security,
                on_messages=self._on_link_messages,
                on_up=self._on_link_up,
                on_down=self._on_link_down,
                patience_seconds=min(patience_seconds or self._dead_after_seconds, _MAX_PATIENCE_SECONDS),
            )
        except ConfigError as error:
            self.membership.forget(worker)  # it may register again once its endpoint can be dialled
            return str(error)
        return None

    def _dial_anew(self, now: float) -> None:
        """Replace links whose handshake doesn't end: else a registered worker could stay unready for ever.

        Each next one has twice the time: a handshake on a machine under load may take longer than the first ones have.
        """
        for record in self.membership.records():
            link, party = self._links.get(record.info.party), record.info.party
            if record.state is not WorkerState.CONNECTING:
                continue
            patience_seconds = self._dead_after_seconds if link is None else link.patience_seconds
            if link is not None and now - link.dialled_at <= patience_seconds:
                continue
            log.warning("worker %s: no link to %s yet; dialling anew", party, record.info.endpoint)
            if link is not None:
                del self._links[party]
                link.close()
            self._redial(party, 2 * patience_seconds)

    def _on_link_up(self, link: WorkerLink) -> None:
        self.membership.link_up(link.party)
        self._peers_due_at[link.party] = self._loop.time() + self._living_seconds
        self._on_ready(link.party)
        log.info("worker %s is ready", link.party)
        self._read_clock(link.party)
        self._follow(link.info)
        self._introduce(link.party)

    def _read_clock(self, worker: Party) -> None:
        """Ask for a worker's clock. It has just sent something, so its loop runs: the answer comes soon."""
        now = time.monotonic()
        if now >= self._clock_asked_at.get(worker, 0.0) + _CLOCK_SECONDS and self.send(worker, ReadClock(now)):
            self._clock_asked_at[worker] = now

    def _follow(self, info: WorkerInfo) -> None:
        """Subscribe to the worker's KV events, if it publishes them. Where that fails, its next heartbeat tries again:
        sockets may be short for a while only."""
        if info.kv_events_endpoint and info.party not in self._kv_event_links:
            try:
                link = KVEventLink(self.context, info, self.security, self.prefixes.apply_in_parts)
            except ConfigError as error:
                self._refusal_log.write(self._loop.time(), f"worker {info.party}: {error}")
            else:
                self._kv_event_links[info.party] = link

    def _introduce(self, newcomer: Party) -> None:
        """Let decode workers connect to prefill workers before the first request needs it. A pair is introduced when
        the second of them is ready."""
        for record in self.membership.records():
            for one, other in ((newcomer, record.info.party), (record.info.party, newcomer)):
                source, sink = self.membership.get(one), self.membership.get(other)
                if not source or not sink or source.state is not WorkerState.READY:
                    continue
                if source.info.role is Role.PREFILL and sink.info.role is Role.DECODE:
                    self.send(other, Introduce(peer=PeerRef(one, source.info.endpoint)))

    def mend_links(self) -> None:
        """Let decode workers reconnect to prefill workers that they couldn't read from; else the next request with that
        pair of workers has to."""
        records = {record.info.party.engine_id: record for record in self.membership.records()}
        for record in records.values():
            for link in (link for link in record.links if not link.transport):
                peer = records.get(link.peer)
                if peer is not None and WorkerState.READY is peer.state is record.state:
                    self.send(record.info.party, Introduce(peer=PeerRef(peer.info.party, peer.info.endpoint)))

    def _on_link_down(self, link: WorkerLink) -> None:
        if self._links.get(link.party) is link and self.membership.lose(link.party):
            self._end_link(link.party, "closed its connection")

    def _on_link_messages(self, link: WorkerLink, messages: list[bytes]) -> None:
        self._on_messages(link.party, self._bodies(link, messages))

    def _bodies(self, link: WorkerLink, messages: list[bytes]) -> list[Body]:
        """Return the bodies of a link's messages, without those that are dropped."""
        bodies = link.bodies(messages)
        if bodies is not None:
            return bodies
        if len(messages) > 1:
            return [body for message in messages for body in self._bodies(link, [message])]
        envelope = self._decode(link.party, messages[0])
        if envelope is None:
            return []
        if envelope.sender == link.party:
            return [envelope.body]
        self.drop_stale(type(envelope.body).__name__, f"on the link to {link.party}", envelope.sender)
        return []

    def _end_link(self, worker: Party, why: str, *, in_order: bool = False) -> None:
        """Close the link of a worker that is gone and report its loss to its requests. ``in_order``: it sent Leave."""
        link = self._links.pop(worker, None)
        if link is None:
            return
        self._clock_asked_at.pop(worker, None)
        self._peers_due_at.pop(worker, None)
        link.close()
        events = self._kv_event_links.pop(worker, None)
        if events is not None:
            events.close()
        self.prefixes.forget(worker)
        if not in_order:
            self._metrics.workers_lost.inc()
        log.log(logging.INFO if in_order else logging.WARNING, "worker %s %s", worker, why)
        self._on_lost(worker, why)
        for other in self._links.values():  # if the worker comes back, it is introduced again
            other.send(PeerGone(worker))

    # ---- both ----

    def _decode(self, source: object, payload: bytes) -> Envelope | None:
        try:
            envelope = decode(payload)
        except WireError as error:
            self._count_wire_error(source, str(error))
            return None
        if envelope.to is not None and envelope.to != self.party:
            self.drop_stale(type(envelope.body).__name__, f"for {envelope.to}", envelope.sender)
            return None
        return envelope

    def _count_wire_error(self, source: object, message: str) -> None:
        self._metrics.wire_errors.inc()
        self._wire_log.write(self._loop.time(), f"dropped bytes from {source}: {message}")

    def _tick(self) -> None:
        now = self._loop.time()
        if now - self._last_tick > self._dead_after_seconds / 2:
            self.membership.excuse_silence(now)
        self._last_tick = now
        for worker in self.membership.expire(now):
            self._end_link(worker, f"sent no heartbeat for {self._dead_after_seconds:g} s")
        self._dial_anew(now)
        self.prefixes.tidy(_TIDIED_PER_TICK)
        if now >= self._mend_due_at and not self.membership.is_connected():
            self._mend_due_at = now + self._dead_after_seconds
            self.mend_links()
        self._timer = self._loop.call_later(self._tick_seconds, self._tick)
