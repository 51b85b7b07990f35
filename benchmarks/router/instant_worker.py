"""Worker without a model: it speaks the real protocol over real sockets and answers at once.

For measurements of the router alone, and for its tests: its answer to a request is given by a *script*, a function from
the request to replies with delays. The default script repeats the prompt's tokens as output. Run one in a process of
its own with ``python -m splitserve.benchmarks.router.instant_worker --membership tcp://127.0.0.1:PORT``.
"""

import contextlib
import heapq
import itertools
import os
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from splitserve.benchmarks.router.worker_script import DEFAULT_LAYOUT, Request, Script, default_script
from splitserve.common.errors import WireError
from splitserve.common.security import SocketSecurity
from splitserve.orchestration.cli.command_parser import CommandParser
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.membership import Heartbeat, Leave, Register, Registered, RegisterRefused, WorkerInfo
from splitserve.protocol.messages.operators import PrefixCacheReset, ResetPrefixCache, SetFrozen
from splitserve.protocol.messages.requests import ClockReading, PeerRef, ReadClock
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.protocol.wire import decode, encode

_MORE = int(zmq.SNDMORE)


@dataclass(slots=True)
class WorkerOptions:
    """Properties with which a worker registers."""

    engine_id: str = "instant-0"
    role: Role = Role.MIXED
    host: str = "127.0.0.1"
    layout: LayoutRecord = DEFAULT_LAYOUT
    num_blocks: int = 4096
    max_num_seqs: int = 64
    max_model_len: int = 4096
    vocab_size: int = 1000
    heartbeat_seconds: float = 0.2
    secret: str = ""
    step_model: StepModel = field(default_factory=StepModel)  # that heartbeats report
    incarnation: int = field(default_factory=lambda: secrets.randbits(63))


