"""The links of KV are visible in hand-over reports, heartbeats and metrics."""

import asyncio
import contextlib
import socket

import pytest
import zmq

from core_driver import DECODE, KEY, PREFILL, Worker, decode_request, of, sent
from splitserve.common.security import SocketSecurity
from splitserve.engine.effects import StartRead
from splitserve.kvconnector.transfer.connector import Link, PeerConnected
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.handover.reads import ReadPath, ReadResult
from splitserve.protocol.messages.handover import Offer, OfferedBlock, OfferedSpan
from splitserve.protocol.messages.membership import PeerLink, WorkerInfo
from splitserve.protocol.messages.requests import Introduce, PeerRef, ReadClock, StepTokens
from splitserve.protocol.request import Role
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.links.links import WorkerLink, _address_of_peer
from splitserve.router.links.membership import Membership
from splitserve.simulation.model import LAYOUT, ROUTER
from splitserve.simulation.worker.connector import SimConnector

SLOW = Link("tcp", 7e8, "not as it should be")


@pytest.fixture
def connected() -> Worker:
    decode = Worker(Role.DECODE, DECODE)
    decode.hear(ROUTER, Introduce(PeerRef(PREFILL, "tcp://prefill-0")))
    decode.hear(PREFILL, SimConnector(PREFILL, 32).welcome())
    assert decode.core.links() == []
    decode.event(PeerConnected(PREFILL, None, SLOW))
    return decode


def test_a_worker_tells_its_links(connected: Worker) -> None:
    link = PeerLink("prefill-0", "tcp", 7e8, "not as it should be", incarnation=PREFILL.incarnation)
    assert connected.core.links() == [link]


def test_a_hand_over_says_how_its_blocks_came(connected: Worker) -> None:
    connected.hear(ROUTER, decode_request())
    offer = Offer(KEY, [OfferedSpan(0, 0, [OfferedBlock(block, 100 + block) for block in range(3)])], 10, True, [3])
    (start,) = of(connected.hear(PREFILL, offer), StartRead)
    assert isinstance(start, StartRead)
    result = ReadResult(start.command.read_id, None, [100, 101, 102], path=ReadPath.STAGED)
    (tokens,) = sent(connected.event(result), StepTokens)
    assert isinstance(tokens, StepTokens) and tokens.deltas[0].handover is not None
    assert tokens.deltas[0].handover.transport == "sim/tcp"
    load = connected.core.load()
    assert (load.reads_direct, load.reads_layers, load.reads_staged) == (0, 0, 1)


def test_metrics_name_a_slow_link() -> None:
    members = Membership(5.0, 60.0)
    info = WorkerInfo(DECODE, Role.DECODE, "tcp://d", 1, LAYOUT, 32, 4, 64, 50)
    assert members.register(DECODE, info, 0.0).refusal is None
    link, fine = PeerLink("prefill-0", "tcp", 7e8, "slow"), PeerLink("prefill-1", "cuda_ipc", 3e11)
    members.heartbeat(DECODE, WorkerLoad(), 1.0, [link, fine])
    metrics = RouterMetrics()
    metrics.watch_workers(members.records)
    text = metrics.render().decode()
    labels = 'peer="prefill-0",role="decode",transport="tcp",worker="decode-0"'
    assert f"splitserve_link_slow{{{labels}}} 1.0" in text
    assert f"splitserve_link_bytes_per_second{{{labels}}} 7e+08" in text
    fine_labels = 'peer="prefill-1",role="decode",transport="cuda_ipc",worker="decode-0"'
    assert f"splitserve_link_slow{{{fine_labels}}} 0.0" in text


def test_a_descriptor_that_another_socket_has_got_has_no_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        descriptor = accepted.fileno()
        with accepted:
            assert _address_of_peer(descriptor) == "127.0.0.1"
        one, other = socket.socketpair()  # of Unix, whose peers have no names
        with one, other:
            assert _address_of_peer(one.fileno()) == ""
    assert _address_of_peer(descriptor) == ""


def test_a_link_takes_messages_once_it_is_up_however_soon_after_others() -> None:
    """A message before it is up is refused, and ZMQ looks for new connections once a millisecond when it sends."""

    async def send_when_up(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> bool:
        taken = asyncio.get_running_loop().create_future()
        link = WorkerLink(
            context,
            WorkerInfo(DECODE, Role.DECODE, endpoint, 1, LAYOUT, 32, 4, 64, 50),
            ROUTER,
            SocketSecurity(context, ""),
            on_messages=lambda *_: None,
            on_up=lambda link: taken.set_result(link.send(ReadClock(1.0))),
            on_down=lambda _: None,
            patience_seconds=60.0,
        )
        with contextlib.closing(link):
            link.send(ReadClock(0.0))
            link._monitor.socket.poll()
            return await taken

    with zmq.Context() as context, context.socket(zmq.ROUTER) as worker:
        worker.bind("tcp://127.0.0.1:*")
        endpoint = worker.getsockopt_string(zmq.LAST_ENDPOINT)
        assert all(asyncio.run(send_when_up(context, endpoint)) for _ in range(100))
