"""A message that has come is passed on, whatever else is done with its socket: ZMQ's descriptor is edge-triggered."""

import asyncio
import contextlib
import random
import select
import time
from collections.abc import Callable, Iterator

import uvloop
import zmq

from splitserve.router.links.links import _MAX_FRAMES_PER_TURN, LoopSocket, new_socket

LARGE = bytes(1 << 16)
THROTTLE_SECONDS = 0.005
"""Sending looks for what has arrived if that was not done in the last three million ticks, about a millisecond."""
PATIENCE_SECONDS = 60.0
NUM_MESSAGES = 400


@contextlib.contextmanager
def narrow_pair() -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
    """Yield a DEALER and the ROUTER that it is connected to; a few large messages fill the way to the latter."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as peer, new_socket(context, zmq.DEALER) as dealer:
        for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096), (zmq.SNDHWM, 0), (zmq.LINGER, 0)):
            peer.setsockopt(option, value)
        peer.bind("tcp://127.0.0.1:*")
        dealer.setsockopt(zmq.SNDHWM, 1)
        dealer.setsockopt(zmq.SNDBUF, 4096)
        dealer.connect(peer.getsockopt_string(zmq.LAST_ENDPOINT))
        yield dealer, peer


async def fill(link: LoopSocket) -> None:
    """Send until nothing more is taken."""
    num_refused = 0
    while num_refused < 5:
        num_refused = 0 if link.send([LARGE]) else num_refused + 1
        await asyncio.sleep(THROTTLE_SECONDS)


def test_a_send_that_fails_leaves_no_message_waiting() -> None:
    async def receive(dealer: "zmq.Socket[bytes]", peer: "zmq.Socket[bytes]") -> bytes:
        received = asyncio.get_running_loop().create_future()
        link = LoopSocket(dealer, lambda frames: received.set_result(frames[0]), joins_frames=False)
        with contextlib.closing(link):
            link.send([b"hello"])
            identity, _ = await asyncio.to_thread(peer.recv_multipart)
            await fill(link)
            peer.send_multipart([identity, b"tokens"])
            assert select.select([link._descriptor], [], [], PATIENCE_SECONDS)[0]
            time.sleep(THROTTLE_SECONDS)
            assert not link.send([LARGE])
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await received

    with narrow_pair() as pair:
        assert asyncio.run(receive(*pair)) == b"tokens"


def test_messages_beyond_those_of_one_turn_are_passed_on() -> None:
    num_messages = 3 * _MAX_FRAMES_PER_TURN // 2

    async def receive(dealer: "zmq.Socket[bytes]", peer: "zmq.Socket[bytes]") -> None:
        came: asyncio.Queue[list[bytes]] = asyncio.Queue()
        link = LoopSocket(dealer, came.put_nowait, joins_frames=False)
        with contextlib.closing(link):
            link.send([b"hello"])
            identity, _ = await asyncio.to_thread(peer.recv_multipart)
            for number in range(num_messages):
                peer.send_multipart([identity, b"%d" % number])
            async with asyncio.timeout(PATIENCE_SECONDS):
                messages: list[bytes] = []
                while len(messages) < num_messages:
                    together = await came.get()
                    assert len(together) <= _MAX_FRAMES_PER_TURN
                    messages += together
                assert messages == [b"%d" % number for number in range(num_messages)]

    with narrow_pair() as pair:
        asyncio.run(receive(*pair))


def test_no_order_of_sends_receives_and_errors_leaves_a_message_waiting() -> None:
    draw = random.Random(0)
    came: asyncio.Queue[int] = asyncio.Queue()

    async def exchange(dealer: "zmq.Socket[bytes]", peer: "zmq.Socket[bytes]") -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)

        def on_frames(frames: list[bytes]) -> None:
            for frame in frames:
                came.put_nowait(int(frame))
            if not draw.randrange(4):
                link.send([LARGE])
            if not draw.randrange(4):
                raise ValueError(frames[0])

        def make_room() -> None:
            with contextlib.suppress(zmq.Again):
                peer.recv_multipart(zmq.NOBLOCK)

        link = LoopSocket(dealer, on_frames, joins_frames=False)
        acts: tuple[Callable[[], object], ...] = (lambda: link.send([LARGE]), link.catch_up, make_room)
        with contextlib.closing(link):
            link.send([b"hello"])
            identity, _ = await asyncio.to_thread(peer.recv_multipart)
            for number in range(NUM_MESSAGES):
                peer.send_multipart([identity, b"%d" % number])
                for act in draw.choices(acts, k=draw.randrange(4)):
                    time.sleep(draw.choice((0.0, 0.0005, 0.002)))  # the loop is busy, so that the message comes first
                    act()
                if draw.randrange(3):
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        while await came.get() < number:
                            pass

    with narrow_pair() as pair, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(exchange(*pair))