class InstantWorker:
    """Worker that answers by a script. Binds its socket when created; ``run`` serves until ``stop``. ``received`` keeps
    every message from the router but ReadClock, ``requests`` the requests among them; ``refusal`` is the router's
    reason for refusing this worker."""

    def __init__(self, membership: str, script: Script, options: WorkerOptions | None = None) -> None:
        self.options = options or WorkerOptions()
        self.party = Party(self.options.engine_id, self.options.incarnation)
        self.received: list[Body] = []
        self.requests: list[Request] = []
        self.registered = threading.Event()
        self.load = WorkerLoad(peers_ready=int(self.options.role is Role.DECODE))
        self.keep_record = True
        self._script = script
        self._stopping = threading.Event()
        self._to_say: queue.SimpleQueue[Body] = queue.SimpleQueue()
        self._say_leave = True
        self.refusal = ""
        self._context = zmq.Context()
        self._security = SocketSecurity(self._context, self.options.secret)
        self._requests = self._context.socket(zmq.ROUTER)
        self._security.protect_bound(self._requests)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.setsockopt(zmq.SNDHWM, 0)  # no limit: beyond it a ROUTER socket drops messages silently
        self._requests.bind(f"tcp://{self.options.host}:*")
        self.endpoint = self._requests.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._membership = self._context.socket(zmq.DEALER)
        self._security.protect_connecting(self._membership)
        self._membership.setsockopt(zmq.LINGER, 100)
        self._membership.connect(membership)
        self._outbox: list[tuple[float, int, bytes, bytes]] = []
        self._order = itertools.count()

    def say(self, body: Body) -> None:
        """Send a message to membership soon. From any thread."""
        self._to_say.put(body)

    def stop(self, leave: bool = True) -> None:
        """End ``run`` soon; without ``leave`` as in a crash, by only closing the sockets."""
        self._say_leave = leave
        self._stopping.set()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._requests, zmq.POLLIN)
        poller.register(self._membership, zmq.POLLIN)
        self._tell(Register(self._info()))
        next_heartbeat = 0.0
        try:
            while not self._stopping.is_set():
                now = time.monotonic()
                if now >= next_heartbeat:
                    self._tell(Heartbeat(self.load, step_model=self.options.step_model))
                    next_heartbeat = now + self.options.heartbeat_seconds
                self._send_due(now)
                while not self._to_say.empty():
                    self._tell(self._to_say.get())
                ready = dict(poller.poll(self._wait_ms(now, next_heartbeat)))
                if self._membership in ready:
                    self._on_membership()
                if self._requests in ready:
                    self._on_requests()
            if self._say_leave:
                self._tell(Leave())
        finally:
            self._requests.close()
            self._membership.close()
            self._security.close()
            self._context.term()

    def _info(self) -> WorkerInfo:
        options = self.options
        return WorkerInfo(
            party=self.party,
            role=options.role,
            endpoint=self.endpoint,
            pid=os.getpid(),
            layout=options.layout,
            num_blocks=options.num_blocks,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            vocab_size=options.vocab_size,
        )

    def _tell(self, body: Body) -> None:
        with contextlib.suppress(zmq.Again):  # no router, or one with another secret
            self._membership.send(encode(Envelope(self.party, None, body)), zmq.NOBLOCK)

    def _wait_ms(self, now: float, next_heartbeat: float) -> int:
        due = min([next_heartbeat, *(entry[0] for entry in self._outbox[:1])])
        # Wakes at least every 50 ms to notice stop(), and rounds up so as not to spin.
        return max(0, min(50, int((due - now) * 1000) + 1))

    def _on_membership(self) -> None:
        while True:
            try:
                envelope = decode(self._membership.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(envelope.body, Registered) and envelope.to == self.party:
                self.registered.set()
            elif isinstance(envelope.body, RegisterRefused):
                self.refusal = envelope.body.reason

    def _on_requests(self) -> None:
        while True:
            try:
                identity, payload = self._requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                envelope = decode(payload)
            except WireError:
                continue
            if envelope.to != self.party:
                continue
            self._handle(identity, envelope)

    def _handle(self, identity: bytes, envelope: Envelope) -> None:
        if isinstance(envelope.body, ReadClock):
            reading = ClockReading(envelope.body.asked_at, time.monotonic())
            self._send(identity, encode(Envelope(self.party, envelope.sender, reading)))
            return
        if self.keep_record:
            self.received.append(envelope.body)
        if isinstance(envelope.body, SetFrozen):
            frozen = envelope.body
            self.load = msgspec.structs.replace(self.load, frozen=int(frozen.frozen), freeze_number=frozen.number)
        elif isinstance(envelope.body, ResetPrefixCache):
            reset = PrefixCacheReset(envelope.body.reset_id)
            self._send(identity, encode(Envelope(self.party, envelope.sender, reset)))
        if not isinstance(envelope.body, Request):
            return
        if self.keep_record:
            self.requests.append(envelope.body)
        now = time.monotonic()
        for reply in self._script(envelope.body):
            payload = reply.body
            if not isinstance(payload, bytes):
                payload = encode(Envelope(self.party, envelope.sender, payload))
            if reply.delay_seconds <= 0:
                self._send(identity, payload)
            else:
                entry = (now + reply.delay_seconds, next(self._order), identity, payload)
                heapq.heappush(self._outbox, entry)

    def _send_due(self, now: float) -> None:
        while self._outbox and self._outbox[0][0] <= now:
            _, _, identity, payload = heapq.heappop(self._outbox)
            self._send(identity, payload)

    def _send(self, identity: bytes, payload: bytes) -> None:
        self._requests.send(identity, _MORE)  # send_multipart takes twice as long
        self._requests.send(payload)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one worker in this process, until it is killed. Prints its identity and address as one line of JSON."""
    parser = CommandParser(description=main.__doc__)
    parser.add_argument("--membership", required=True, help="the router's membership endpoint")
    parser.add_argument("--engine-id", default="instant-0")
    parser.add_argument("--role", default="mixed", choices=[str(role) for role in Role])
    parser.add_argument("--token-seconds", type=float, default=0.0, help="seconds between tokens; 0 sends all at once")
    parser.add_argument("--tokens-per-message", type=int, default=0, help="0 packs all tokens into one message")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--heartbeat-seconds", type=float, default=1.0)
    options = parser.parse_args(argv)
    worker = InstantWorker(
        options.membership,
        default_script(tokens_per_message=options.tokens_per_message, token_seconds=options.token_seconds),
        WorkerOptions(
            engine_id=options.engine_id,
            role=Role(options.role),
            vocab_size=options.vocab_size,
            max_model_len=options.max_model_len,
            num_blocks=-(-options.max_model_len // DEFAULT_LAYOUT.block_size),
            heartbeat_seconds=options.heartbeat_seconds,
        ),
    )
    worker.keep_record = False
    print(msgspec.json.encode(PeerRef(worker.party, worker.endpoint)).decode(), flush=True)
    worker.run()


if __name__ == "__main__":
    main()
