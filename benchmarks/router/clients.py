"""Clients for measuring the router: over HTTP to a router, and over the router's kind of socket to a worker."""

import asyncio
import os
import time
from array import array
from dataclasses import dataclass, field
from http import HTTPStatus

import zmq

from splitserve.common.errors import ConfigError
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.requests import LocalRequest, PeerRef, StepTokens
from splitserve.protocol.request import Party, RequestKey, SamplingParams
from splitserve.protocol.token_ids import TokenIds
from splitserve.protocol.wire import decode, encode
from splitserve.router.links.links import LoopSocket

_SHORT_PROMPT = array("i", range(100))
_READY_SECONDS = 30
_REQUEST_SECONDS = 60.0
_STREAM_LIMIT_BYTES = 16 << 20


@dataclass(slots=True)
class Arm:
    """Latencies of one arm in seconds, and the delays of its requests' dispatch."""

    first_seconds: list[float] = field(default_factory=list)
    last_seconds: list[float] = field(default_factory=list)
    lag_seconds: list[float] = field(default_factory=list)
    num_failed: int = 0


class HttpPool:
    """Kept-alive HTTP/1.1 connections, with as little client overhead as possible."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def get(self, path: str) -> int:
        """Send a GET; returns its status."""
        return (await self._exchange(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()))[0]

    async def post(self, path: str, body: bytes, arm: Arm) -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        start = time.perf_counter()
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                status, first = await self._exchange(head.encode() + body)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            status = 0
        if status != HTTPStatus.OK:
            arm.num_failed += 1
            return
        arm.first_seconds.append(first - start)
        arm.last_seconds.append(time.perf_counter() - start)

    async def _exchange(self, request: bytes) -> tuple[int, float]:
        """Send a request; returns the status and the time of the answer's head, at the answer's end."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(*self._address, limit=_STREAM_LIMIT_BYTES)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        first = time.perf_counter()
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await (reader.readexactly(int(length)) if length else reader.readuntil(b"\r\n0\r\n\r\n"))
        self._idle.append((reader, writer))
        return int(head[9:12]), first

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


class DirectClient:
    """Client that sends requests straight to the worker, over the same kind of socket as the router's."""

    def __init__(self, worker: PeerRef, output_tokens: int) -> None:
        self._worker = worker.party
        self._party = Party("bench", os.getpid())
        self._waiting: dict[str, tuple[float, Arm, asyncio.Future[None]]] = {}
        self._sampling = SamplingParams(max_tokens=output_tokens)
        self._num_sent = 0
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # an open loop: requests are sent however many are waiting
        socket.connect(worker.endpoint)
        self._socket = LoopSocket(socket, self._on_frames)

    async def call(self, arm: Arm, prompt: TokenIds = _SHORT_PROMPT) -> None:
        request_id = f"direct-{self._num_sent}"
        self._num_sent += 1
        done = asyncio.get_running_loop().create_future()
        body = LocalRequest(RequestKey(request_id), prompt, self._sampling, 60.0)
        start = time.perf_counter()
        self._waiting[request_id] = (start, arm, done)
        self._socket.send([encode(Envelope(self._party, self._worker, body))])
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                await done
        except TimeoutError:
            del self._waiting[request_id]
            arm.num_failed += 1

    def _on_frames(self, frames: list[bytes]) -> None:
        body = decode(frames[0]).body
        now = time.perf_counter()
        if not isinstance(body, StepTokens):
            return
        for delta in body.deltas:
            if delta.key.request_id not in self._waiting:  # abandoned
                continue
            start, arm, done = self._waiting[delta.key.request_id]
            if delta.position == 0:
                arm.first_seconds.append(now - start)
            if delta.finish_reason is not None:
                arm.last_seconds.append(now - start)
                del self._waiting[delta.key.request_id]
                done.set_result(None)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


async def wait_ready(pool: HttpPool) -> None:
    end = time.monotonic() + _READY_SECONDS
    while await pool.get("/ready") != 200:
        if time.monotonic() > end:
            raise ConfigError(f"the worker wasn't ready after {_READY_SECONDS} s")
        await asyncio.sleep(0.05)
