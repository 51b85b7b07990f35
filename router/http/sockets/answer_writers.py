"""The bytes of an answer on their way to the socket: fewer writes, and for old clients no chunks.

A writer takes the place of the transport in uvicorn's cycle of request and answer.
"""

import asyncio

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # it comes before the head, when the body is asked for
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class JoinedHead:
    """The transport of one answer, which writes its head together with the beginning of its body: each write is a
    system call, and wakes the client."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: bytes | None = b""  # None: the head is written
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """Write bytes, but hold the head."""
        if self._held is None:
            self._transport.write(data)
        elif self._held:
            self.flush(data)
        elif data == _CONTINUE:
            self._transport.write(data)
        else:
            self._held = data

    def flush(self, data: bytes = b"") -> None:
        """Write the head if it is held, and then ``data``."""
        held, self._held = self._held, None  # it isn't written again if that fails
        if held:
            self._transport.write(held + data)

    def close(self) -> None:
        """Close the connection after what was written."""
        self.flush()
        self._transport.close()


class Unchunked(JoinedHead):
    """The same for a client that speaks HTTP/1.0, which knows no chunks: the body ends with the connection."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_chunked: bool | None = None  # None: the head hasn't come

    def write(self, data: bytes) -> None:
        """Write bytes; of a body in chunks without their sizes. Each write is the head, or has one chunk at most."""
        if self._is_chunked is None:
            if data != _CONTINUE:
                self._is_chunked = _CHUNKED in data
            super().write(data.replace(_CHUNKED, b"\r\n", 1))
        elif not self._is_chunked:
            super().write(data)
        elif data and data != _LAST_CHUNK:
            size, _, rest = data.partition(b"\r\n")
            super().write(rest[: int(size, 16)])
