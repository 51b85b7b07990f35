"""HTTP connections with bounds on the size and time of headers, on pipelined requests, and on their number.

uvicorn's protocol on httptools accepts headers of any size, for any time, from any number of connections. This one
counts the bytes that it feeds to the parser, and records since when each connection has an incomplete request:

- A request line with its headers is bounded by ``max_header_bytes`` (else 431) and ``header_seconds`` (else 408);
  trailers by as many bytes.
- A request that is answered before its end may take as long to end as a body may take. A client that doesn't read while
  an answer fills the buffers, or reads less than 16 KiB/s, may do so for once or twice as long as a connection may be
  idle, and for 8 s at least. Then the connection is closed.
- Beyond the maximum number of connections, the one that has been without a complete request for longest is closed in
  favour of a new one; if all are being served, the new one gets 503. It is accepted for that answer: a listener that
  stops accepting leaves clients and health checks in its backlog until one of the connections ends.
"""

import asyncio
import enum
import logging
import resource
import time
from typing import Any

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from splitserve.protocol.config import HttpLimits
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.http.access.request_id import note_arrival
from splitserve.router.http.api_error import ApiError
from splitserve.router.http.bodies.reader import BODY_SECONDS
from splitserve.router.http.sockets.answer_writers import JoinedHead, Unchunked
from splitserve.router.http.sockets.plain_head import plain_head
from splitserve.router.http.sockets.reading import Progress, arrived_bytes, measured_seconds, unread_bytes

log = logging.getLogger(__name__)

_SHARE_OF_DESCRIPTORS = 0.5
"""The other descriptors are for workers (about six each: membership, link, its monitor, KV events), log files etc."""
_MIN_CONNECTIONS = 8192
_LOG_INTERVAL_SECONDS = 1.0


class Connections:
    """State shared by the connections of one server: their bounds, and the order in which they give way."""

    def __init__(self, limits: HttpLimits, max_requests_in_flight: int, metrics: RouterMetrics) -> None:
        self.limits = limits
        self.incomplete: dict[BoundedHttp, None] = {}
        """Connections on which no complete request is being answered, the longest waiting first."""
        self._unread: dict[BoundedHttp, float] = {}  # by connection: since when its client has not read, oldest first
        self._metrics = metrics
        num_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = limits.max_connections or max(_MIN_CONNECTIONS, 2 * max_requests_in_flight)
        self.max_connections = min(wanted, int(num_descriptors * _SHARE_OF_DESCRIPTORS))
        self._next_log_at = 0.0

    def has_room(self, num_connections: int) -> bool:
        """Return whether the newest of ``num_connections`` may stay; close another one for it if necessary."""
        if num_connections <= self.max_connections:
            return True
        oldest = next(iter(self.incomplete), None)
        if oldest is None:
            return False
        del self.incomplete[oldest]
        oldest.evict()
        return True

    def note_unread(self, connection: "BoundedHttp", now: float) -> None:
        """Note that an answer fills the buffers: the client does not read it."""
        self._unread[connection] = now

    def note_read(self, connection: "BoundedHttp") -> None:
        """Note that the client reads on, or that the connection has ended."""
        self._unread.pop(connection, None)

    def unread(self, now: float) -> tuple[int, float]:
        """Return the number of connections whose client does not read its answer, and the longest such time."""
        return len(self._unread), now - next(iter(self._unread.values()), now)

    def count(self, reason: str, now: float) -> None:
        """Count a refusal, and log the first one of each second."""
        self._metrics.connections_refused.labels(reason).inc()
        if now >= self._next_log_at:
            self._next_log_at = now + _LOG_INTERVAL_SECONDS
            log.warning("refused an HTTP connection: %s (splitserve_connections_refused_total counts them)", reason)


class HttpConfig(uvicorn.Config):
    """uvicorn's settings for a server of bounded connections."""

    def __init__(self, app: Any, connections: Connections, **settings: Any) -> None:
        super().__init__(app, http=BoundedHttp, timeout_keep_alive=connections.limits.keep_alive_seconds, **settings)
        self.connections = connections


class _Input(enum.Enum):
    """Meaning of the next bytes of a connection."""

    IDLE = enum.auto()  # the beginning of a request, which may come at any time
    HEAD = enum.auto()  # a request line and headers
    BODY = enum.auto()  # a body with its chunks' sizes and trailers
    REFUSED = enum.auto()  # nothing: further bytes are dropped


