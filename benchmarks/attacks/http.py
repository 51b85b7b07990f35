"""Hostile HTTP clients, by name: :data:`ATTACKS`.

``python -m splitserve.benchmarks.attacks.http NAME HOST PORT SECONDS`` runs one of them in a process of its own, and
prints the number of its connections by outcome, as one line of JSON.

An attack takes the address and the seconds after which it ends; it counts outcomes: a status code, "closed" or "reset"
without an answer, "open" if the server still waits at the end. "newcomer" and a status is the answer to an ordinary
request in the middle of the attack.
"""

import contextlib
import http.client
import itertools
import json
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from splitserve.benchmarks.attacks.bodies import BODIES, HostileBody

Address = tuple[str, int]
Attack = Callable[[Address, float], Counter[str]]

_PIECE_BYTES = 1 << 20
_CONNECT_SECONDS = 10.0
_NUM_HALF_OPEN = 400

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"


def flood(address: Address, seconds: float, *, head: bytes, piece: bytes, num_bytes: int, end: bytes) -> Counter[str]:
    """Open one connection that sends ``head``, ``num_bytes`` in repetitions of ``piece``, and ``end``."""
    pieces = itertools.repeat(piece * max(1, _PIECE_BYTES // len(piece)), max(1, num_bytes // _PIECE_BYTES))
    with _connect(address) as connection:
        send_all(connection, itertools.chain([head], pieces, [end]))
        return Counter([outcome(connection, seconds)])


def one_large_header(address: Address, seconds: float) -> Counter[str]:
    return flood(address, seconds, head=HEALTH + b"X: ", piece=b"a", num_bytes=100_000_000, end=b"\r\n\r\n")


def many_short_headers(address: Address, seconds: float) -> Counter[str]:
    return flood(address, seconds, head=HEALTH, piece=b"a: b\r\n", num_bytes=200_000_000, end=b"\r\n")


def huge_url(address: Address, seconds: float) -> Counter[str]:
    return flood(
        address, seconds, head=b"GET /", piece=b"a", num_bytes=100_000_000, end=b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )


def large_trailers(address: Address, seconds: float) -> Counter[str]:
    return flood(address, seconds, head=CHUNKED + b"0\r\n", piece=b"a: b\r\n", num_bytes=200_000_000, end=b"\r\n")


def one_large_trailer(address: Address, seconds: float) -> Counter[str]:
    return flood(address, seconds, head=CHUNKED + b"0\r\nX: ", piece=b"a", num_bytes=100_000_000, end=b"\r\n\r\n")


def chunk_extension(address: Address, seconds: float) -> Counter[str]:
    return flood(address, seconds, head=CHUNKED + b"1;", piece=b"a", num_bytes=100_000_000, end=b"\r\na\r\n0\r\n\r\n")


def blank_lines(address: Address, seconds: float) -> Counter[str]:
    return flood(address, seconds, head=b"", piece=b"\r\n", num_bytes=100_000_000, end=HEALTH + b"\r\n")


def half_open(address: Address, seconds: float) -> Counter[str]:
    """Begin more requests than there are file descriptors and never finish them; counts newcomers' outcomes, too."""
    return hold(address, HEALTH + b"X-Half: ", _NUM_HALF_OPEN, seconds)


def silent(address: Address, seconds: float) -> Counter[str]:
    return hold(address, b"", _NUM_HALF_OPEN, seconds)


def unfinished_bodies(address: Address, seconds: float) -> Counter[str]:
    return hold(address, _POST + b"Content-Length: 1000\r\n\r\n{", _NUM_HALF_OPEN, seconds)


def answered_before_their_end(address: Address, seconds: float) -> Counter[str]:
    """Send requests that are answered without their bodies, and never send the bodies."""
    return hold(address, HEALTH + b"Content-Length: 1000\r\n\r\n", _NUM_HALF_OPEN, seconds)


def slow_headers(address: Address, seconds: float) -> Counter[str]:
    """Send a byte of a header now and then, so that the connection is never idle."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(_connect(address)) for _ in range(50)]
        for connection in held:
            send_all(connection, [HEALTH + b"X-Slow: "])
        end = time.monotonic() + seconds
        ended = Counter[str]()
        while held and time.monotonic() < end:
            for connection in list(held):
                if select.select([connection], [], [], 0)[0]:
                    ended[outcome(connection, 0.5)] += 1
                    held.remove(connection)
                else:
                    send_all(connection, [b"a"])
            time.sleep(0.5)
        ended["open"] += len(held)
        return +ended


def pipelined(address: Address, seconds: float) -> Counter[str]:
    """Send ten thousand requests at once on each of twenty connections, which read nothing until all are sent."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(_connect(address)) for _ in range(20)]
        for connection in held:
            connection.settimeout(0.5)
            send_all(connection, [(HEALTH + b"\r\n") * 10_000])
        return sum((count_answers(connection, seconds / len(held)) for connection in held), Counter())


def unread_answers(address: Address, seconds: float) -> Counter[str]:
    """Request large answers and don't read them."""
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return hold(address, request * 16, _NUM_HALF_OPEN // 4, seconds, reads=False)


def connections_in_a_row(address: Address, seconds: float) -> Counter[str]:
    """Open and close connections as fast as possible."""
    end = time.monotonic() + min(seconds, 5.0)
    ended = Counter[str]()
    while time.monotonic() < end:
        try:
            _connect(address).close()
            ended["closed"] += 1
        except OSError:
            ended["reset"] += 1
    return ended


def at_once(body: HostileBody, address: Address, seconds: float) -> Counter[str]:
    """Send a request several times at once, each on a connection of its own."""
    request = body.make()
    with ThreadPoolExecutor(body.times) as pool:
        return Counter(pool.map(lambda _: ask(address, request, seconds), range(body.times)))


CONNECTION_ATTACKS: dict[str, Attack] = {
    "one header of 100 MB": one_large_header,
    "200 MB of short headers": many_short_headers,
    "a URL of 100 MB": huge_url,
    "200 MB of short trailers": large_trailers,
    "one trailer of 100 MB": one_large_trailer,
    "a chunk extension of 100 MB": chunk_extension,
    "100 MB of blank lines": blank_lines,
    "400 half-open requests": half_open,
    "400 silent connections": silent,
    "400 unfinished bodies": unfinished_bodies,
    "400 answered before their end": answered_before_their_end,
    "50 slow headers": slow_headers,
    "20 times 10,000 pipelined requests": pipelined,
    "100 unread answers": unread_answers,
    "connections in a row": connections_in_a_row,
}
BODY_ATTACKS: dict[str, Attack] = {name: partial(at_once, body) for name, body in BODIES.items()}
ATTACKS = CONNECTION_ATTACKS | BODY_ATTACKS


# ---- their parts ----


def _connect(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=_CONNECT_SECONDS)


def send_all(connection: socket.socket, pieces: Iterable[bytes]) -> None:
    """Send until everything is sent, or the server stops reading, or has closed the connection."""
    with contextlib.suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)


def ask(address: Address, request: bytes, seconds: float) -> str:
    """Send a request, reading meanwhile; returns the status, "closed" without an answer, "open" for none in time."""
    deadline = time.monotonic() + seconds
    answer = b""
    with socket.create_connection(address, timeout=seconds) as connection:
        connection.setblocking(False)
        left = memoryview(request)
        while b"\r\n" not in answer:
            wait = deadline - time.monotonic()
            readable, writable, _ = select.select([connection], [connection] if left else [], [], max(0.0, wait))
            try:
                if readable:
                    piece = connection.recv(65536)
                    if not piece:
                        return "closed"
                    answer += piece
                elif writable:
                    left = left[connection.send(left) :]
                else:
                    return "open"
            except ConnectionError:
                return "closed"
    return answer.split(b" ", 2)[1].decode()


def outcome(connection: socket.socket, seconds: float) -> str:
    """Return the status of the connection's answer, or the way in which it ended without one."""
    connection.settimeout(max(0.01, seconds))
    try:
        line = connection.recv(65536)
    except TimeoutError:
        return "open"
    except OSError:
        return "reset"
    return line[9:12].decode(errors="replace") if line else "closed"


def count_answers(connection: socket.socket, seconds: float) -> Counter[str]:
    """Return the statuses of all answers on a connection, and its end."""
    connection.settimeout(max(0.01, seconds))
    text = b""
    try:
        while piece := connection.recv(1 << 20):
            text += piece
        end = "closed"
    except TimeoutError:
        end = "open"
    except OSError:
        end = "reset"
    return Counter([end, *(part[:3].decode() for part in text.split(b"HTTP/1.1 ")[1:])])


def hold(address: Address, beginning: bytes, count: int, seconds: float, *, reads: bool = True) -> Counter[str]:
    """Open connections that send ``beginning`` and then nothing, until the server ends them; returns outcomes, and
    newcomers'."""
    ended = Counter[str]()
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        held: list[socket.socket] = []
        for _ in range(count):
            try:
                connection = stack.enter_context(_connect(address))
            except OSError:
                ended["not connected"] += 1
                continue
            send_all(connection, [beginning])
            held.append(connection)
        ended[f"newcomer {newcomer(address)}"] += 1
        if not reads:
            time.sleep(max(0.0, end - time.monotonic()))
        while held and time.monotonic() < end:
            readable, _, _ = select.select(held, [], [], max(0.0, min(1.0, end - time.monotonic())))
            for connection in readable:
                how = outcome(connection, 0.5)
                ended[how] += 1
                if how == "200":
                    continue  # an answer, but not its end
                held.remove(connection)
        ended["open"] += len(held)
        ended[f"newcomer {newcomer(address)}"] += 1
    return +ended


def newcomer(address: Address, path: str = "/health") -> str:
    """Return the outcome of an ordinary request."""
    connection = http.client.HTTPConnection(*address, timeout=_CONNECT_SECONDS)
    try:
        connection.request("GET", path)
        return str(connection.getresponse().status)
    except TimeoutError:
        return "waits"
    except (OSError, http.client.HTTPException):
        return "reset"
    finally:
        connection.close()


def main(arguments: Sequence[str]) -> None:
    name, host, port, seconds = arguments
    print(json.dumps(ATTACKS[name]((host, int(port)), float(seconds))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
