"""A server that streams events at a given pace, for checks of load generators: no model, no work per request.

Run it with ``python -m splitserve.benchmarks.serving.stream_server``; it prints its port. It answers any POST with a
completion of ``max_tokens`` tokens as server-sent events, ``--interval-ms`` apart.
"""

import argparse
import asyncio
import contextlib
import re
import sys
from collections.abc import Sequence

from splitserve.orchestration.cli.command_parser import CommandParser

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_TOKEN = _chunk(b'data: {"choices":[{"index":0,"text":"a","token_ids":[7],"finish_reason":null}]}\n\n')
_LAST = _chunk(b'data: {"choices":[{"index":0,"text":"a","token_ids":[7],"finish_reason":"length"}]}\n\n')
_DONE = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class StreamProtocol(asyncio.Protocol):
    """One connection; requests on it come one after another."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        """Forget the connection."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Begin the answer when a request is complete."""
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not separator or length is None or len(body) < int(length[1]):
            return
        self._buffer = body[int(length[1]) :]
        wanted = _MAX_TOKENS.search(body)
        if self._transport is not None:
            self._transport.write(_HEAD)
            self._next(asyncio.get_running_loop().time(), int(wanted[1]) if wanted else 1)

    def _next(self, due: float, left: int) -> None:
        if self._transport is None:
            return
        if left == 1:
            self._transport.write(_LAST + _DONE)
            return
        self._transport.write(_TOKEN)
        due += self._interval_seconds
        asyncio.get_running_loop().call_at(due, self._next, due, left - 1)


async def _serve(interval_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: StreamProtocol(interval_seconds), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the process is ended."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval-ms", type=float, default=0.0, help="time between the events of a stream")
    options = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options.interval_ms / 1e3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
