"""Hostile bytes on the real sockets of real processes: nobody dies, nothing stays, the next good request is served.

``SPLITSERVE_FUZZ_MESSAGES`` sets how many there are, as in :mod:`test_fuzz_messages`.
"""

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import zmq

from fuzzing import ROUTER, MessageFuzzer
from router_harness import RouterProcess, Workers, write_model_dir
from serving import complete_all, wait_until_quiet
from splitserve.benchmarks.router.worker_script import DEFAULT_LAYOUT, Reply, Request, default_script
from splitserve.common.security import SocketSecurity
from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig, ProtocolConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.handover import PeerHello, PeerRefused
from splitserve.protocol.messages.membership import Register, RegisterRefused, WorkerInfo
from splitserve.protocol.request import Party, Role
from splitserve.protocol.wire import MAX_MESSAGE_BYTES, decode, encode
from waiting import PATIENCE_SECONDS, wait_until

NUM_MESSAGES = int(os.environ.get("SPLITSERVE_FUZZ_MESSAGES", "6000")) // 4
SEED = int(os.environ.get("SPLITSERVE_FUZZ_SEED", "0"))
PATIENCE_MS = round(1000 * PATIENCE_SECONDS)
SECRET = "known to those who attack"
NOWHERE = "tcp://127.0.0.1:9"
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)


def dealer(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, security: SocketSecurity) -> "zmq.Socket[bytes]":
    opened = context.socket(zmq.DEALER)
    security.protect_connecting(opened)
    opened.setsockopt(zmq.LINGER, 2000)
    opened.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
    opened.connect(endpoint)
    return opened


def throw_messages(endpoint: str, me: Party, count: int, seed: int, secret: str = "") -> None:
    """Send from several connections that come and go: single, surplus, empty and huge frames."""
    rng = random.Random(seed)
    fuzzer = MessageFuzzer(rng, me, deadline_seconds=2.0)
    with zmq.Context() as context, closing(SocketSecurity(context, secret)) as security:
        sockets = [dealer(context, endpoint, security) for _ in range(4)]
        for index in range(count):
            if rng.random() < 0.01:
                sockets.pop(0).close()
                sockets.append(dealer(context, endpoint, security))
            frames = [fuzzer.message()]
            match rng.randrange(20):
                case 0:
                    frames = [fuzzer.message() for _ in range(rng.randint(2, 10))]
                case 1:
                    frames = [b""] * rng.randint(1, 3)
                case 2:
                    frames = [rng.randbytes(rng.choice([1, 3, 4, 5, 100, 10_000]))]
            if index % 1000 == 500:
                frames = [bytes(MAX_MESSAGE_BYTES + 1)]  # ends the connection
            rng.choice(sockets).send_multipart(frames)
        for each in sockets:
            each.close()


def throw_bytes(endpoint: str, count: int, seed: int) -> None:
    """Send bytes over bare TCP that are not ZMTP, or that stop in the middle of it."""
    rng = random.Random(seed)
    host, port = endpoint.removeprefix("tcp://").split(":")
    for _ in range(count):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
            junk = rng.randbytes(rng.choice([0, 1, 10, 64, 5000]))
            huge_frame = b"\x02" + (2**62).to_bytes(8, "big")
            connection.sendall(
                rng.choice([junk, b"GET / HTTP/1.1\r\n\r\n", ZMTP_GREETING + junk, ZMTP_GREETING + huge_frame])
            )


# ---- workers ----


