"""A dispatcher on this thread's event loop, and workers that it reaches over real sockets. Not a test module."""

import asyncio
import socket
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from router_harness import Workers
from splitserve.benchmarks.router.instant_worker import InstantWorker
from splitserve.benchmarks.router.worker_script import DEFAULT_LAYOUT
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.config import ProtocolConfig, RouterConfig
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.membership import Heartbeat, Register, WorkerInfo
from splitserve.protocol.messages.requests import Abort, ReadClock
from splitserve.protocol.request import Party, Role, SamplingParams
from splitserve.protocol.wire import decode, encode
from splitserve.router.admin.metrics import RouterMetrics
from splitserve.router.http.inbox import Inbox
from splitserve.router.links.worker_record import WorkerRecord
from splitserve.router.requests.active_request import ActiveRequest
from splitserve.router.requests.dispatcher import Dispatcher
from waiting import PATIENCE_SECONDS

PROMPT = array("i", [50, 51, 52])


async def until(condition: Callable[[], object], what: str) -> None:
    """Let the event loop run until ``condition`` holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_SECONDS
    while not condition():
        assert loop.time() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.005)


class LiveRouter:
    """``protocol`` holds settings of :class:`ProtocolConfig`."""

    def __init__(self, **protocol: Any) -> None:
        config = RouterConfig(model="m", served_model_name="m", protocol=ProtocolConfig(**protocol))
        self.dispatcher = Dispatcher(config, RouterMetrics())
        self.fleet = self.dispatcher.fleet
        self.workers = Workers(self.fleet.endpoint)
        self.by_hand: list[WorkerByHand] = []

    async def start(self, name: str, role: Role = Role.MIXED, script: Any = None, **options: Any) -> InstantWorker:
        worker = self.workers.start(name, role, script, wait=False, **options)
        await self.until_ready(worker.party)
        return worker

    async def start_by_hand(self, name: str, incarnation: int = 1) -> "WorkerByHand":
        worker = WorkerByHand(self.fleet.endpoint, Party(name, incarnation))
        self.by_hand.append(worker)
        worker.register()
        await self.until_ready(worker.party)
        return worker

    async def until_ready(self, party: Party) -> None:
        await until(lambda: self.state(party) is WorkerState.READY, f"{party} isn't ready")

    async def submit(self, max_tokens: int = 4) -> ActiveRequest:
        """Begin a request at once: the test fails if it has to wait for a worker."""
        loop = asyncio.get_running_loop()
        client = loop.create_future()
        client.set_result(None)  # gone, should anything wait for it
        sampling = SamplingParams(max_tokens=max_tokens)
        return await self.dispatcher.submit_in_time(
            0, PROMPT, sampling, Inbox(), loop.time(), watch_client=lambda: client
        )

    async def finish(self, request: ActiveRequest) -> ActiveRequest:
        await until(lambda: request.state.ended, f"{request.request_id} doesn't end")
        return request

    def record(self, party: Party) -> WorkerRecord:
        record = self.fleet.membership.get(party)
        assert record is not None, f"{party} isn't known"
        return record

    def state(self, party: Party) -> WorkerState | None:
        self.fleet.check_invariants()
        record = self.fleet.membership.get(party)
        return None if record is None else record.state

    def close(self) -> None:
        self.workers.close()
        for worker in self.by_hand:
            worker.close()
        self.dispatcher.close()


class WorkerByHand:
    """Says and answers only what a test has it do; ``received`` takes what has come."""

    def __init__(self, membership: str, party: Party) -> None:
        self.party = party
        self._context = zmq.Context()
        self._membership = self._new_socket(zmq.DEALER)
        self._membership.connect(membership)
        self._requests = self._new_socket(zmq.ROUTER)
        self._requests.bind("tcp://127.0.0.1:*")
        self.endpoint = self._requests.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _new_socket(self, kind: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        return made

    def tell(self, body: Body) -> None:
        """Send a message to the router's membership."""
        self._membership.send(encode(Envelope(self.party, None, body)))

    def register(self) -> None:
        self.tell(Register(WorkerInfo(self.party, Role.MIXED, self.endpoint, 1, DEFAULT_LAYOUT, 64, 8, 1000, 400)))

    def heartbeat(self) -> None:
        self.tell(Heartbeat(WorkerLoad()))

    def answers(self) -> list[Body]:
        """Return the answers of membership since the last call."""
        return [decode(payload).body for payload in _waiting(self._membership)]

    def received(self) -> list[Body]:
        """Return the messages that the router sent over the link since the last call, but readings of the clock."""
        bodies = (decode(payload).body for payload in _waiting(self._requests))
        return [body for body in bodies if not isinstance(body, ReadClock)]

    def stop_listening(self) -> None:
        """The link breaks, and nobody is at its endpoint any more."""
        self._requests.close()

    def be_mute(self) -> socket.socket:
        """At the endpoint connections are accepted, and nothing is said; until the socket is closed."""
        host, port = self.endpoint.removeprefix("tcp://").split(":")
        return socket.create_server((host, int(port)))

    def listen(self) -> None:
        self._requests = self._new_socket(zmq.ROUTER)
        self._requests.bind(self.endpoint)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _waiting(receiving: "zmq.Socket[bytes]") -> list[bytes]:
    payloads = []
    while receiving.poll(0):
        payloads.append(receiving.recv_multipart()[-1])
    return payloads


def aborted(bodies: Sequence[Body]) -> list[Any]:
    """Keys of the attempts that were aborted."""
    return [body.key for body in bodies if isinstance(body, Abort)]
