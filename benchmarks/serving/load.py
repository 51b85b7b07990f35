"""Open-loop client of OpenAI's streaming completions: each request is sent when it is due, whether or not earlier ones
are answered.

aiohttp rather than httpx: a token costs the client less, which matters when it shares cores with the measured system.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from splitserve.benchmarks.common.stats import RequestRecord


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


PROFILE_SECONDS = 20.0
"""Longest time in which workers may run the steps to be recorded."""

_decoder = msgspec.json.Decoder(_Chunk)


class StreamError(Exception):
    """Error event of the endpoint, or a stream that ended in an invalid way."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Endpoint under load."""

    base_url: str
    api_key: str = ""
    timeout_seconds: float = 600.0  # bounds one request as a whole

    @property
    def completions_url(self) -> str:
        root = self.base_url.rstrip("/")
        return f"{root}/completions" if root.endswith("/v1") else f"{root}/v1/completions"

    @property
    def profile_url(self) -> str:
        """URL of Splitserve's own request for profiles: workers record their next steps."""
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/admin/profile"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


async def run_load(
    endpoint: Endpoint,
    bodies: Sequence[dict[str, Any]],
    due_seconds: Sequence[float],
    max_concurrency: int = 0,
    records: list[RequestRecord] | None = None,
) -> list[RequestRecord]:
    """Send ``bodies`` at ``due_seconds`` from now; returns a record of each, in order. Failures are recorded, never
    raised.

    ``max_concurrency`` above 0 bounds the requests in flight (then the load is no open loop any more); the wait for a
    place counts as dispatch lag. ``records``, one per body, are filled while the load runs; by default new ones.
    """
    if records is None:
        records = [RequestRecord(due_seconds=due) for due in due_seconds]
    encoded = [msgspec.json.encode(body) for body in bodies]  # ahead of time: not part of any request's latency
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=endpoint.timeout_seconds),
        headers=endpoint.headers,
    ) as session:
        slots = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
        with no_collections():
            client = Client(session, endpoint.completions_url, slots, start=time.perf_counter())
            async with asyncio.TaskGroup() as tasks:
                for body, record in zip(encoded, records, strict=True):
                    await asyncio.sleep(max(0.0, client.start + record.due_seconds - time.perf_counter()))
                    tasks.create_task(client.send(body, record))
    return records


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Disable the collector: its pauses of milliseconds in this client would look like the server's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def take_profile(endpoint: Endpoint, num_steps: int, after_seconds: float) -> dict[str, Any]:
    """Have workers record ``num_steps`` of their steps, ``after_seconds`` from now; returns their reports by engine id.

    Never raises: any failure is under a report's "error".
    """
    await asyncio.sleep(after_seconds)
    try:
        async with (
            aiohttp.ClientSession(headers=endpoint.headers) as session,
            session.post(
                endpoint.profile_url, json={"num_steps": num_steps, "timeout_seconds": PROFILE_SECONDS}
            ) as response,
        ):
            text = await response.text()
            if response.status != HTTPStatus.OK:
                return {"any worker": {"error": f"HTTP {response.status}: {_shorten(text)}"}}
            workers: dict[str, Any] = msgspec.json.decode(text)["workers"]
            return workers
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, KeyError) as error:
        return {"any worker": {"error": f"{type(error).__name__}: {error}"}}


@dataclass(frozen=True, slots=True)
class Client:
    """Client of one load."""

    session: aiohttp.ClientSession
    url: str
    slots: contextlib.AbstractAsyncContextManager[None]
    start: float  # perf_counter() at the load's start

    async def send(self, body: bytes, record: RequestRecord, request_id: str = "") -> None:
        """Send a request and fill its record; never raises. ``request_id``: its X-Request-Id, "" for none."""
        async with self.slots:
            record.sent_seconds = time.perf_counter() - self.start
            try:
                await self._exchange(body, record, request_id)
            except (StreamError, msgspec.DecodeError) as error:
                record.error = str(error)
            except TimeoutError:
                record.error = "time-out"
            except aiohttp.ClientError as error:
                record.error = f"{type(error).__name__}: {error}"
            record.end_seconds = time.perf_counter() - self.start

    async def _exchange(self, body: bytes, record: RequestRecord, request_id: str) -> None:
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        async with self.session.post(self.url, data=body, headers=headers) as response:
            if response.status != HTTPStatus.OK:
                raise StreamError(f"HTTP {response.status}: {_shorten(await response.text())}")
            await _receive(response.content.iter_any(), record, self.start)


async def _receive(network_chunks: AsyncIterator[bytes], record: RequestRecord, start: float) -> None:
    """Read server-sent events up to ``[DONE]``. Raises :class:`StreamError` for an error event or an early end."""
    buffer = b""
    bare_end: float | None = None
    async for data in network_chunks:
        now = time.perf_counter() - start
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                return _check_complete(record, bare_end)
            if _take(_decoder.decode(payload), record, now):
                bare_end = now
    raise StreamError("the stream ended without [DONE]")


def _take(chunk: _Chunk, record: RequestRecord, now: float) -> bool:
    """Note a chunk that arrived at ``now``. Returns whether it is a bare end: a finish reason without text or ids.

    A token may have no text: half of a character, a special token, an id that the tokenizer lacks. So where the
    endpoint reports no ids, each chunk counts but a bare end.
    """
    if chunk.error is not None:
        raise StreamError(f"error event: {_shorten(msgspec.json.encode(chunk.error).decode())}")
    if chunk.usage is not None:
        record.input_tokens = chunk.usage.prompt_tokens
        record.output_tokens = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        record.cached_tokens = (details.cached_tokens or 0) if details else 0
    is_bare_end = False
    for choice in chunk.choices:
        if choice.finish_reason:
            record.finish_reason = choice.finish_reason
        if choice.token_ids:
            record.chunk_tokens.append(len(choice.token_ids))
            record.output_ids += choice.token_ids
        if choice.token_ids or choice.text or (choice.token_ids is None and not choice.finish_reason):
            record.chunk_seconds.append(now)
        else:
            is_bare_end = choice.token_ids is None
    return is_bare_end


def _check_complete(record: RequestRecord, bare_end: float | None) -> None:
    """Complete the record of a stream that has ended. ``bare_end``: arrival of its end if that was a bare one, which
    carried the last token if the endpoint counts one more than the chunks before it."""
    if not record.finish_reason:
        raise StreamError("the stream ended without a finish reason")
    if bare_end is not None and record.output_tokens == len(record.chunk_seconds) + 1:
        record.chunk_seconds.append(bare_end)
    if not record.output_tokens:  # no usage: count the received tokens
        record.output_tokens = sum(record.chunk_tokens) or len(record.chunk_seconds)
    if not record.chunk_seconds:
        raise StreamError("the stream ended without output")


def _shorten(text: str) -> str:
    return " ".join(text.split())[:200]
