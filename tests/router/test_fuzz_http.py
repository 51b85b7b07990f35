"""Hostile HTTP: no 500, no hang, nothing left over; and the OpenAPI document tells the truth (schemathesis).

``SPLITSERVE_FUZZ_REQUESTS`` sets how many requests there are (``scripts/long-tests http`` takes 10,000),
``SPLITSERVE_FUZZ_SEED`` where they begin.
"""

import contextlib
import http.client
import json
import os
import random
import select
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from router_harness import RouterProcess, ready, served_router, write_model_dir
from splitserve.protocol.request import Role
from waiting import PATIENCE_SECONDS, wait_until

NUM_REQUESTS = int(os.environ.get("SPLITSERVE_FUZZ_REQUESTS", "600"))
SEED = int(os.environ.get("SPLITSERVE_FUZZ_SEED", "0"))
ANSWERS = {200, 400, 404, 405, 408, 413, 415, 429, 503, 504}
MAX_MODEL_LEN = 256
HOSTILE_VALUES: list[Any] = [None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308, 5e-324]
HOSTILE_VALUES += [float("nan"), float("inf"), "", "\x00", "\ud800", "\U0010ffff", "x" * 3000, "<|im_end|>", "refuse"]
HOSTILE_VALUES += [
    [],
    {},
    [[]],
    [None],
    {"": ""},
    {"a": {"b": []}},
    [1, "1"],
    [[1], "a"],
    [-1],
    [400],
    [2**70],
    [[2**70]],
]
HOSTILE_VALUES += [["s"] * 17, ["s" * 1025], [1] * 257, [5] * 300, ["a"] * 50, ["", "a"], [[5], []]]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    path: Path = tmp_path_factory.mktemp("router") / "tiny"
    write_model_dir(path)
    with served_router(path, max_requests_in_flight=64) as (process, workers):
        for role in (Role.PREFILL, Role.DECODE, Role.MIXED):
            workers.start(f"{role}-0", role, max_model_len=MAX_MODEL_LEN).keep_record = False
        ready(process)
        yield process
    assert process.process.returncode == 0


@pytest.fixture(autouse=True)
def _nothing_is_left(router: RouterProcess) -> Iterator[None]:
    process = psutil.Process(router.process.pid)
    files, resident = process.num_fds(), process.memory_info().rss
    yield
    wait_until(lambda: router.metric("splitserve_requests_in_flight") == 0)
    wait_until(lambda: process.num_fds() <= files + 2)
    assert process.memory_info().rss - resident < 400 << 20  # large bodies leave the allocator with some
    status, _, answer = router.post("/v1/completions", prompt=[5, 6, 7], max_tokens=3, return_token_ids=True)
    assert status == 200 and answer["choices"][0]["token_ids"] == [5, 6, 7]


# ---- what the document promises ----


