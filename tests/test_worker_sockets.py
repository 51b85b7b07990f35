"""A worker's real sockets on loopback: peers that dial again, endpoints that can't be, bytes that are no messages."""

import time
from collections.abc import Iterator

import pytest
import zmq

from splitserve.messages import Abort, Body, Envelope, PeerRef, Release, StepTokens, TokenDelta
from splitserve.prefill.sockets import WorkerSockets
from splitserve.prefill.waker import Waker
from splitserve.request import Party, RequestKey
from splitserve.wire import decode, encode
from waiting import PATIENCE_SECONDS

NOWHERE = "tcp://127.0.0.1:9"


@pytest.fixture
def pair() -> Iterator[tuple[WorkerSockets, WorkerSockets]]:
    one, other = (WorkerSockets(Party(name, 1), "127.0.0.1", NOWHERE) for name in ("one", "other"))
    yield one, other
    one.close()
    other.close()


def hears(sockets: WorkerSockets, body: Body) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        sockets.wait(0.05)
        if body in [envelope.body for envelope in sockets.receive()]:
            return True
    return False


def test_messages_go_both_ways_over_one_dialled_connection(pair: tuple[WorkerSockets, WorkerSockets]) -> None:
    one, other = pair
    one.dial(PeerRef(other.me, other.endpoint))
    one.send(other.me, Release(RequestKey("r"), True))
    assert hears(other, Release(RequestKey("r"), True))
    other.send(one.me, Abort(RequestKey("r")))
    assert hears(one, Abort(RequestKey("r")))


def test_a_peer_that_dials_again_is_heard(pair: tuple[WorkerSockets, WorkerSockets]) -> None:
    """The new connection has the identity of the old one, which may not be gone yet."""
    one, other = pair
    for attempt in range(40):
        one.dial(PeerRef(other.me, other.endpoint))
        one.send(other.me, Release(RequestKey("r", attempt), True))
        assert hears(other, Release(RequestKey("r", attempt), True)), f"the dial number {attempt} was ignored"


def test_a_router_that_is_held_up_finds_every_token(pair: tuple[WorkerSockets, WorkerSockets]) -> None:
    """More messages than any queue or TCP buffer on the way holds by itself."""
    worker, _ = pair
    router, num_messages = Party("router", 9), 25_000
    token_ids = list(range(500))
    with zmq.Context() as context, context.socket(zmq.DEALER) as link:
        link.setsockopt(zmq.LINGER, 0)
        link.setsockopt(zmq.RCVHWM, 1)
        link.connect(worker.endpoint)
        link.send(encode(Envelope(router, worker.me, Abort(RequestKey("r")))))
        assert hears(worker, Abort(RequestKey("r")))
        for position in range(num_messages):
            worker.send(router, StepTokens([TokenDelta(RequestKey("r"), position, token_ids)]))
        assert worker.num_undeliverable == 0
        for position in range(num_messages):
            assert link.poll(1000 * PATIENCE_SECONDS), f"message {position} is lost"
            body = decode(link.recv()).body
            assert isinstance(body, StepTokens) and body.deltas[0].position == position


@pytest.mark.parametrize("endpoint", ["", "nonsense", "tcp://", "carrier-pigeon://x"])
def test_an_endpoint_that_cannot_be_does_not_end_the_worker(
    pair: tuple[WorkerSockets, WorkerSockets], endpoint: str
) -> None:
    one, _ = pair
    peer = Party("broken", 3)
    one.dial(PeerRef(peer, endpoint))
    one.send(peer, Abort(RequestKey("r")))
    one.hang_up(peer)
    assert one.num_undeliverable == 2


def test_what_cannot_be_delivered_is_counted(pair: tuple[WorkerSockets, WorkerSockets]) -> None:
    one, _ = pair
    one.send(Party("stranger", 4), Abort(RequestKey("r")))
    assert one.num_undeliverable == 1


def test_bytes_that_are_no_message_are_counted_and_the_next_message_is_heard(
    pair: tuple[WorkerSockets, WorkerSockets],
) -> None:
    one, other = pair
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(other.endpoint)
        stranger.send(b"GET / HTTP/1.1")
        one.dial(PeerRef(other.me, other.endpoint))
        one.send(other.me, Abort(RequestKey("r")))
        assert hears(other, Abort(RequestKey("r")))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not other.num_malformed and time.monotonic() < deadline:
            other.wait(0.05)
            assert list(other.receive()) == []
    assert other.num_malformed == 1


def test_a_waker_wakes_never_blocks_and_is_quiet_when_closed() -> None:
    waker = Waker()
    for _ in range(100_000):
        waker.wake()
    waker.drain()
    waker.close()
    waker.wake()
