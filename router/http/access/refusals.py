"""Answers to requests that were refused before they began, or whose handler failed, with a line in the log for each."""

import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from splitserve.common.logs import RateLimitedLog
from splitserve.router.http.access.request_id import request_id_of
from splitserve.router.http.api_error import ApiError

log = logging.getLogger(__name__)

_SHAPE_KEY = "splitserve.error_shape"

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
        return _answer(error, request.scope)

    async def _on_http_exception(self, request: Request, error: HTTPException) -> Response:
        """Answer 404 and 405 of the routing itself."""
        message = f"{error.detail}: {request.method} {request.url.path}"
        response = _answer(ApiError(error.status_code, message), request.scope)
        response.headers.update(error.headers or {})
        return response

    async def on_client_disconnect(self, request: Request, _error: ClientDisconnect) -> Response:
        """Log that the client is gone, and answer for the count."""
        if self._writes_lines:
            log.info("request %s cancelled: the client hung up before it began", request_id_of(request))
        return Response(status_code=400)  # the client is gone

    async def _on_unexpected(self, request: Request, _error: Exception) -> Response:
        response = internal_error(request.scope)
        response.headers["connection"] = "close"  # the framework raises the error anew, for which the server closes it
        return response


def shape_errors(request: Request, encode: Callable[[ApiError], bytes]) -> None:
    """Give the errors of a request the body that ``encode`` returns, in place of OpenAI's."""
    request.scope[_SHAPE_KEY] = encode


def internal_error(scope: Scope) -> Response:
    """Return the answer for a bug of ours, whose traceback is logged."""
    return _answer(ApiError(500, "internal error", code="internal_error"), scope)


def _answer(error: ApiError, scope: Scope) -> Response:
    encode: Callable[[ApiError], bytes] = scope.get(_SHAPE_KEY, ApiError.encode)
    return Response(encode(error), error.status, error.headers(), "application/json")
