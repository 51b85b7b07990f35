"""Clients that read an answer slowly: as long as they read on, they get all of it."""

import asyncio
import socket
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from splitserve.protocol.config import HttpLimits
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.http.sockets.connections import BoundedHttp, Connections, HttpConfig
from waiting import PATIENCE_SECONDS

LIMITS = HttpLimits(keep_alive_seconds=1)
BODY = b"x" * (1 << 20)
READ_BYTES = 1 << 16
BUFFER_BYTES = 1 << 14  # of the kernel, on each side


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(BODY)(scope, receive, send)


async def read_slowly(closing: str, pauses: Iterator[float]) -> int:
    """Return the bytes of the answer that a client got which makes these pauses (seconds) before it reads."""
    config = HttpConfig(answer, Connections(LIMITS, 8, RouterMetrics()), lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    listener, client = socket.socket(), socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    client.setblocking(False)
    listener.bind(("127.0.0.1", 0))
    server = await loop.create_server(lambda: BoundedHttp(config, ServerState(), {}), sock=listener)
    try:
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, f"GET / HTTP/1.1\r\nHost: localhost\r\n{closing}\r\n".encode())
        num_bytes = 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            while num_bytes < len(BODY):
                await asyncio.sleep(next(pauses))
                data = await loop.sock_recv(client, READ_BYTES)
                if not data:
                    break
                num_bytes += len(data)
    except ConnectionResetError:
        pass
    finally:
        client.close()
        server.close()
    return num_bytes


@pytest.mark.parametrize("closing", ["", "Connection: close\r\n"])
def test_a_client_that_reads_on_gets_its_whole_answer(closing: str) -> None:
    """A client that needs longer than a connection may be idle."""
    assert asyncio.run(read_slowly(closing, repeat(0.035))) >= len(BODY)


def test_a_client_that_does_not_read_loses_its_connection() -> None:
    """A client that pauses; bytes that the kernel takes count as read, so that it may take twice the time."""
    assert asyncio.run(read_slowly("", chain([2.3], repeat(0.0)))) < len(BODY)
