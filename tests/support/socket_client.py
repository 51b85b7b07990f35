"""Client in a process of its own that takes its times at the socket: when it sends, and when the kernel has received
the first event of a stream (SO_TIMESTAMPNS), so that its own waits for a core don't count. Not a test module.

    python tests/support/socket_client.py < requests.json > times.json

Standard input is a JSON object: ``host``, ``port``, and ``requests``, a list of objects with ``after`` (seconds after
the start), ``head`` and ``body``. Standard output is a list of ``[sent_at, first_event_at]`` in their order, seconds of
CLOCK_MONOTONIC; null for a request without an event.
"""

import json
import selectors
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any

SO_TIMESTAMPNS = 35  # Linux; the module socket doesn't have it
FIRST_EVENT = b"data: {"
PATIENCE_SECONDS = 120.0
_TIMESPEC = struct.Struct("@qq")


@dataclass
class Stream:
    """A request that was sent, and the begin of its answer."""

    connection: socket.socket
    sent_at: float
    received: bytes = b""
    first_event_at: float | None = None


@dataclass
class Client:
    """Sends requests when they are due, from one thread, and reads their answers as they come."""

    address: tuple[str, int]
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self, requests: list[dict[str, Any]]) -> list[list[float] | None]:
        """Return the times of each request."""
        began_at, streams = time.monotonic(), []
        for request in requests:
            self._read_until(began_at + request["after"])
            streams.append(self._send((request["head"] + request["body"]).encode()))
        end = time.monotonic() + PATIENCE_SECONDS
        while self.selector.get_map() and time.monotonic() < end:
            self._read_until(time.monotonic() + 0.1)
        return [None if each.first_event_at is None else [each.sent_at, each.first_event_at] for each in streams]

    def _send(self, message: bytes) -> Stream:
        connection = socket.create_connection(self.address, timeout=PATIENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        stream = Stream(connection, time.monotonic())
        connection.sendall(message)
        self.selector.register(connection, selectors.EVENT_READ, stream)
        return stream

    def _read_until(self, due_at: float) -> None:
        """Read what comes until then."""
        while (seconds := due_at - time.monotonic()) > 0:
            for key, _ in self.selector.select(seconds):
                self._read(key.data)

    def _read(self, stream: Stream) -> None:
        data, ancillary, _, _ = stream.connection.recvmsg(1 << 16, socket.CMSG_SPACE(_TIMESPEC.size))
        if not data:
            self.selector.unregister(stream.connection)
            stream.connection.close()
            return
        if stream.first_event_at is None:
            stream.received += data
            if FIRST_EVENT in stream.received:
                stream.first_event_at = _kernel_time(ancillary)


def _kernel_time(ancillary: list[tuple[int, int, bytes]]) -> float:
    """Return the kernel's time of what was just received, on CLOCK_MONOTONIC; now, where it gives none."""
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack(value[: _TIMESPEC.size])
            return float(seconds + nanoseconds / 1e9 - (time.time() - time.monotonic()))
    return time.monotonic()


def main() -> None:
    given = json.load(sys.stdin)
    json.dump(Client((given["host"], given["port"])).run(given["requests"]), sys.stdout)


if __name__ == "__main__":
    main()
