"""Bounds of the router's HTTP connections: what is refused, with which answer, and what goes on beside it."""

import asyncio
import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest

from router_harness import RouterProcess, ready, served_router, write_model_dir
from splitserve.benchmarks.attacks.http import CHUNKED, HEALTH, send_all
from splitserve.benchmarks.router.worker_script import default_script
from splitserve.protocol.config import HttpLimits
from splitserve.protocol.request import Role
from splitserve.router.http.sockets.answer_writers import JoinedHead, Unchunked
from waiting import PATIENCE_SECONDS, wait_until

LIMIT = 64 * 1024
NUM_CONNECTIONS = 20
LIMITS = HttpLimits(header_seconds=2.0, keep_alive_seconds=4, linger_seconds=0.5, max_connections=NUM_CONNECTIONS)
JSON = "Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("router") / "tiny"
    write_model_dir(path)
    return path


@pytest.fixture(scope="module")
def router(model: Path) -> Iterator[RouterProcess]:
    with served_router(model, http=LIMITS, max_requests_in_flight=NUM_CONNECTIONS) as (process, workers):
        script = default_script(tokens_per_message=1, token_seconds=0.02)
        workers.start("m0", Role.MIXED, script, max_model_len=4096)
        ready(process)
        yield process
    assert process.process.returncode == 0


@pytest.fixture(autouse=True)
def _no_connection_is_left(router: RouterProcess) -> Iterator[None]:
    wait_until(lambda: num_connections(router) == 0)
    yield
    wait_until(lambda: num_connections(router) == 0)


def num_connections(router: RouterProcess) -> int:
    """HTTP connections that the router holds."""
    connections = psutil.Process(router.process.pid).net_connections("tcp")
    return sum(c.laddr.port == router.address[1] and c.status != psutil.CONN_LISTEN for c in connections)


def connect(router: RouterProcess, *sent: bytes) -> socket.socket:
    connection = socket.create_connection(router.address, timeout=PATIENCE_SECONDS)
    send_all(connection, sent)
    return connection


def everything(connection: socket.socket) -> bytes:
    """All that comes until the router closes the connection."""
    text = b""
    with connection:
        try:
            while piece := connection.recv(1 << 16):
                text += piece
        except ConnectionResetError:
            pass
    return text


