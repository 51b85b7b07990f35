"""Whom membership believes: the connection that registered a worker, whatever others say in its name."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from router_harness import RouterProcess, Workers, write_model_dir
from splitserve.benchmarks.engine.paced_runner import PacedRunner
from splitserve.benchmarks.engine.paced_worker import build_loop
from splitserve.benchmarks.router.instant_worker import InstantWorker, WorkerOptions
from splitserve.benchmarks.router.worker_script import DEFAULT_LAYOUT, default_script
from splitserve.common.errors import HandshakeError
from splitserve.engine.loop import WorkerLoop
from splitserve.protocol.cluster_report import WorkerState
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.membership import (
    Draining,
    Heartbeat,
    Leave,
    PeerLink,
    Register,
    Registered,
    RegisterRefused,
    WorkerInfo,
)
from splitserve.protocol.messages.requests import Introduce, PeerRef
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.protocol.wire import decode, encode
from splitserve.router.links.membership import Membership
from waiting import PATIENCE_SECONDS, wait_until

ROUTER = Party("router", 1)
PROMPT = {"prompt": [50, 51, 52], "max_tokens": 2}


# ---- the table ----


def info(incarnation: int = 1) -> WorkerInfo:
    return WorkerInfo(Party("w", incarnation), Role.MIXED, "tcp://127.0.0.1:1", 1, DEFAULT_LAYOUT, 64, 8, 1000, 100)


def registered(connection: bytes = b"one") -> tuple[Membership, str]:
    members = Membership(5.0, 60.0)
    registration = members.register(info().party, info(), 0.0, connection)
    assert registration.refusal is None and registration.token
    members.link_up(info().party)
    return members, registration.token


def test_another_connection_needs_the_token() -> None:
    members, token = registered()
    party = info().party
    for wrong in ("", "x", token[:-1], token + "0"):
        refused = members.register(party, info(), 1.0, b"two", wrong)
        assert refused.refusal is not None and not refused.for_good and not refused.token
    assert members.speaks_for(b"one", party) and not members.speaks_for(b"two", party)
    again = members.register(party, info(), 2.0, b"two", token)
    assert again.refusal is None and again.token == token and not again.must_dial
    assert members.speaks_for(b"two", party) and not members.speaks_for(b"one", party)
    assert members.register(party, info(), 3.0, b"two").refusal is None, "it may have missed the answer"


def test_a_live_worker_is_not_replaced_and_a_lost_one_is() -> None:
    members, _ = registered()
    newer = info(2)
    refused = members.register(newer.party, newer, 1.0, b"two")
    assert refused.refusal is not None and not refused.for_good
    assert members.get(info().party) is not None and members.speaks_for(b"one", info().party)
    members.lose(info().party)
    taken = members.register(newer.party, newer, 2.0, b"two")
    assert taken.refusal is None and taken.must_dial and members.get(info().party) is None
    gone = members.register(info().party, info(), 3.0, b"one")
    assert gone.refusal is not None and gone.for_good


def test_a_lost_worker_is_spoken_for_by_its_own_connection_alone() -> None:
    members, token = registered()
    members.lose(info().party)
    assert members.register(info().party, info(), 1.0, b"two").refusal is not None
    assert members.register(info().party, info(), 1.0, b"two", token).must_dial
    record = members.get(info().party)
    assert record is not None and record.state is WorkerState.CONNECTING


def test_a_worker_beyond_the_bound_is_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.router.links.membership.MAX_WORKERS", 1)
    members, _ = registered()
    other = msgspec.structs.replace(info(), party=Party("other", 1))
    refused = members.register(other.party, other, 1.0, b"two")
    assert refused.refusal == "there are 1 workers already" and not refused.for_good
    members.leave(info().party)
    assert members.register(other.party, other, 2.0, b"two").refusal is None


# ---- a router process, and a stranger who knows all that can be known of a worker ----


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("router") / "tiny"
    write_model_dir(path)
    return path


@contextmanager
def stranger(membership: str, identity: bytes = b"") -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        if identity:
            dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.connect(membership)
        yield dealer


def answer(dealer: "zmq.Socket[bytes]") -> Body:
    assert dealer.poll(PATIENCE_SECONDS * 1000)
    return decode(dealer.recv()).body


def test_forged_messages_move_no_worker(model_dir: Path) -> None:
    router = RouterProcess(model_dir)
    workers = Workers(router.membership)
    try:
        worker = workers.start("m0", Role.MIXED)
        wait_until(lambda: router.request("GET", "/ready")[0] == 200)
        forged: list[Body] = [Heartbeat(WorkerLoad(steps=666)), Draining(), Leave(), Leave("out of memory")]
        for identity in (b"", str(worker.party).encode()):
            before = router.metric("splitserve_stale_messages_total")
            with stranger(router.membership, identity) as dealer:
                for body in forged:
                    dealer.send(encode(Envelope(worker.party, None, body)))
                expected = before + len(forged)
                wait_until(lambda expected=expected: router.metric("splitserve_stale_messages_total") == expected)
        check_unmoved(router, worker)
        with stranger(router.membership) as dealer:
            for party in (worker.party, Party("m0", 7)):
                record = msgspec.structs.replace(worker._info(), party=party, endpoint="tcp://127.0.0.1:9")
                dealer.send(encode(Envelope(party, None, Register(record))))
                refused = answer(dealer)
                assert isinstance(refused, RegisterRefused) and not refused.for_good
                dealer.send(encode(Envelope(party, None, Leave())))
        check_unmoved(router, worker)
    finally:
        workers.close()
        router.stop()


def check_unmoved(router: RouterProcess, worker: InstantWorker) -> None:
    assert router.request("GET", "/ready")[0] == 200
    assert router.metric("splitserve_workers_lost_total") == 0
    assert router.metric('splitserve_worker_steps_total{role="mixed",worker="m0"}') == 0
    assert router.post("/v1/completions", **PROMPT)[0] == 200
    assert worker.requests


# ---- an engine loop, and membership that refuses it or loses its connection ----


class Loop:
    """An engine loop on a thread, and how it ended."""

    def __init__(self, membership: str, protocol: ProtocolConfig | None = None) -> None:
        self.loop: WorkerLoop
        self.loop, where = build_loop(membership, PacedRunner(StepModel(0.005), vocab_size=1000), protocol=protocol)
        self.party = where.party
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except HandshakeError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.loop.stop()
        self.join()


@pytest.fixture
def membership() -> Iterator["tuple[zmq.Socket[bytes], str]"]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        yield router, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


def next_register(router: "zmq.Socket[bytes]") -> tuple[bytes, Party, Register]:
    while True:
        assert router.poll(PATIENCE_SECONDS * 1000)
        identity, data = router.recv_multipart()
        envelope = decode(data)
        if isinstance(envelope.body, Register):
            return identity, envelope.sender, envelope.body


def test_a_worker_that_is_refused_for_good_ends_although_it_was_taken_before(
    membership: "tuple[zmq.Socket[bytes], str]",
) -> None:
    router, endpoint = membership
    worker = Loop(endpoint)
    identity, sender, first = next_register(router)
    assert first.token == ""
    router.send_multipart([identity, encode(Envelope(ROUTER, sender, Registered("a token")))])
    wait_until(lambda: worker.loop.registered)
    identity, sender, again = next_register(router)
    while again.token != "a token":
        identity, sender, again = next_register(router)
    refusal = RegisterRefused("a newer one took its place")
    router.send_multipart([identity, encode(Envelope(ROUTER, sender, refusal))])
    worker.join()
    assert str(worker.error) == "the router refuses paced-0: a newer one took its place"


def test_a_worker_that_is_refused_for_now_asks_again_for_a_while(membership: "tuple[zmq.Socket[bytes], str]") -> None:
    router, endpoint = membership
    worker = Loop(endpoint, ProtocolConfig(heartbeat_seconds=0.05, dead_after_seconds=0.2))
    num_asked = 0
    while worker.error is None and worker._thread.is_alive():
        if router.poll(10):
            identity, data = router.recv_multipart()
            envelope = decode(data)
            if isinstance(envelope.body, Register):
                num_asked += 1
                refusal = RegisterRefused("another process is there", for_good=False)
                router.send_multipart([identity, encode(Envelope(ROUTER, envelope.sender, refusal))])
    worker.join()
    assert num_asked >= 3
    assert str(worker.error) == "the router refuses paced-0: another process is there"


class Relay:
    """Forwards TCP connections to ``address``; :meth:`cut` ends those that there are. The first ``num_mute`` are only
    accepted."""

    def __init__(self, address: tuple[str, int], num_mute: int = 0) -> None:
        self._address = address
        self._num_mute = num_mute
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                self._sockets.append(ours)
                if len(self._sockets) <= self._num_mute:
                    continue
                theirs = socket.create_connection(self._address)
                self._sockets.append(theirs)
                for source, sink in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def cut(self) -> None:
        while self._sockets:
            cut = self._sockets.pop()
            with suppress(OSError):
                cut.shutdown(socket.SHUT_RDWR)
            cut.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


def test_a_worker_whose_connection_breaks_registers_anew_at_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitserve.engine.io.membership_client.REGISTER_INTERVAL_SECONDS", 3600.0)
    router = RouterProcess(model_dir)
    relay = Relay(address_of(router.membership))
    worker = Loop(relay.endpoint)
    name = 'splitserve_worker_prompt_tokens_total{role="mixed",worker="paced-0"}'
    try:
        for attempt in range(1, 4):
            wait_until(lambda: router.request("GET", "/ready")[0] == 200)
            assert router.post("/v1/completions", **PROMPT, ignore_eos=True)[0] == 200
            wait_until(lambda attempt=attempt: router.metric(name) >= 3 * attempt, "its heartbeats aren't believed")
            relay.cut()
        assert router.metric("splitserve_workers_lost_total") == 0, "the link between them never broke"
        assert router.metric("splitserve_workers_refused_total") == 0
    finally:
        worker.close()
        relay.close()
        router.stop()


# ---- links that don't come up by themselves ----


def address_of(endpoint: str) -> tuple[str, int]:
    host, port = endpoint.removeprefix("tcp://").split(":")
    return host, int(port)


def test_a_link_that_leads_nowhere_is_dialled_anew(model_dir: Path) -> None:
    """ZMQ itself would wait for 30 s: as long as a launcher waits for its router to be ready."""
    router = RouterProcess(model_dir, protocol=ProtocolConfig(dead_after_seconds=1.0))
    worker = InstantWorker(router.membership, default_script(), WorkerOptions(engine_id="m0", vocab_size=400))
    relay = Relay(address_of(worker.endpoint), num_mute=1)
    worker.endpoint = relay.endpoint
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        assert worker.registered.wait(PATIENCE_SECONDS)
        assert router.request("GET", "/ready")[0] == 503
        wait_until(lambda: router.request("GET", "/ready")[0] == 200, "it is registered, but never ready", 20.0)
        assert router.post("/v1/completions", **PROMPT)[0] == 200
    finally:
        worker.stop()
        thread.join(PATIENCE_SECONDS)
        relay.close()
        log = router.stop()[2]
    assert f"no link to {relay.endpoint} yet; dialling anew" in log


def test_a_decode_worker_that_failed_to_connect_is_told_again_without_a_request(model_dir: Path) -> None:
    router = RouterProcess(model_dir, protocol=ProtocolConfig(dead_after_seconds=1.0))
    workers = Workers(router.membership)
    try:
        prefill = workers.start("p0", Role.PREFILL)
        decode = workers.start("d0", Role.DECODE)
        decode.load = WorkerLoad()
        wait_until(lambda: router.metric('splitserve_worker_ready{role="decode",worker="d0"}') == 1)
        introduction = Introduce(PeerRef(prefill.party, prefill.endpoint))
        wait_until(lambda: introduction in decode.received)

        def is_told_again() -> bool:
            decode.say(Heartbeat(WorkerLoad(), [PeerLink("p0", "", 0.0, "a probe read didn't complete")]))
            return decode.received.count(introduction) >= 3

        wait_until(is_told_again)
    finally:
        workers.close()
        router.stop()