@pytest.mark.timeout(300 + NUM_REQUESTS // 10)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_answers_are_as_documented(router: RouterProcess, mode: str) -> None:
    from documented_answers import check_answers  # schemathesis: only the process that runs this test loads it

    check_answers(router.url, mode, count=NUM_REQUESTS // 6, first=SEED)


# ---- what no client library would send ----


def sound_body(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": rng.choice([1, 3, 20])}
    prompts = ["ein Käse 😀", [5, 6, 7], ["a", "b"], [[5], [6, 7]]]
    optional: dict[str, Any] = {
        "temperature": rng.choice([0, 0.7, 2]),
        "top_p": rng.choice([0.1, 1, 1e-300]),
        "top_k": rng.choice([-1, 0, 5, 2**31 - 1]),
        "seed": rng.choice([0, -(2**63), 2**64 - 1]),
        "stop": rng.choice(["x", ["a", "b"], []]),
        "stop_token_ids": rng.choice([[], [7], [399]]),
        "stream": rng.random() < 0.5,
        "user": "u",
        "n": 1,
        "return_route": True,
    }
    fields |= {name: optional[name] for name in rng.sample(list(optional), rng.randrange(5))}
    if rng.random() < 0.5:
        return fields | {"prompt": rng.choice(prompts)}
    return fields | {"messages": [{"role": "user", "content": rng.choice(["hi", [{"type": "text", "text": "hi"}]])}]}


def mutated(rng: random.Random, node: Any) -> Any:
    if isinstance(node, dict) and node and rng.random() < 0.9:
        name = rng.choice(list(node))
        match rng.randrange(8):
            case 0:
                return {key: value for key, value in node.items() if key != name}
            case 1:
                return node | {rng.choice(["surprise", "logprobs", "tools", "best_of"]): rng.choice(HOSTILE_VALUES)}
        return node | {name: mutated(rng, node[name])}
    if isinstance(node, list) and node and rng.random() < 0.7:
        index = rng.randrange(len(node))
        return [*node[:index], mutated(rng, node[index]), *node[index + 1 :]]
    return rng.choice(HOSTILE_VALUES)


def hostile_body(rng: random.Random) -> bytes:
    fields = sound_body(rng)
    for _ in range(rng.randrange(4)):
        fields = mutated(rng, fields)
    text = json.dumps(fields)
    match rng.randrange(14):
        case 0:
            return text.encode()[: rng.randrange(len(text) + 1)]
        case 1:
            return text.encode().replace(b'"', rng.choice([b"'", b'"\xff', b'\\"', b""]), 1)
        case 2:
            return (text[:-1] + f', "prompt": {json.dumps(rng.choice(HOSTILE_VALUES))}, "model": "tiny"}}').encode()
        case 3:
            opening = rng.choice(["[", '{"a":', '{"model":"tiny","prompt":[', '{"model":"tiny","messages":['])
            return (opening * rng.choice([10, 1000, 200_000])).encode()
        case 4:
            digits = rng.choice(["1" * 5000, "1e999999", "-1e-999999", "0." + "9" * 5000, "0x10", "1_000", "٣"])
            return f'{{"model": "tiny", "prompt": "a", "max_tokens": {digits}}}'.encode()
        case 5:
            return text.encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]), "surrogatepass")
        case 6:
            return rng.randbytes(rng.randrange(200))
        case 7:
            long = rng.choice(["a", " ", "ab ", "\u0301", "😀", "\x00"]) * rng.choice([1000, 100_000])
            return json.dumps({"model": "tiny", "prompt": long, "max_tokens": 1}).encode()
        case 8:
            kind = rng.choice(["refuse", "{{ 7*7 }}", "{% for x in range(10**9) %}{% endfor %}", "\ud800"])
            return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": kind}]}).encode()
    return text.encode()


