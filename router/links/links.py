"""ZMQ sockets on the event loop: the membership socket, and one link per worker incarnation.

No zmq.asyncio: the loop watches a socket's descriptor and passes frames straight to a callback, so a message costs no
future and no task. All sockets have LINGER 0 and never block: a full send queue is reported to the caller.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable

import zmq

from splitserve.common.errors import ConfigError
from splitserve.common.security import SocketSecurity
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.membership import WorkerInfo
from splitserve.protocol.request import Party
from splitserve.protocol.wire import MAX_MESSAGE_BYTES, OneWay, encode

log = logging.getLogger(__name__)

_MAX_FRAMES_PER_TURN = 256
_MISMATCH_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_DOWN_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


# As plain numbers: ZMQ's own are converted at each use.
_AT_ONCE = int(zmq.NOBLOCK)
_AT_ONCE_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)


class LoopSocket:
    """A ZMQ socket whose messages are passed to ``on_frames`` on the event loop.

    ``joins_frames``: ``on_frames`` gets the frames of a message, for each message. Else each frame is a message, and
    ``on_frames`` gets those that came together: that costs less. An error that it raises delays no other message.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_frames: Callable[[list[bytes]], None],
        *,
        joins_frames: bool = True,
    ) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._pass_on = self._pass_on_each if joins_frames else self._pass_on_together
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._drain_scheduled = False
        # With something to read there is nearly always a message; to ask would only take time.
        self._loop.add_reader(self._descriptor, self._drain if joins_frames else self._pass_on)
        self._drain_soon()

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message; return False if that fails: the peer's queue is full, or there is no peer."""
        try:
            for frame in frames[:-1]:
                self.socket.send(frame, _AT_ONCE_MORE)
            self.socket.send(frames[-1], _AT_ONCE)
        except zmq.ZMQError as error:
            self._drain_soon()  # an attempt to send may have consumed the descriptor's edge, be it successful or not
            if self.socket.closed or error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.ETERM, zmq.ENOTSOCK):
                return False
            raise
        self._look()
        return True

    def catch_up(self) -> None:
        """Let the socket take note of connections that are up. Within a millisecond of an attempt to send, the next one
        would not look for them, and would fail."""
        self._look()

    def close(self) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger=0)

    def _look(self) -> None:
        """Look for messages that have arrived. The descriptor is edge-triggered: when its edge has been consumed, ZMQ
        signals no further message before that one has been received."""
        if not self.socket.closed and self._is_readable():
            self._drain_soon()

    def _drain_soon(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Pass on the messages that are there, those beyond ``_MAX_FRAMES_PER_TURN`` in a later turn of the loop."""
        self._drain_scheduled = False
        if not self.socket.closed and self._is_readable():
            self._pass_on()

    def _is_readable(self) -> bool:
        """Return whether there is a message. To ask takes less time than to fail to receive."""
        return bool(int(self.socket.getsockopt(_EVENTS)) & _READABLE)

    def _pass_on_each(self) -> None:
        for _ in range(_MAX_FRAMES_PER_TURN):
            if self.socket.closed:
                return
            try:
                frames = self._receive_joined()
            except zmq.Again:
                return
            try:
                self._on_frames(frames)
            except BaseException:
                self._drain_soon()  # an error in one message must not delay those after it
                raise
        self._drain_soon()

    def _pass_on_together(self) -> None:
        receive = self.socket.recv
        messages: list[bytes] = []
        try:
            messages.append(receive(_AT_ONCE))
            if self._is_readable():  # mostly there is one message, or there are many
                while len(messages) < _MAX_FRAMES_PER_TURN:
                    messages.append(receive(_AT_ONCE))
                self._drain_soon()
        except zmq.Again:
            pass
        if messages:
            self._on_frames(messages)

    def _receive_joined(self) -> list[bytes]:
        # A frame knows whether more follow; to ask the socket takes longer than to receive a message.
        frame = self.socket.recv(_AT_ONCE, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = self.socket.recv(_AT_ONCE, copy=False)
            frames.append(frame.bytes)
        return frames


def bind_router_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", host: str, security: SocketSecurity, port: int = 0
) -> "tuple[zmq.Socket[bytes], str]":
    """Return a ROUTER socket on ``port`` (0: a free one) of ``host``, and its endpoint. Raises :class:`ConfigError`.

    It names its connections itself, and no connection can take another one's name (no ROUTER_HANDOVER): membership
    identifies a connection by its name.
    """
    socket = new_socket(context, zmq.ROUTER)
    security.protect_bound(socket)
    address = f"[{host}]" if ":" in host else host
    try:
        socket.setsockopt(zmq.IPV6, int(":" in host))
        socket.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        socket.close(linger=0)
        where = f"{host!r} port {port}" if port else repr(host)
        raise ConfigError(f"membership_host {where} can't be bound: {error.strerror}") from error
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


class FailedHandshakes:
    """Monitor of a bound socket for handshakes that fail because the peer has another secret, none where one is
    required, or one where none is expected. Calls ``on_failure`` with the peer's address, without its port; "" if the
    connection was closed before its address could be read.

    ZMQ doesn't report which handshake failed; the last accepted connection is assumed. Close the monitor before its
    socket.
    """

    def __init__(self, bound: "zmq.Socket[bytes]", on_failure: Callable[[str], None]) -> None:
        self._bound = bound
        self._on_failure = on_failure
        self._last_address = ""
        monitor = bound.get_monitor_socket(zmq.EVENT_ACCEPTED | _MISMATCH_EVENTS)
        self._monitor = LoopSocket(monitor, self._on_event)

    def close(self) -> None:
        if not self._bound.closed:
            self._bound.disable_monitor()
        self._monitor.close()

    def _on_event(self, frames: list[bytes]) -> None:
        event, value = int.from_bytes(frames[0][:2], "little"), int.from_bytes(frames[0][2:6], "little")
        if event == zmq.EVENT_ACCEPTED:
            self._last_address = _address_of_peer(value)
        elif event & _MISMATCH_EVENTS:
            self._on_failure(self._last_address)


def _address_of_peer(descriptor: int) -> str:
    """Return the peer's address of a connection that ZMQ owns; "" if ZMQ has closed it by now, and perhaps another
    socket has got its number."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            is_of_network = connection.family in (socket.AF_INET, socket.AF_INET6)
            return str(connection.getpeername()[0]) if is_of_network else ""
    except OSError:
        return ""


class WorkerLink:
    """The connection over which one worker incarnation receives requests and sends tokens.

    ``on_up`` is called once, when the worker has answered the connection's handshake, ``on_down`` once, when the
    connection breaks; a link that is down is never used again. ``patience_seconds``: time that the handshake has
    before the owner replaces the link. Raises :class:`ConfigError` for an endpoint that can't be dialled.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        info: WorkerInfo,
        router: Party,
        security: SocketSecurity,
        *,
        on_messages: Callable[["WorkerLink", list[bytes]], None],
        on_up: Callable[["WorkerLink"], None],
        on_down: Callable[["WorkerLink"], None],
        patience_seconds: float,
    ) -> None:
        self.info = info
        self.party = info.party
        self.dialled_at = asyncio.get_running_loop().time()
        self.patience_seconds = patience_seconds
        self._router = router
        self._from_worker = OneWay(self.party, router)
        self._on_up = on_up
        self._on_down = on_down
        if not info.endpoint.startswith("tcp://"):
            raise ConfigError(f"endpoint {info.endpoint!r} isn't a tcp:// address")
        try:
            socket, monitor = self._connect(context, security)
        except zmq.ZMQError as error:
            raise ConfigError(f"endpoint {info.endpoint!r} can't be dialled: {error.strerror}") from error
        self._monitor = LoopSocket(monitor, self._on_event)
        self._socket = LoopSocket(socket, lambda messages: on_messages(self, messages), joins_frames=False)

    def _connect(
        self, context: "zmq.Context[zmq.Socket[bytes]]", security: SocketSecurity
    ) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
        """Return the link's socket and its monitor; on an error, close both."""
        socket = new_socket(context, zmq.DEALER)
        try:
            security.protect_connecting(socket)
            socket.setsockopt(zmq.IPV6, 1)  # dials IPv4, too
            socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for a worker that isn't connected
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _DOWN_EVENTS)
            try:
                socket.connect(self.info.endpoint)
            except zmq.ZMQError:
                socket.disable_monitor()
                raise
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket, monitor

    def send(self, body: Body) -> bool:
        """Send a message; return False if the worker takes no more messages, or not fast enough."""
        return self._socket.send([encode(Envelope(self._router, self.party, body))])

    def bodies(self, messages: list[bytes]) -> list[Body] | None:
        """Return the bodies of the worker's messages to this router; None if one of them is anything else."""
        return self._from_worker.bodies(messages)

    def close(self) -> None:
        if self._socket.socket.closed:
            return
        # In this order: a stopping monitor sends an event, and would wait for ever if its other end were closed.
        self._socket.socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _on_event(self, frames: list[bytes]) -> None:
        event = int.from_bytes(frames[0][:2], "little")
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._socket.catch_up()
            self._on_up(self)
        elif event & _DOWN_EVENTS:
            self._on_down(self)


def new_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket
