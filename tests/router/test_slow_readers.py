"""Clients that read an answer slowly: as long as they read on, they get all of it."""

import asyncio
import socket
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from splitserve.protocol.config import HttpLimits
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.http.sockets import reading
from splitserve.router.http.sockets.connections import BoundedHttp, Connections, HttpConfig
from waiting import PATIENCE_SECONDS

LIMITS = HttpLimits(keep_alive_seconds=1)
BODY = b"x" * (1 << 20)
PIECE = b"x" * (1 << 12)
READ_BYTES = 1 << 16
BUFFER_BYTES = 1 << 14  # of the kernel, on each side


@pytest.fixture(autouse=True)
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MIN_SECONDS", 1.0)


class Server:
    """A server of one answer: of ``BODY``, or of as much as the kernel takes, and a little more."""

    def __init__(self, *, fills_kernel: bool = False) -> None:
        self.num_sent = 0
        self._fills_kernel = fills_kernel
        settings = {"interface": "asgi3", "lifespan": "off", "log_config": None}
        self._config = HttpConfig(self._app, Connections(LIMITS, 8, RouterMetrics()), **settings)
        self._config.load()
        self._connection: BoundedHttp | None = None

    def connect(self) -> BoundedHttp:
        self._connection = BoundedHttp(self._config, ServerState(), {})
        return self._connection

    async def _app(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert self._connection is not None
        while self._connection.transport.get_write_buffer_size() == 0 if self._fills_kernel else not self.num_sent:
            await self._send(send, PIECE if self._fills_kernel else BODY)
        await self._send(send, PIECE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        self.num_sent += len(body)
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def read_slowly(
    closing: str,
    pauses: Iterator[float],
    *,
    read_bytes: int = READ_BYTES,
    sent_bytes: int = BUFFER_BYTES,
    fills_kernel: bool = False,
) -> bool:
    """Return whether a client gets its whole answer which makes these pauses (seconds) before it reads.
    ``read_bytes``: at once, after a pause; ``sent_bytes``: buffer of the server's kernel."""
    served = Server(fills_kernel=fills_kernel)
    loop = asyncio.get_running_loop()
    listener, client = socket.socket(), socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sent_bytes)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    client.setblocking(False)
    listener.bind(("127.0.0.1", 0))
    server = await loop.create_server(served.connect, sock=listener)
    text = b""
    try:
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, f"GET / HTTP/1.1\r\nHost: localhost\r\n{closing}\r\n".encode())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not text.endswith(b"\r\n0\r\n\r\n"):
                pause = next(pauses)
                await asyncio.sleep(pause)
                data = await loop.sock_recv(client, read_bytes if pause else READ_BYTES)
                if not data:
                    return False
                text += data
    except ConnectionResetError:
        return False
    finally:
        client.close()
        server.close()
    assert text.count(b"x") == served.num_sent
    return True


@pytest.mark.parametrize("closing", ["", "Connection: close\r\n"])
def test_a_client_that_reads_on_gets_its_whole_answer(closing: str) -> None:
    """A client that needs longer than a connection may be idle."""
    assert asyncio.run(read_slowly(closing, repeat(0.035)))


def test_bytes_that_the_own_kernel_keeps_back_do_not_make_a_client_slow() -> None:
    """The kernel takes more of the answer only when a third of its buffer is free, here after some seconds."""
    pauses = chain(repeat(0.1, 17), repeat(0.0))
    assert asyncio.run(read_slowly("", pauses, read_bytes=1 << 12, sent_bytes=1 << 18))


@pytest.mark.parametrize("closing", ["", "Connection: close\r\n"])
def test_the_end_of_an_answer_may_take_longer_than_a_connection_may_be_idle(closing: str) -> None:
    """The last bytes wait for the kernel when the handler has long returned."""
    pauses = chain(repeat(0.1, 17), repeat(0.0))
    assert asyncio.run(read_slowly(closing, pauses, read_bytes=1 << 12, sent_bytes=1 << 18, fills_kernel=True))


def test_a_rate_is_measured_over_more_than_a_step_and_one_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    seconds = reading.measured_seconds(1.0)
    assert reading.MIN_BYTES_PER_SECOND * seconds >= reading.STEP_BYTES
    assert reading.Progress(99, 0.0).is_too_slow(99, seconds) and not reading.Progress(99, 0.0).is_too_slow(98, seconds)
    assert reading.measured_seconds(75.0) == 75.0
    assert reading.Progress(1 << 20, 0.0).is_too_slow(0, 75.0)
    assert not reading.Progress(9 << 17, 0.0).is_too_slow(0, 75.0)


def test_a_client_that_reads_a_little_now_and_then_is_too_slow_before_long() -> None:
    progress = reading.Progress(1 << 30, 0.0)
    assert not progress.is_too_slow((1 << 30) - 200, 8.01)
    assert progress.is_too_slow((1 << 30) - 400, 16.01)


def test_a_client_that_does_not_read_loses_its_connection() -> None:
    """A client that pauses; bytes that the kernel takes count as read, so that it may take twice the time."""
    assert not asyncio.run(read_slowly("", chain([2.3], repeat(0.0))))


class TwoAnswers(Server):
    """A server of a short answer, whose end waits for the kernel, and of a long one."""

    async def _app(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        size = len(BODY) if self.num_sent else 1 << 15
        await self._send(send, b"x" * size)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_a_client_that_read_one_answer_slowly_gets_a_long_one_after_it() -> None:
    async def run() -> None:
        served, loop = TwoAnswers(), asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.setblocking(False)
        server = await loop.create_server(served.connect, sock=listener)
        try:
            await loop.sock_connect(client, listener.getsockname())
            # The first time longer than a connection may be idle, then while that answer's rate would be measured.
            for first_pause, pauses in ((1.1, repeat(0.0)), (0.0, chain(repeat(0.05, 22), repeat(0.0)))):
                await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await asyncio.sleep(first_pause)
                text = b""
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while not text.endswith(b"\r\n0\r\n\r\n"):
                        await asyncio.sleep(next(pauses))
                        data = await loop.sock_recv(client, READ_BYTES)
                        assert data, f"closed after {len(text)} bytes"
                        text += data
        finally:
            client.close()
            server.close()

    asyncio.run(run())
