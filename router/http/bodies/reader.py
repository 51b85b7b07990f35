"""Bodies of requests, read and parsed within bounds: each body's size, time and structure, and all bodies' memory."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from starlette.requests import Request

from splitserve.common.turns import Turns
from splitserve.router.http.access.request_id import arrival_of
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.bodies.shape import is_surely_small
from splitserve.router.http.parsing import RequestModel, parse, parse_checked

MAX_BODIES_AT_ONCE = 16  # of the largest size
BODY_SECONDS = 60.0  # a slower body occupies memory and a connection in vain


class BodyReader:
    """Reader and parser of one server's bodies; it counts the bytes in memory until they have been parsed."""

    def __init__(self, max_body_bytes: int, turns: Turns) -> None:
        self._max_bytes = max_body_bytes
        self._turns = turns
        self._num_bytes = 0
        # One thread: parsers hold the interpreter, so a second one would only delay the event loop.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def parse(self, request: Request, model: type[RequestModel]) -> tuple[RequestModel, int]:
        """Return the body as ``model``, and its size in bytes.

        Raises :class:`ApiError` as :meth:`read` does, and 400 that names the fault.
        """
        chunks: list[bytes] = []  # as in read(), whose context takes longer than the rest of a short body
        try:
            body = await self._receive(request, chunks, self._limit_of(request, self._max_bytes))
            if is_surely_small(body):
                await self._turns.take(arrival_of(request))
                return parse(model, body), len(body)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, parse_checked, model, body), len(body)
        finally:
            self._num_bytes -= sum(map(len, chunks))

    @asynccontextmanager
    async def read(self, request: Request, max_bytes: int = 0) -> AsyncIterator[bytes]:
        """Yield the whole body, of at most ``max_bytes`` (0: the server's limit); it is kept while the context is open.

        Raises :class:`ApiError` 413 if it is too large, 408 if too slow, 429 if all bodies take too much memory.
        """
        limit = self._limit_of(request, min(max_bytes or self._max_bytes, self._max_bytes))
        chunks: list[bytes] = []
        try:
            yield await self._receive(request, chunks, limit)
        finally:
            self._num_bytes -= sum(map(len, chunks))

    def _limit_of(self, request: Request, limit: int) -> int:
        """Return ``limit``. Raises :class:`ApiError` 413 for a body that is declared to be larger."""
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
            raise _too_large(limit)
        return limit

    async def _receive(self, request: Request, chunks: list[bytes], limit: int) -> bytes:
        """Receive the whole body; ``chunks`` gets what is counted, also of a body that doesn't end."""
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    self._num_bytes += len(chunk)
                    self._check(size, limit)
        except TimeoutError:
            raise ApiError(408, f"the body didn't come within {BODY_SECONDS:g} s", code="request_timeout") from None
        return b"".join(chunks)

    def _check(self, size: int, limit: int) -> None:
        if size > limit:
            raise _too_large(limit)
        if self._num_bytes > MAX_BODIES_AT_ONCE * self._max_bytes:
            raise ApiError(429, "too many large bodies are arriving at once: try again", code="too_many_requests")


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes; send less, or raise the server's --max-body-mib"
    return ApiError(413, message, code="body_too_large")
