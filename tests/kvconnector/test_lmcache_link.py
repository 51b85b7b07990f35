"""The link to an LMCache server while this process has no sockets left; no server is needed."""

from collections.abc import Iterator

import pytest
import zmq

from splitserve.kvconnector.lmcache.connection import Connection, LMCacheError, LMCacheLostError
from splitserve.kvconnector.lmcache.link import Epoch, LMCacheLink
from splitserve.protocol.memory_records import LayoutRecord
from waiting import PATIENCE_SECONDS, wait_until

LAYOUT = LayoutRecord("m", "w", "float32", 4, 3, 2, 8)
SOCKETS_PER_CONNECTION = 3  # its own, and both ends of its monitor


@pytest.fixture
def server() -> Iterator["zmq.Socket[bytes]"]:
    """A socket that requests arrive at."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listening:
        listening.linger = 0
        listening.bind("tcp://127.0.0.1:*")
        yield listening


def endpoint_of(server: "zmq.Socket[bytes]") -> str:
    return server.getsockopt_string(zmq.LAST_ENDPOINT)


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    """Sockets for one connection."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS_PER_CONNECTION)
    yield context
    context.destroy(0)


def wait_until_there_is_room(server: "zmq.Socket[bytes]", context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Connect, once ZMQ has closed other sockets, which it does on a thread of its own."""

    def can_connect() -> bool:
        try:
            Connection(endpoint_of(server), context).close()
        except LMCacheLostError:
            return False
        return True

    wait_until(can_connect, "sockets are left")


@pytest.mark.parametrize("num_left", range(SOCKETS_PER_CONNECTION))
def test_a_connection_that_cannot_be_opened_leaves_no_socket(
    num_left: int, server: "zmq.Socket[bytes]", context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    others = [context.socket(zmq.PAIR) for _ in range(SOCKETS_PER_CONNECTION - num_left)]
    for _ in range(2 * SOCKETS_PER_CONNECTION):
        with pytest.raises(LMCacheLostError, match="cannot open a connection: Too many open files"):
            Connection(endpoint_of(server), context)
    for other in others:
        other.close(0)
    wait_until_there_is_room(server, context)


def test_an_endpoint_that_zmq_refuses_leaves_no_socket(
    server: "zmq.Socket[bytes]", context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    with pytest.raises(LMCacheLostError, match="cannot open a connection: Invalid argument"):
        Connection("nowhere", context)
    wait_until_there_is_room(server, context)


def test_each_reason_for_going_on_without_the_server_is_logged_once(
    server: "zmq.Socket[bytes]", monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = iter(["no server listens there"] * 2 + ["its chunks have 100 tokens"] * 3)
    tried: list[str] = []

    def begin(_link: LMCacheLink, _connection: Connection) -> Epoch:
        tried.append(next(reasons, "its chunks have 100 tokens"))
        raise LMCacheError(tried[-1])

    monkeypatch.setattr(LMCacheLink, "_begin", begin)
    told: list[Epoch | None] = []
    link = LMCacheLink(endpoint_of(server), LAYOUT, 100)
    link.open(told.append)
    wait_until(lambda: len(tried) > 2, "it has not tried again")
    link.close()
    assert told == [None], "it was unusable from the first reason on"
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2 and "no server listens there" in lines[0] and "100 tokens" in lines[1], lines


def test_the_link_outlives_a_lack_of_sockets(server: "zmq.Socket[bytes]") -> None:
    link = LMCacheLink(endpoint_of(server), LAYOUT, 100)
    link.context.set(zmq.MAX_SOCKETS, SOCKETS_PER_CONNECTION)
    told: list[Epoch | None] = []
    with link.context.socket(zmq.PAIR):
        link.open(told.append)
        wait_until(lambda: told == [None], "the link has not tried")
    assert server.poll(PATIENCE_SECONDS * 1e3), "it asks the server for its chunk size"
    server.close()  # so that the link waits for no answer
    link.close(PATIENCE_SECONDS)
