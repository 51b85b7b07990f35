"""The bodies of requests, read within bounds: of one body's size and time, and of all bodies' memory."""

import asyncio

from starlette.requests import Request

from splitserve.router.api_error import ApiError

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_BYTES_AT_ONCE = 16 * MAX_BODY_BYTES
BODY_SECONDS = 60.0  # who takes longer holds memory and a connection for nothing


class BodyReader:
    """Reads the bodies of one server; counts what is in memory before it has been parsed."""

    def __init__(self) -> None:
        self._num_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises :class:`ApiError` 413 for one too large, 408 for one too slow, 429 when all bodies
        that are being read now would take too much memory."""
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > MAX_BODY_BYTES:
            raise _too_large()
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    size += len(chunk)
                    self._num_bytes += len(chunk)
                    self._check(size)
                    chunks.append(chunk)
        except TimeoutError:
            raise ApiError(408, f"the body didn't come within {BODY_SECONDS:g} s", code="request_timeout") from None
        finally:
            self._num_bytes -= size
        return b"".join(chunks)

    def _check(self, size: int) -> None:
        if size > MAX_BODY_BYTES:
            raise _too_large()
        if self._num_bytes > MAX_BYTES_AT_ONCE:
            raise ApiError(429, "too many large bodies are arriving at once: try again", code="too_many_requests")


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