@pytest.fixture(scope="module")
def cluster(tiny_qwen3: Path) -> Iterator[tuple[LocalCluster, dict[str, str]]]:
    """Its secret is known to those who attack it."""
    endpoints: dict[str, str] = {}

    def note(progress: ChildProgress) -> None:
        if progress.stage == "ready":
            endpoints[progress.name] = progress.detail["endpoint"]

    engine = EngineConfig(model=str(tiny_qwen3), kv_memory_bytes=8 << 20, threads=1)
    spec = simple_spec(engine, num_prefill=1, num_decode=1, port=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPLITSERVE_SECRET", SECRET)
        with LocalCluster(spec, log_level="error", show=note) as running:
            yield running, endpoints


def who_listens(endpoint: str) -> Party:
    """A worker names itself to anybody who greets it."""
    with (
        zmq.Context() as context,
        closing(SocketSecurity(context, SECRET)) as security,
        dealer(context, endpoint, security) as socket_,
    ):
        layout = LayoutRecord("other", "w", "float32", 1, 1, 1, 1)
        socket_.send(encode(Envelope(Party("curious", 1), None, PeerHello(layout))))
        assert socket_.poll(PATIENCE_MS)
        answer = decode(socket_.recv())
        assert isinstance(answer.body, PeerRefused)
        return answer.sender


def completion(cluster: LocalCluster) -> dict[str, object]:
    body = {"model": cluster.spec.served_model_name, "prompt": list(range(3, 40)), "max_tokens": 8, "temperature": 0}
    (answer,) = complete_all(cluster.url, [body | {"ignore_eos": True, "return_token_ids": True}], at_once=True)
    assert answer["status"] == 200, answer
    return answer["choices"][0]["token_ids"]


@pytest.mark.timeout(300 + NUM_MESSAGES // 20)
def test_nothing_on_a_workers_socket_ends_it(
    cluster: tuple[LocalCluster, dict[str, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    running, endpoints = cluster
    expected, pids = completion(running), running.pids
    for index, (name, endpoint) in enumerate(endpoints.items()):
        me = who_listens(endpoint)
        assert me.engine_id == name
        throw_messages(endpoint, me, NUM_MESSAGES, SEED + index, SECRET)
        throw_bytes(endpoint, 40, SEED + index)
        assert who_listens(endpoint) == me
    assert completion(running) == expected and running.pids == pids
    metrics = wait_until_quiet(running.url, 90.0)
    stale = [values["stale_messages_total"] for values in metrics.values()]
    assert min(stale) > NUM_MESSAGES / 10, "what was thrown never came"
    for pid in pids.values():
        assert psutil.Process(pid).memory_info().rss < 2 << 30
    log = capfd.readouterr().err
    assert "Traceback" not in log and "refuses" not in log, log


# ---- the router ----


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("router") / "tiny"
    write_model_dir(path)
    return path


def good(router: RouterProcess) -> bool:
    status, _, answer = router.post("/v1/completions", prompt=[5, 6, 7], max_tokens=3, return_token_ids=True)
    return status == 200 and answer["choices"][0]["token_ids"] == [5, 6, 7]


def test_nothing_on_the_membership_socket_ends_the_router(model_dir: Path) -> None:
    router = RouterProcess(model_dir, protocol=ProtocolConfig(tombstone_seconds=2.0, dead_after_seconds=2.0))
    workers = Workers(router.membership)
    try:
        workers.start("good", Role.MIXED)
        wait_until(lambda: router.request("GET", "/ready")[0] == 200)
        assert good(router)
        process = psutil.Process(router.process.pid)
        files, resident = process.num_fds(), process.memory_info().rss
        throw_messages(router.membership, ROUTER, NUM_MESSAGES, SEED)
        throw_bytes(router.membership, 40, SEED)
        wait_until(lambda: good(router))
        assert router.request("GET", "/metrics")[0] == 200
        wait_until(lambda: process.num_fds() <= files + 4)  # the sockets of those that registered are gone
        assert process.memory_info().rss - resident < 200 << 20
        assert router.metric("splitserve_wire_errors_total") > 0
    finally:
        workers.close()
        status, _, log = router.stop()
    assert status == 0 and "Traceback" not in log, log


def test_a_flood_of_registrations_is_refused_in_words_and_passes(model_dir: Path) -> None:
    """More workers than the router has file descriptors for, none of which is there."""
    router = RouterProcess(model_dir, protocol=ProtocolConfig(tombstone_seconds=2.0, dead_after_seconds=2.0))
    workers = Workers(router.membership)
    try:
        workers.start("good", Role.MIXED)
        wait_until(lambda: router.request("GET", "/ready")[0] == 200)
        psutil.Process(router.process.pid).rlimit(psutil.RLIMIT_NOFILE, (200, 200))
        with zmq.Context() as context, dealer(context, router.membership, SocketSecurity(context, "")) as flood:
            for index in range(300):
                me = Party(f"fake-{index}", 1)
                info = WorkerInfo(me, Role.MIXED, NOWHERE, 1, DEFAULT_LAYOUT, 64, 8, 1024, 400)
                flood.send(encode(Envelope(me, None, Register(info))))
            answers = []
            while len(answers) < 300:
                assert flood.poll(PATIENCE_MS), f"only {len(answers)} registrations were answered"
                answers.append(decode(flood.recv()).body)
        refusals = [answer.reason for answer in answers if isinstance(answer, RegisterRefused)]
        assert refusals and all("Too many open files" in reason for reason in refusals)

        def all_are_lost() -> bool:
            try:
                return router.metric("splitserve_workers_lost_total") >= 300 - len(refusals)
            except OSError:  # as long as workers that aren't there hold all its descriptors, it can't take a connection
                return False

        wait_until(all_are_lost)
        wait_until(lambda: good(router))
    finally:
        workers.close()
        status, _, log = router.stop()
    assert status == 0 and "Traceback" not in log, log


def lying_script(fuzzer: Callable[[], bytes], rng: random.Random) -> Callable[[Request], list[Reply]]:
    """Sometimes the truth, sometimes lies about this request, sometimes noise."""
    honest = default_script(tokens_per_message=1)

    def script(body: Request) -> list[Reply]:
        replies = list(honest(body))
        for _ in range(rng.randrange(6)):
            position = rng.randrange(len(replies) + 1)
            lie = Reply(fuzzer().replace(b"r0", body.key.request_id.encode()) if rng.random() < 0.5 else fuzzer())
            match rng.randrange(4):
                case 0 if replies:
                    del replies[position - 1]
                case 1 if replies:
                    replies.insert(position, rng.choice(replies))
                case _:
                    replies.insert(position, lie)
        return replies

    return script


def test_nothing_that_workers_send_ends_the_router(model_dir: Path) -> None:
    """Requests end with their tokens or with an error, in time; a worker that tells the truth still serves."""
    protocol = ProtocolConfig(request_deadline_seconds=0.5, no_worker_wait_seconds=0.2)
    router = RouterProcess(model_dir, protocol=protocol)
    workers = Workers(router.membership)
    rng = random.Random(SEED)
    fuzzer = MessageFuzzer(rng, ROUTER)
    statuses: list[int] = []

    def ask(count: int) -> None:
        for _ in range(count):
            fields = {"prompt": [5, 6, 7], "max_tokens": 3, "stream": False, "return_token_ids": True}
            status, _, answer = router.post("/v1/completions", **fields)
            assert status != 200 or answer["choices"][0]["token_ids"] == [5, 6, 7], "a lie passed as an answer"
            statuses.append(status)

    try:
        liars = [workers.start(f"liar-{i}", Role.MIXED, lying_script(fuzzer.message, rng)) for i in range(3)]
        wait_until(lambda: router.request("GET", "/ready")[0] == 200)
        clients = [threading.Thread(target=ask, args=(max(4, NUM_MESSAGES // 100),)) for _ in range(8)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60 + NUM_MESSAGES / 10)
            assert not client.is_alive(), "a request hangs"
        assert 500 not in statuses and len(statuses) == 8 * max(4, NUM_MESSAGES // 100)
        for liar in liars:
            workers.stop(liar)
        workers.start("honest", Role.MIXED)
        wait_until(lambda: good(router))
    finally:
        workers.close()
        status, _, log = router.stop()
    assert status == 0 and "Traceback" not in log, log
