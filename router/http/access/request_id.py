"""The id of an HTTP request: the client's own (X-Request-Id), or a new one; answers carry it, too. With tracing, its
position in a trace likewise (traceparent); and the time of its arrival.

Ids of the requests inside the cluster begin with it, so that one name finds a request in all logs.
"""

import re
import secrets
import time
from collections.abc import Awaitable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitserve.router.tracing.context import TraceContext
from splitserve.router.tracing.tracing import NoTracing

_HEADER = b"x-request-id"
_KEY = "splitserve.request_id"
_TRACE_KEY = "splitserve.trace"
_ARRIVAL_KEY = "splitserve.arrived_at"
_READ_KEY = "splitserve.read_at"
_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_NUM_RANDOM_BYTES = 12


class GiveRequestIds:
    """ASGI middleware that gives each request an id, which the answer has as X-Request-Id. A client's id that isn't of
    letters, digits and ``._:-``, at most 128, is replaced. ``tracing`` gives it the position in a trace."""

    def __init__(self, app: ASGIApp, tracing: NoTracing) -> None:
        self._app = app
        self._tracing = tracing

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        request_id = _given(scope["headers"]) or secrets.token_hex(_NUM_RANDOM_BYTES).encode()
        scope[_KEY] = request_id.decode()
        trace = scope[_TRACE_KEY] = self._tracing.begin(scope["headers"])
        added = [(_HEADER, request_id), *(() if trace is None else trace.headers())]

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            return send(message)

        return self._app(scope, receive, send_with_id)


def request_id_of(request: Request) -> str:
    """Return the id that :class:`GiveRequestIds` gave."""
    request_id: str = request.scope[_KEY]
    return request_id


def trace_of(request: Request) -> TraceContext | None:
    """Return the position in a trace that :class:`GiveRequestIds` gave; None without tracing."""
    trace: TraceContext | None = request.scope[_TRACE_KEY]
    return trace


def note_arrival(scope: Any, sent_by: float | None, now: float) -> None:
    """Note that the head of a request has been read now; ``sent_by``: it, or its begin, was there at that time."""
    scope[_ARRIVAL_KEY] = now if sent_by is None else sent_by
    scope[_READ_KEY] = now


def arrival_of(request: Request) -> float:
    """Return the time at which the request arrived, on the monotonic clock."""
    arrived_at: float | None = request.scope.get(_ARRIVAL_KEY)
    return time.monotonic() if arrived_at is None else arrived_at


def reading_of(request: Request) -> float:
    """Return the time at which the request's head was read, likewise; 0.0: not known."""
    read_at: float = request.scope.get(_READ_KEY, 0.0)
    return read_at


def _given(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    given = [value for name, value in headers if name == _HEADER]
    return given[0] if len(given) == 1 and _ID.fullmatch(given[0]) else b""
