"""A worker's sockets: one that routers and peers connect to, one to each router's membership, one per peer that we
dialled."""

import logging
import math
from collections import OrderedDict
from collections.abc import Iterator

import zmq

from splitserve.common.errors import ConfigError, WireError
from splitserve.common.security import SocketSecurity, check_exposure
from splitserve.engine.io.membership_link import MembershipLink
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.requests import PeerRef
from splitserve.protocol.request import Party
from splitserve.protocol.wire import MAX_MESSAGE_BYTES, decode, encode

logger = logging.getLogger(__name__)

MAX_KNOWN_SENDERS = 4096
MESSAGES_PER_ROUND = 256
HIGH_WATER_MARK = 10_000


class WorkerSockets:
    """Binds ``tcp://host:*``; every message goes out in an envelope from ``me``. Not thread-safe.

    ``membership``: the endpoints of the routers' memberships, separated by commas. A ``secret`` protects all
    connections. Raises :class:`ConfigError` for a host that can't be bound or that needs one.
    """

    def __init__(self, me: Party, host: str, membership: str, secret: str = "") -> None:
        check_exposure(host, secret)
        self.me = me
        self._context = zmq.Context()
        self._security = SocketSecurity(self._context, secret)
        self._server = self._socket(zmq.ROUTER)
        self._security.protect_bound(self._server)
        self._server.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # No limit: tokens aren't repeated, and a router that is held up for a while must find all of them. What can be
        # waiting is bounded by the requests that are here; a connection that ends takes its queue with it.
        self._server.setsockopt(zmq.SNDHWM, 0)
        self._server.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that dials anew keeps its identity
        self._publishers: list[zmq.Socket[bytes]] = []
        self._host = host
        self.endpoint = self._bind(self._server)
        self._senders: OrderedDict[Party, bytes] = OrderedDict()
        self._peers: dict[Party, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._server, zmq.POLLIN)
        self.memberships = [MembershipLink(endpoint, self._dialling_socket) for endpoint in membership.split(",")]
        for link in self.memberships:
            self._watch_membership(link)
        self._readable: set[object] = set()  # sockets and descriptors that the last wait found something on
        self.num_undeliverable = 0
        self.num_malformed = 0

    def watch(self, file_descriptor: int) -> None:
        """Let :meth:`wait` return when there's something to read on ``file_descriptor``."""
        self._poller.register(file_descriptor, zmq.POLLIN)

    def bind_publisher(self) -> "tuple[zmq.Socket[bytes], str]":
        """Return a socket for subscribers, protected like the others and closed with them, and its endpoint.

        :meth:`wait` returns when a subscriber arrives.

        """
        publisher = self._socket(zmq.XPUB)
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._security.protect_bound(publisher)
        endpoint = self._bind(publisher)
        self._publishers.append(publisher)
        self._poller.register(publisher, zmq.POLLIN)
        return publisher, endpoint

    def wait(self, timeout_seconds: float) -> bool:
        """Sleep until something can be received, or the time is up; return whether something can be."""
        self._readable = {socket for socket, _ in self._poller.poll(math.ceil(max(0.0, timeout_seconds) * 1000))}
        return bool(self._readable)

    def receive(self) -> Iterator[Envelope]:
        """Yield the messages of routers and peers that had arrived by the last :meth:`wait`. Their number is bounded,
        so that a flood can't stop the engine."""
        if self._server in self._readable:
            yield from self._receive_bound()
        for socket in list(self._peers.values()):
            yield from self._receive_dialled(socket)

    def receive_membership(self, link: MembershipLink) -> Iterator[Envelope]:
        """Yield a membership's messages, which are accepted on its socket alone."""
        yield from self._receive_dialled(link.socket)

    def send(self, to: Party, body: Body) -> None:
        """Send to a dialled peer, or to a router or peer that has sent to us; count what can't be delivered.

        To a router nothing is lost while its connection lasts. Messages to a dialled peer are dropped beyond
        :data:`HIGH_WATER_MARK`: leases and deadlines stand for them."""
        data = encode(Envelope(self.me, to, body))
        try:
            if to in self._peers:
                self._peers[to].send(data, zmq.NOBLOCK)
            elif to in self._senders:
                self._server.send_multipart([self._senders[to], data], zmq.NOBLOCK)
            else:
                self.num_undeliverable += 1
        except zmq.ZMQError:
            self.num_undeliverable += 1

    def send_membership(self, link: MembershipLink, body: Body) -> None:
        try:
            link.socket.send(encode(Envelope(self.me, None, body)), zmq.NOBLOCK)
        except zmq.Again:
            self.num_undeliverable += 1

    def has_new_membership_connection(self, link: MembershipLink) -> bool:
        """Return whether a new connection to membership was made since the last call; membership doesn't know it."""
        return link.monitor in self._readable and link.has_new_connection()

    def revive_membership(self, link: MembershipLink) -> None:
        """Connect anew after ZMQ has stopped trying, which it does if only one end has a secret."""
        if link.gave_up:
            self._poller.unregister(link.socket)
            self._poller.unregister(link.monitor)
            link.close(linger_seconds=0.0)
            link.dial()
            self._watch_membership(link)

    def dial(self, peer: PeerRef) -> None:
        """Connect to a peer. One with an endpoint that can't be is as good as one that never answers."""
        self.hang_up(peer.party)
        try:
            if not peer.endpoint.startswith("tcp://"):
                raise zmq.ZMQError(zmq.EPROTONOSUPPORT)
            self._peers[peer.party] = self._dial(peer.endpoint)
        except zmq.ZMQError as error:
            self.num_undeliverable += 1
            logger.error("can't dial %s at %r: %s", peer.party, peer.endpoint, error)
            return
        self._poller.register(self._peers[peer.party], zmq.POLLIN)

    def hang_up(self, peer: Party) -> None:
        socket = self._peers.pop(peer, None)
        if socket is not None:
            self._poller.unregister(socket)
            socket.close()

    def close(self, linger_seconds: float = 0.2) -> None:
        """Close everything; what was just sent gets ``linger_seconds`` to leave."""
        for peer in list(self._peers):
            self.hang_up(peer)
        for link in self.memberships:
            link.close(linger_seconds)
        for socket in (self._server, *self._publishers):
            socket.close(linger=int(linger_seconds * 1000))
        self._security.close()
        self._context.term()

    def _watch_membership(self, link: MembershipLink) -> None:
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)

    def _receive_bound(self) -> Iterator[Envelope]:
        for _ in range(MESSAGES_PER_ROUND):
            try:
                frames = self._server.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            envelope = self._decode(frames[-1]) if len(frames) == 2 else None
            if envelope is not None:
                self._remember(envelope.sender, frames[0])
                yield envelope

    def _receive_dialled(self, socket: "zmq.Socket[bytes]") -> Iterator[Envelope]:
        if socket not in self._readable:
            return
        for _ in range(MESSAGES_PER_ROUND):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            envelope = self._decode(frames[-1])
            if envelope is not None:
                yield envelope

    def _decode(self, data: bytes) -> Envelope | None:
        try:
            return decode(data)
        except WireError as error:
            self.num_malformed += 1
            logger.warning("dropped a message: %s", error)
            return None

    def _remember(self, sender: Party, identity: bytes) -> None:
        self._senders[sender] = identity
        self._senders.move_to_end(sender)
        if len(self._senders) > MAX_KNOWN_SENDERS:
            self._senders.popitem(last=False)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        return socket

    def _bind(self, socket: "zmq.Socket[bytes]") -> str:
        host = self._host
        address = f"[{host}]" if ":" in host else host
        try:
            socket.setsockopt(zmq.IPV6, int(":" in host))
            return f"tcp://{address}:{socket.bind_to_random_port(f'tcp://{address}')}"
        except zmq.ZMQError as error:
            socket.close()
            self._server.close()
            self._security.close()
            self._context.term()
            raise ConfigError(
                f"can't bind a socket on {host}: {error}; --worker-host must be an address of this machine"
            ) from error

    def _dial(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._dialling_socket()
        socket.setsockopt(zmq.IDENTITY, str(self.me).encode())
        return self._connect(socket, endpoint)

    def _dialling_socket(self) -> "zmq.Socket[bytes]":
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, 1)  # dials IPv4, too
        self._security.protect_connecting(socket)
        return socket

    @staticmethod
    def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> "zmq.Socket[bytes]":
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket
