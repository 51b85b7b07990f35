"""Answers to requests that were refused before they began, or whose handler failed, with a line in the log for each."""

import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from splitserve.common.logs import RateLimitedLog
from splitserve.router.http.access.request_id import request_id_of
from splitserve.router.http.api_error import ApiError

log = logging.getLogger(__name__)

Handlers = dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]]


class Refusals:
    """Handlers of exceptions. Refusals for lack of room or of workers are logged at WARNING, at most one a second;
    ``writes_lines``: those that the client caused are logged, too."""

    def __init__(self, *, writes_lines: bool) -> None:
        self._writes_lines = writes_lines
        self._warnings = RateLimitedLog(log, logging.WARNING)

    def handlers(self) -> Handlers:
        """Return the handlers by the exceptions that they answer."""
        return {
            ApiError: self.on_api_error,
            HTTPException: self._on_http_exception,
            ClientDisconnect: self.on_client_disconnect,
            Exception: self._on_unexpected,
        }

    async def on_api_error(self, request: Request, error: ApiError) -> Response:
        """Answer an error, and log it."""
        request_id, path = request_id_of(request), request.url.path
        if error.status == 429 or error.status >= 500:
            line = f"request {request_id} refused ({error.status}), {path}: {error.message}"
            self._warnings.write(time.monotonic(), line)
        elif self._writes_lines:
            log.info("request %s refused (%d), %s: %s", request_id, error.status, path, error.message)
        return _answer(error)

    async def _on_http_exception(self, request: Request, error: HTTPException) -> Response:
        """Answer 404 and 405 of the routing itself."""
        response = _answer(ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}"))
        response.headers.update(error.headers or {})
        return response

    async def on_client_disconnect(self, request: Request, _error: ClientDisconnect) -> Response:
        """Log that the client is gone, and answer for the count."""
        if self._writes_lines:
            log.info("request %s cancelled: the client hung up before it began", request_id_of(request))
        return Response(status_code=400)  # the client is gone

    async def _on_unexpected(self, _request: Request, _error: Exception) -> Response:
        return internal_error()


def internal_error() -> Response:
    """Return the answer for a bug of ours; the server logs the traceback."""
    return _answer(ApiError(500, "internal error", code="internal_error"))


def _answer(error: ApiError) -> Response:
    return Response(error.encode(), error.status, error.headers(), "application/json")
