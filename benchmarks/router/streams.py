"""A client of streams that costs little: it counts the events of answers and keeps their times, and parses none."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

_END = b"\r\n0\r\n\r\n"
_EVENT = b"data: {"
_OK = b"HTTP/1.1 200"


@dataclass(slots=True)
class Answer:
    """One request's answer: times in seconds on the clock of ``time.perf_counter``."""

    sent_at: float
    first_at: float = 0.0  # of the head, which the router sends with the first token
    last_at: float = 0.0
    num_events: int = 0
    is_ok: bool = False
    status: int = 0
    event_times: list[float] = field(default_factory=list)  # where they are kept


class _Connection(asyncio.Protocol):
    """One kept-alive connection with at most one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer = Answer(0.0)
        self._tail = b""
        self._keeps_times = False
        self._done: asyncio.Future[None] | None = None
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's isn't derived from it

    async def exchange(self, request: bytes, *, keeps_times: bool) -> Answer:
        assert self._transport is not None
        self._answer = Answer(time.perf_counter())
        self._tail, self._keeps_times = b"", keeps_times
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        return self._answer

    def data_received(self, data: bytes) -> None:
        now, answer = time.perf_counter(), self._answer
        if not answer.first_at:
            answer.first_at = now
            answer.status = int(data[9:12])
            answer.is_ok = data.startswith(_OK)
        seen = self._tail + data
        count = seen.count(_EVENT)
        answer.num_events += count
        if self._keeps_times:
            answer.event_times.extend([now] * count)
        self._tail = seen[-(len(_EVENT) - 1) :]
        is_over = seen.endswith(_END) if answer.is_ok else True
        if is_over and self._done is not None and not self._done.done():
            answer.last_at = now
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.is_closed = True
        if self._done is not None and not self._done.done():
            self._answer.is_ok = False
            self._done.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class StreamClient:
    """Kept-alive connections to one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._idle: list[_Connection] = []

    def request(self, path: str, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> bytes:
        """Return the bytes of a POST."""
        lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines.append(f"content-length: {len(body)}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    async def post(self, request: bytes, *, keeps_times: bool = False) -> Answer:
        """Send a request and wait for the end of its answer."""
        connection = self._idle.pop() if self._idle else None
        if connection is None or connection.is_closed:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
        answer = await connection.exchange(request, keeps_times=keeps_times)
        if connection.is_closed or not answer.is_ok:
            connection.close()
        else:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


async def open_loop(
    send: Callable[[int], Awaitable[Answer]], due_seconds: Sequence[float]
) -> tuple[list[Answer], list[float]]:
    """Send each request when it is due, whether or not earlier ones are done. Returns the answers, and each request's
    delay behind its due time."""
    loop = asyncio.get_running_loop()
    start = loop.time() + 0.1
    tasks: list[asyncio.Future[Answer]] = []
    lags: list[float] = []
    for index, due in enumerate(due_seconds):
        delay = start + due - loop.time()
        if delay > 0:
            await asyncio.sleep(delay)
        lags.append(loop.time() - start - due)
        tasks.append(asyncio.ensure_future(send(index)))
    return list(await asyncio.gather(*tasks)), lags
