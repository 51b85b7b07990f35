"""One thread's connection to an LMCache server: requests and responses, and detection of a lost server.

ZMQ would reconnect by itself, to a server that no longer knows this worker. Here a lost connection stays lost, and the
next call reports it at once.
"""

import contextlib
import math
import time
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from splitserve.kvconnector.lmcache.wire import Operation, decode_answer, encode_request

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class LMCacheError(Exception):
    """Error of the server; the message describes it."""


class LMCacheLostError(LMCacheError):
    """The server is gone, hangs, or is not there yet."""


class Connection:
    """Connection to the server at ``endpoint``, in ZMQ's notation. Not thread-safe. Close it, or use it in a ``with``
    statement. Raises :class:`LMCacheLostError` if no socket can be opened, as when the process has no descriptors
    left."""

    def __init__(self, endpoint: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        with contextlib.ExitStack() as opened:
            try:
                self._socket = context.socket(zmq.DEALER)
                opened.callback(self._socket.close, 0)
                self._socket.linger = 0
                self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
                self._monitor = self._socket.get_monitor_socket(_LOST)
                opened.callback(self._monitor.close, 0)
                self._socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise LMCacheLostError(f"cannot open a connection: {error}") from error
            opened.pop_all()
        self._number = 0
        self._is_lost = False
        self._was_answered = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, operation: Operation, *arguments: Any, kind: Any = None, seconds: float) -> Any:
        """Send a request and return the result, as ``kind``.

        Raises :class:`LMCacheLostError` if it does not arrive within ``seconds`` or can no longer arrive, and
        :class:`LMCacheError` if it is not a ``kind``.
        """
        self.tell(operation, *arguments)
        deadline = time.monotonic() + seconds
        while not self._is_lost:
            frames = self._receive(deadline - time.monotonic())
            if frames is None:
                if time.monotonic() >= deadline:
                    raise LMCacheLostError(f"no response to {operation.name.lower()} within {seconds:g} s")
                continue
            try:
                number, result = decode_answer(frames, kind)
            except msgspec.MsgspecError as error:
                raise LMCacheError(f"cannot decode its response to {operation.name.lower()}: {error}") from error
            self._was_answered = True
            if number == self._number:
                return result
        raise LMCacheLostError("the connection is lost" if self._was_answered else "no server listens there")

    def tell(self, operation: Operation, *arguments: Any) -> None:
        """Send a request without waiting for the result."""
        self._number += 1
        try:
            self._socket.send_multipart(encode_request(self._number, operation, arguments), zmq.NOBLOCK)
        except zmq.Again as error:
            raise LMCacheLostError("it accepts no more requests") from error

    def _receive(self, seconds: float) -> list[bytes] | None:
        """Return the next message; None if none has arrived within ``seconds`` or the connection is lost. Messages that
        arrived before the loss are still returned."""
        ready = dict(self._poller.poll(max(0, math.ceil(seconds * 1e3))))
        if self._socket in ready:
            return self._socket.recv_multipart()
        if self._monitor in ready:
            event = recv_monitor_message(self._monitor)["event"]
            self._is_lost |= bool(event & _LOST)
        return None

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