def error_of(answer: bytes) -> tuple[int, str, str]:
    """Status, code and message of the one answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head and b"content-type: application/json" in head, answer
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head[9:12]), error["code"], error["message"]


def padded(num_bytes: int, name: bytes = b"X") -> bytes:
    """A GET of exactly so many bytes."""
    rest = b"Connection: close\r\n" + name + b": "
    return HEALTH + rest + b"a" * (num_bytes - len(HEALTH + rest) - 4) + b"\r\n\r\n"


# ---- size ----


def test_headers_up_to_the_limit_are_served(router: RouterProcess) -> None:
    assert everything(connect(router, padded(LIMIT))).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "request_bytes",
    [
        padded(LIMIT + 1),
        HEALTH + b"X: " + b"a" * LIMIT,  # without an end
        HEALTH + b"".join(b"X%d: %s\r\n" % (i, b"a" * 1000) for i in range(100)),
        HEALTH + b"a: b\r\n" * 256 + b"\r\n",  # and the host
        b"GET /" + b"a" * LIMIT + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        CHUNKED + b"0\r\nX: " + b"a" * 2 * LIMIT,
        CHUNKED + b"0\r\n" + b"X: %s\r\n" % (b"a" * 1000) * 66 + b"\r\n",
        CHUNKED + b"0\r\n" + b"a: b\r\n" * 257 + b"\r\n",
        CHUNKED + b"1;" + b"a" * 2 * LIMIT,
        b"\r\n" * LIMIT,
    ],
    ids=["header", "endless", "long", "many", "url", "trailer", "trailers", "many trailers", "extension", "blank"],
)
def test_headers_beyond_the_limit_are_refused(router: RouterProcess, request_bytes: bytes) -> None:
    status, code, message = error_of(everything(connect(router, request_bytes)))
    assert (status, code) == (431, "headers_too_large") and "65536 bytes" in message and "256" in message


def test_pieces_add_up(router: RouterProcess) -> None:
    connection = connect(router, HEALTH)
    for _ in range(70):
        send_all(connection, [b"X: " + b"a" * 1000 + b"\r\n"])
        time.sleep(0.002)
    assert error_of(everything(connection))[0] == 431
    whole = padded(LIMIT)
    connection = connect(router)
    for begin in range(0, len(whole), 5000):
        send_all(connection, [whole[begin : begin + 5000]])
        time.sleep(0.002)
    assert everything(connection).startswith(b"HTTP/1.1 200")


def test_large_bodies_and_small_trailers_are_no_headers(router: RouterProcess) -> None:
    body = json.dumps({"model": "tiny", "prompt": [5] * 60_000, "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Connection: close\r\n".encode()
    chunks = b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in (body[:5], body[5:100_000], body[100_000:]))
    trailers = b"X-A: b\r\nContent-Type: text/plain\r\nAuthorization: Bearer x\r\n"
    for rest in (b"Content-Length: %d\r\n\r\n" % len(body) + body, b"Transfer-Encoding: chunked\r\n\r\n" + chunks):
        ending = b"0\r\n" + trailers + b"\r\n" if b"chunked" in rest else b""
        answer = everything(connect(router, head + rest + ending))
        assert answer.startswith(b"HTTP/1.1 400") and b"context_length_exceeded" in answer


def test_garbage_is_refused_in_the_usual_shape(router: RouterProcess) -> None:
    status, code, _ = error_of(everything(connect(router, b"\x16\x03\x01 this is TLS\r\n\r\n")))
    assert (status, code) == (400, "invalid_http")


# ---- other protocols ----

WISH = "Connection: {}Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"  # as Java's client sends
DETOKENIZE = b'{"tokens": [50, 51, 52]}'
IN_CHUNKS = b"a\r\n%s\r\ne\r\n%s\r\n0\r\n\r\n" % (DETOKENIZE[:10], DETOKENIZE[10:])


@pytest.mark.parametrize("piece", [7, 1 << 16])
@pytest.mark.parametrize("closing", ["", "close, "])
@pytest.mark.parametrize(
    ("length", "body"), [("Content-Length: 24", DETOKENIZE), ("Transfer-Encoding: chunked", IN_CHUNKS)]
)
def test_a_request_for_another_protocol_is_served_with_its_body(
    router: RouterProcess, length: str, body: bytes, closing: str, piece: int
) -> None:
    head = f"POST /detokenize HTTP/1.1\r\nHost: localhost\r\n{JSON}{WISH.format(closing)}{length}\r\n\r\n"
    asked = head.encode() + body + (b"" if closing else HEALTH + f"{WISH.format('')}\r\n".encode() + padded(100))
    answers = everything(connect(router, *(asked[begin : begin + piece] for begin in range(0, len(asked), piece))))
    assert answers.count(b"HTTP/1.1 200") == answers.count(b"HTTP/1.1") == (1 if closing else 3), answers
    assert b'{"prompt":"' in answers


# ---- time ----


def test_slow_headers_end_with_408(router: RouterProcess) -> None:
    start = time.monotonic()
    connections = [connect(router, beginning) for beginning in (HEALTH + b"X: ", b"GET /", b"\r\n")]
    silent = connect(router)
    for _ in range(8):
        for connection in connections:
            send_all(connection, [b"\r\n" if connection is connections[2] else b"a"])
        time.sleep(0.1)
    for connection in connections:
        status, code, message = error_of(everything(connection))
        assert (status, code) == (408, "request_timeout") and "2 s" in message
    assert everything(silent) == b""
    assert time.monotonic() - start > 1.9


def test_a_later_request_has_the_same_time_and_idle_connections_have_more(router: RouterProcess) -> None:
    kept = http.client.HTTPConnection(*router.address, timeout=PATIENCE_SECONDS)
    kept.request("GET", "/health")
    assert kept.getresponse().read()
    time.sleep(LIMITS.header_seconds + 0.5)
    kept.request("GET", "/health")
    assert kept.getresponse().read()
    assert kept.sock is not None
    begun = time.monotonic()
    idle = connect(router, HEALTH + b"\r\n")
    send_all(kept.sock, [HEALTH])  # and no more
    assert error_of(everything(kept.sock))[0] == 408
    assert time.monotonic() - begun > LIMITS.header_seconds - 0.1
    assert everything(idle).count(b"HTTP/1.1") == 1
    assert time.monotonic() - begun > LIMITS.keep_alive_seconds - 0.1


def test_a_request_may_end_after_its_answer(router: RouterProcess) -> None:
    connection = connect(router, b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}}"):
        answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 405")
    send_all(connection, [b"0123456789"])
    time.sleep(0.1)
    send_all(connection, [HEALTH + b"\r\n"])
    assert everything(connection).startswith(b"HTTP/1.1 200")  # then it is closed as any idle connection is


def test_answers_that_are_not_read_hold_no_connection(router: RouterProcess) -> None:
    """The client asks until what it doesn't read fills all buffers on the way."""
    counter = 'splitserve_http_requests_total{endpoint="/openapi.json",status="200"}'
    with connect(router) as connection:
        is_full, asked = False, router.metric(counter)
        while not is_full:
            asked += 16
            send_all(connection, [b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 16])
            end_of_wait = time.monotonic() + 1.0
            while not is_full and router.metric(counter) < asked:
                is_full = time.monotonic() > end_of_wait
        wait_until(lambda: num_connections(router) == 0)