class BoundedHttp(HttpToolsProtocol):
    """One connection with the bounds of :class:`Connections`."""

    config: HttpConfig

    def __init__(
        self,
        config: HttpConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._shared = config.connections
        self._limits = config.connections.limits
        self._input = _Input.IDLE
        # Bytes of the head, or since the last piece of the body. Complete headers are counted exactly, below; this one
        # bounds headers that never end, at twice the limit if a body or another request came in the same read.
        self._num_fed = 0
        self._num_header_bytes = 0  # in complete headers of the head, or of the trailers
        self._num_headers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._sent_by: float | None = None  # bytes of the first request were there when the connection was accepted
        self._plain_head = b""  # of a request for another protocol: its head without that wish
        self._fault: ApiError | None = None  # error for which a callback of the parser has stopped it

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if arrived_bytes(transport):
            self._sent_by = time.monotonic()
        if self._shared.has_room(len(self.connections)):
            self._shared.incomplete[self] = None
            self._start_timer(self._limits.header_seconds, self._on_late_headers)
        else:
            self._input = _Input.REFUSED
            self._write_error(ApiError(503, "there are too many connections: try again", code="too_many_connections"))
            transport.close()  # at once: descriptors are short

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        self._unset_unread_timer()
        self._shared.incomplete.pop(self, None)
        self._shared.note_read(self)
        super().connection_lost(exc)

    def evict(self) -> None:
        """Close this connection to make room for another one; it has no complete request."""
        self._shared.count("evicted", self.loop.time())
        self._input = _Input.REFUSED
        self.connections.discard(self)
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        if self._unread_timer is None and not self.transport.get_write_buffer_size():
            self.transport.abort()  # the kernel has the whole answer: it waits for the client by itself
            return
        if self._unread_timer is None:
            self._start_unread_timer()
        self._start_keep_alive()  # the client is still reading

    def _start_keep_alive(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    # ---- input ----

    def data_received(self, data: bytes) -> None:
        if len(data) <= self._limits.max_header_bytes - self._num_fed:
            self._feed(data)
            return
        rest = memoryview(data)
        while rest and self._input is not _Input.REFUSED:
            room = self._limits.max_header_bytes - self._num_fed
            if room == 0:
                self._refuse(self._too_large())
                return
            self._feed(rest[:room])
            rest = rest[room:]

    def _feed(self, data: bytes | memoryview) -> None:
        if self._input is _Input.REFUSED:
            return
        self._unset_keepalive_if_required()
        if not self.flow.write_paused:
            self._unset_unread_timer()  # it measures the end of an answer; a request's own may be written from now on
        if self._input is _Input.IDLE:
            self._input = _Input.HEAD  # blank lines before a request are part of it
        self._num_fed += len(data)
        try:
            self._parse(data)
            self._sent_by = None  # further bytes came later
        except httptools.HttpParserError as error:
            self._refuse(self._fault or ApiError(400, f"this is no valid HTTP/1.1: {error}", code="invalid_http"))
        if self._input is _Input.HEAD and self._timer is None:
            self._start_timer(self._limits.header_seconds, self._on_late_headers)

    def _parse(self, data: bytes | memoryview) -> None:
        """Parse bytes. A request for another protocol is served as if it hadn't asked for that: the parser stops after
        its head, and another one gets the head without the wish, and then the body."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                data = memoryview(data)[stop.args[0] :]
            head, self._plain_head = self._plain_head, b""
            if head:
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(head)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self._limits.max_pipelined:
            most = self._limits.max_pipelined
            self._stop_parser(ApiError(429, f"more than {most} requests wait on this connection", code="pipelined"))
        super().on_message_begin()
        self._input = _Input.HEAD
        self._num_header_bytes = self._num_headers = 0

    def on_url(self, url: bytes) -> None:
        self._num_header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value) + 4
        limits = self._limits
        if self._num_header_bytes > limits.max_header_bytes or self._num_headers > limits.max_headers:
            self._stop_parser(self._too_large())
        if self._input is _Input.HEAD:  # trailers are dropped: the request is served as its head specifies
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._stops_at_head():
            method, version = self.parser.get_method(), self.parser.get_http_version()
            self._plain_head = plain_head(method, self.url, version, self.headers)
            return
        if self.cycle is None or self.cycle.response_complete:  # else the request waits for the answer before it
            note_arrival(self.scope, self._sent_by, time.monotonic())
        super().on_headers_complete()
        self._stop_timer()
        self._input = _Input.BODY
        self._num_fed = self._num_header_bytes = self._num_headers = 0

    def on_body(self, body: bytes) -> None:
        self._num_fed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._stops_at_head():
            return
        super().on_message_complete()
        self._input = _Input.IDLE
        self._num_fed = 0
        if not self.cycle.response_complete:
            self._shared.incomplete.pop(self, None)
        else:  # it was answered before it had ended
            self._stop_timer()
            self._start_keep_alive()

    def _stops_at_head(self) -> bool:
        """Return whether the parser takes what follows the head for another protocol, which the head asks for."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    # ---- output ----

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        is_old = cycle.scope["http_version"] == "1.0"
        self._answer = Unchunked(self.transport) if is_old else JoinedHead(self.transport)
        cycle.transport = self._answer  # type: ignore[assignment]
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self._on_answered)
        self.tasks.add(task)

    def _on_answered(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if self.transport.is_closing():  # it closes once the client has read the rest: bound that time, too
            self._stop_timer()
            self._start_keep_alive()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._shared.note_unread(self, self.loop.time())
        self._start_unread_timer()

    def _start_unread_timer(self) -> None:
        self._measure(Progress(unread_bytes(self.transport), self.loop.time()))

    def _measure(self, progress: Progress) -> None:
        seconds = measured_seconds(self._limits.keep_alive_seconds)
        self._unread_timer = self.loop.call_later(seconds, self._on_unread, progress)

    def _on_unread(self, progress: Progress) -> None:
        """Close the connection if its client reads too slowly."""
        self._unread_timer = None
        if not self.transport.get_write_buffer_size():
            return
        if progress.is_too_slow(unread_bytes(self.transport), self.loop.time()):
            self.transport.abort()
        else:
            self._measure(progress)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._shared.note_read(self)
        self._unset_unread_timer()

    def _unset_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def on_response_complete(self) -> None:
        self._answer.flush()  # an answer to HEAD has no body
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            self._shared.incomplete[self] = None
            if self._input is _Input.BODY:
                self._start_timer(BODY_SECONDS, self.transport.abort)

    # ---- refusals ----

    def _on_late_headers(self) -> None:
        if self._num_fed == 0:
            self.transport.close()  # it never sent a byte
            return
        seconds = self._limits.header_seconds
        self._refuse(ApiError(408, f"the headers didn't come within {seconds:g} s", code="request_timeout"))

    def _too_large(self) -> ApiError:
        limits = self._limits
        what = "trailers or chunk extensions" if self._input is _Input.BODY else "request line and headers"
        text = f"{what} are larger than {limits.max_header_bytes} bytes, or more than {limits.max_headers}"
        return ApiError(431, text, code="headers_too_large")

    def _stop_parser(self, error: ApiError) -> None:
        """Stop the parser from within one of its callbacks; it can't be fed any more."""
        self._fault = error
        raise error

    def _refuse(self, error: ApiError) -> None:
        """Read no further. Answer, unless answers to earlier requests are in flight: then close after them."""
        is_own = self._input is _Input.BODY
        self._input = _Input.REFUSED
        self._stop_timer()
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and not is_own:
            self._shared.count(str(error.code), self.loop.time())
            self.cycle.keep_alive = False
            return
        if is_own and (not is_answering or self.cycle.response_started or self.pipeline):
            self._shared.count(str(error.code), self.loop.time())
            self.transport.abort()  # a further answer would be taken for that of another request
            return
        if is_own:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._write_error(error)
        # Closing with unread bytes would reset the connection and perhaps lose the answer: let the client read first.
        self.transport.write_eof()
        self.flow.resume_reading()
        self._start_timer(self._limits.linger_seconds, self.transport.abort)

    def _write_error(self, error: ApiError) -> None:
        self._shared.count(str(error.code), self.loop.time())
        body = error.encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *((name.encode(), value.encode()) for name, value in error.headers().items()),
        ]
        lines = b"".join(b"%s: %s\r\n" % pair for pair in headers)
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)

    def _start_timer(self, seconds: float, on_time: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, on_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