def post(router: RouterProcess, path: str, body: bytes, headers: dict[str, str], *, chunked: bool) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*router.address, timeout=PATIENCE_SECONDS)
    try:
        content = iter([body[i : i + 1000] for i in range(0, len(body), 1000)]) if chunked else body
        connection.request("POST", path, content, headers, encode_chunked=chunked)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.timeout(300 + NUM_REQUESTS // 10)
def test_no_body_gives_an_internal_error(router: RouterProcess) -> None:
    rng = random.Random(SEED)
    for _ in range(NUM_REQUESTS * 2 // 3):
        path, body = rng.choice(["/v1/completions", "/v1/chat/completions"]), hostile_body(rng)
        kinds = ["application/json"] * 4 + ["text/plain", "multipart/form-data; boundary=x", "", "x" * 500]
        headers = {"Content-Type": rng.choice(kinds), "Content-Encoding": rng.choice(["identity", "identity", "gzip"])}
        chunked = rng.random() < 0.2
        if chunked:
            headers["Transfer-Encoding"] = "chunked"
        status, answer = post(router, path, body, headers, chunked=chunked)
        assert status in ANSWERS, (status, path, body[:500], answer[:500])
        if status != 200:
            error = json.loads(answer)["error"]
            assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 10_000


@pytest.mark.parametrize("chunked", [False, True])
def test_oversized_bodies_are_refused(router: RouterProcess, chunked: bool) -> None:
    """The answer may come before the body is sent, and the connection be cut under it: never a 200, never a hang."""
    body = b'{"model": "tiny", "prompt": "' + b"a" * (5 << 20) + b'"}'
    headers = {"Content-Type": "application/json"} | ({"Transfer-Encoding": "chunked"} if chunked else {})
    try:
        status, _ = post(router, "/v1/completions", body, headers, chunked=chunked)
    except (BrokenPipeError, ConnectionResetError):
        return
    assert status == 413


def test_many_large_bodies_at_once_are_bounded(router: RouterProcess) -> None:
    """Each is under the limit and never ends; beyond the memory for all of them there is an answer."""
    head = HEAD + b"Content-Length: %d\r\n\r\n" % (4 << 20)
    held = []
    resident = psutil.Process(router.process.pid).memory_info().rss
    answers: list[bytes] = []
    for _ in range(24):
        connection = socket.create_connection(router.address, timeout=10)
        held.append(connection)
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection.sendall(head + b"x" * 4_000_000)

    def is_refused() -> bool:
        readable, _, _ = select.select(held, [], [], 0.0)
        for connection in readable:
            with contextlib.suppress(ConnectionError):
                answers.append(connection.recv(65536))
        return any(answer.startswith(b"HTTP/1.1 429") for answer in answers)

    wait_until(is_refused, "no body was refused")
    assert psutil.Process(router.process.pid).memory_info().rss - resident < 400 << 20
    for connection in held:
        connection.close()


# ---- below HTTP ----

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"model": "tiny", "prompt": "a", "max_tokens": 200, "stream": true}'
RAW: list[Callable[[random.Random], bytes]] = [
    lambda rng: rng.randbytes(rng.randrange(2000)),
    lambda _: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    lambda rng: (
        b"GET /" + rng.randbytes(50).replace(b"\r", b"").replace(b"\n", b"") + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    ),
    lambda _: b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    lambda rng: b"GET /v1/models/%00%ff%c0%ae/../" + b"%" * rng.randrange(5) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    lambda _: b"GET / HTTP/1.1\r\n" + b"".join(b"H%d: x\r\n" % i for i in range(3000)) + b"\r\n",
    lambda _: HEAD + b"Content-Length: 10\r\nContent-Length: 20\r\n\r\n" + BODY,
    lambda _: HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    lambda _: HEAD + b"Content-Length: 99999999999999999999\r\n\r\n" + BODY,
    lambda _: HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + BODY,
    lambda _: HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + BODY,
    lambda _: HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY,
    lambda _: HEAD + b"Content-Length: 500\r\n\r\n" + BODY,  # and no more
    lambda _: HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,  # and away, in the middle of the stream
    lambda _: (HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY) * 5,
    lambda _: b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n\r\n",
    lambda _: b"OPTIONS * HTTP/1.1\r\n\r\n",
    lambda _: b"CONNECT x:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    lambda _: b"GET /health HTTP/0.9\r\n\r\n",
    lambda _: b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
]


@pytest.mark.timeout(300 + NUM_REQUESTS // 10)
def test_no_bytes_harm_the_server(router: RouterProcess) -> None:
    """Most of these connections end without an answer; some are reset, some stay open to the end."""
    rng = random.Random(SEED)
    held: list[socket.socket] = []
    for index in range(max(NUM_REQUESTS // 6, len(RAW) * 2)):
        connection = socket.create_connection(router.address, timeout=PATIENCE_SECONDS)
        data = RAW[index % len(RAW)](rng)
        cut = rng.randrange(len(data) + 1) if rng.random() < 0.3 else len(data)
        try:
            connection.sendall(data[:cut])
            if rng.random() < 0.3:
                connection.settimeout(0.05)
                answer = connection.recv(65536)
                assert not answer.startswith(b"HTTP/1.1 500"), data[:200]
        except (TimeoutError, ConnectionError):
            pass
        if rng.random() < 0.1:
            held.append(connection)
            continue
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    for connection in held:
        connection.close()
    assert router.request("GET", "/health")[0] == 200
    for connection in held:
        connection.close()