# ---- requests in line ----


def test_some_pipelined_requests_are_answered_in_order_and_no_more(router: RouterProcess) -> None:
    paths = ["/health", "/version", "/nothing"] * 4
    requests = b"".join(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths)
    with connect(router, requests + padded(500)) as connection:
        answers = everything(connection).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"404"] * 4 + [b"200"]
    answers = everything(connect(router, (HEALTH + b"\r\n") * 2000)).split(b"HTTP/1.1 ")[1:]
    assert len(answers) == LIMITS.max_pipelined + 1 and b"connection: close" in answers[-1]
    assert b"connection: close" not in answers[0]


@pytest.mark.parametrize(
    ("junk", "num_tokens"),
    [(b"junk\r\n\r\n", 30), (HEALTH + b"X: " + b"a" * 2 * LIMIT, 30), (HEALTH, 150)],  # the last is slow headers
    ids=["garbage", "large", "slow"],
)
def test_what_follows_a_stream_never_breaks_it(router: RouterProcess, junk: bytes, num_tokens: int) -> None:
    fields = {"model": "tiny", "prompt": [5, 6], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(body)}\r\n\r\n"
    connection = connect(router, head.encode() + body)
    first = connection.recv(65536)
    send_all(connection, [junk])
    text = first + everything(connection)
    assert text.count(b"HTTP/1.1") == 1 and text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), text[-500:]
    assert text.count(b"data: ") >= num_tokens


# ---- heads ----


def test_a_head_is_written_with_the_beginning_of_its_body() -> None:
    transport = mock.Mock(spec=asyncio.Transport)
    answer = JoinedHead(transport)
    for data in (b"HTTP/1.1 100 Continue\r\n\r\n", b"head", b"body", b"more"):
        answer.write(data)
    answer.close()
    calls = [mock.call.write(b"HTTP/1.1 100 Continue\r\n\r\n"), mock.call.write(b"headbody"), mock.call.write(b"more")]
    assert transport.method_calls == [*calls, mock.call.close()]


