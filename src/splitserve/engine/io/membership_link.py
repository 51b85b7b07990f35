"""A worker's connection to one router's membership, and the monitor that reports when it is made."""

from collections.abc import Callable

import zmq

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class MembershipLink:
    """The connection to the membership at ``endpoint``, over a socket that ``new_socket`` makes. It has no identity of
    ours, since membership names its connections itself.

    Raises :class:`zmq.ZMQError` for an endpoint that can't be dialled.
    """

    def __init__(self, endpoint: str, new_socket: Callable[[], "zmq.Socket[bytes]"]) -> None:
        self.endpoint = endpoint
        self._new_socket = new_socket
        self.dial()

    def dial(self) -> None:
        """Connect, for the first time or after :meth:`close`."""
        self.socket = self._new_socket()
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.gave_up = False  # ZMQ has stopped trying
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError:
            self.close(linger_seconds=0.0)
            raise

    def has_new_connection(self) -> bool:
        """Take the monitor's events; return whether a connection was made."""
        is_connected = False
        while self.monitor.poll(0):
            event = int.from_bytes(self.monitor.recv_multipart()[0][:2], "little")
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                is_connected, self.gave_up = True, False
            else:
                self.gave_up = True
        return is_connected

    def close(self, linger_seconds: float) -> None:
        """Close the connection. A stopping monitor sends an event, so its socket is closed after it."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(linger_seconds * 1000))