def test_a_head_without_a_body_is_written_before_the_end() -> None:
    transport = mock.Mock(spec=asyncio.Transport)
    answer = JoinedHead(transport)
    answer.write(b"head")
    answer.close()
    assert transport.method_calls == [mock.call.write(b"head"), mock.call.close()]


def test_a_client_of_http_1_0_gets_no_chunks(router: RouterProcess) -> None:
    fields = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3}
    for stream in (False, True):
        body = json.dumps({**fields, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\n{JSON}Content-Length: {len(body)}\r\n\r\n"
        with connect(router, head.encode() + body) as connection:
            head_lines, _, answer = everything(connection).partition(b"\r\n\r\n")
        assert b" 200 " in head_lines and b"transfer-encoding" not in head_lines and b"connection: close" in head_lines
        if stream:
            events = answer.split(b"\n\n")
            assert events[-2:] == [b"data: [DONE]", b""] and all(each.startswith(b"data: ") for each in events[:-1])
        else:
            assert json.loads(answer)["usage"]["completion_tokens"] == 3


def test_a_header_that_looks_like_chunks_stays() -> None:
    transport = mock.Mock(spec=asyncio.Transport)
    answer = Unchunked(transport)
    head = b"HTTP/1.1 200 OK\r\nx: transfer-encoding: chunked\r\n"
    for data in (head + b"transfer-encoding: chunked\r\n\r\n", b"b\r\n5\r\nb\r\n0\r\n\r\n\r\n0\r\n\r\n", b"0\r\n\r\n"):
        answer.write(data)
    assert transport.method_calls == [mock.call.write(head + b"\r\n5\r\nb\r\n0\r\n\r\n")]


def test_answers_without_bodies_are_heads(router: RouterProcess) -> None:
    with connect(router, b"HEAD" + HEALTH.removeprefix(b"GET") + b"\r\n") as connection:
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n")
        send_all(connection, [HEALTH + b"Connection: close\r\n\r\n"])
        assert everything(connection).endswith(b'{"status":"ok"}')


def test_a_client_may_wait_until_it_is_asked_for_its_body(router: RouterProcess) -> None:
    body = json.dumps({"model": "tiny", "prompt": [5, 6], "max_tokens": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(body)}\r\n"
    with connect(router, head.encode() + b"Expect: 100-continue\r\nConnection: close\r\n\r\n") as connection:
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        send_all(connection, [body])
        assert everything(connection).startswith(b"HTTP/1.1 200")


# ---- number ----


@pytest.mark.parametrize("beginning", [b"", HEALTH, HEALTH + b"\r\n", CHUNKED], ids=["silent", "half", "idle", "body"])
def test_the_longest_waiting_connection_gives_way(router: RouterProcess, beginning: bytes) -> None:
    refused = 'splitserve_connections_refused_total{reason="evicted"}'
    before = router.metric(refused)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(router, beginning)) for _ in range(NUM_CONNECTIONS)]
        assert router.request("GET", "/health")[0] == 200
        assert everything(held[0]).count(b"HTTP/1.1") == (beginning == HEALTH + b"\r\n")
        held[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            while held[-1].recv(65536):
                pass
        assert router.metric(refused) - before >= 1


def test_beyond_the_bound_newcomers_get_503_while_all_are_served(router: RouterProcess) -> None:
    fields = {"model": "tiny", "prompt": [5], "max_tokens": 4000, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(body)}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(router, head.encode() + body)) for _ in range(NUM_CONNECTIONS)]
        assert all(connection.recv(12) == b"HTTP/1.1 200" for connection in held)
        status, headers, answer = router.request("GET", "/health")
        assert status == 503 and answer["error"]["code"] == "too_many_connections" and headers["retry-after"] == "1"
        held.pop().close()
        wait_until(lambda: router.request("GET", "/health")[0] == 200)
