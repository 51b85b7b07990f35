"""Bounds of the router's process, its settings and its end."""

import asyncio
import json
import os
import signal
import socket

import msgspec
import pytest
import zmq

from live_router import LiveRouter, WorkerByHand, until
from router_harness import RouterProcess, ready
from router_streams import PROMPT, Stream, aborts
from splitserve.benchmarks.router.worker_script import DEFAULT_LAYOUT, default_script
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.membership import Heartbeat, Register, WorkerInfo
from splitserve.protocol.messages.requests import (
    StepTokens,
)
from splitserve.protocol.request import Party, Role
from splitserve.protocol.wire import encode
from waiting import wait_until

SLOW = default_script(tokens_per_message=1, token_seconds=0.05)


def test_junk_on_the_membership_socket_is_counted(serve):
    router, _ = serve()
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.connect(router.membership)
        sender.send(b"junk")
        sender.send_multipart([b"two", b"frames"])
        sender.send(encode(Envelope(Party("x", 1), None, StepTokens([]))))
        sender.send(encode(Envelope(Party("x", 1), None, Heartbeat(WorkerLoad()))))
        wait_until(lambda: router.metric("splitserve_wire_errors_total") == 2)
        wait_until(lambda: router.metric("splitserve_stale_messages_total") == 2)


def test_too_many_requests_get_429(serve):
    router, workers = serve(max_requests_in_flight=2)
    worker = workers.start("m0", Role.MIXED, SLOW)
    ready(router)
    open_streams = [Stream(router) for _ in range(2)]
    for stream in open_streams:
        stream.read_until("[50]")
    status, headers, answer = router.post("/v1/completions", **PROMPT)
    assert status == 429 and "retry-after" in headers and answer["error"]["type"] == "rate_limit_error"
    open_streams[0].socket.close()
    wait_until(lambda: aborts(worker))
    wait_until(lambda: router.metric("splitserve_requests_in_flight") == 1)
    assert router.post("/v1/completions", **PROMPT, max_tokens=1)[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_shutdown_ends_streams_with_an_error_and_frees_the_port(serve, model_dir, number):
    router, workers = serve()
    workers.start("m0", Role.MIXED, SLOW)
    ready(router)
    stream = Stream(router)
    stream.read_until("[50]")
    os.kill(router.process.pid, number)
    assert stream.error()["code"] == "shutdown"
    stream.socket.close()
    status, out, _ = router.stop()
    assert status == 0 and json.loads(out)[1]["torch"] == "False"
    again = RouterProcess(model_dir, port=router.address[1])
    assert again.request("GET", "/health")[0] == 200
    again.stop()


def test_a_taken_port_is_named(model_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"ConfigError.*port {port}"):
            RouterProcess(model_dir, port=port)


def test_settings_that_cannot_work_are_named(model_dir, tmp_path):
    with pytest.raises(RuntimeError, match=r"CheckpointError.*tokenizer\.json is missing"):
        RouterProcess(tmp_path)
    with pytest.raises(RuntimeError, match=r"ConfigError: policy is 'best'"):
        RouterProcess(model_dir, policy="best")
    with pytest.raises(RuntimeError, match=r"ConfigError: membership_host '203\.0\.113\.1' can't be bound"):
        RouterProcess(model_dir, membership_host="203.0.113.1", secret="sixteen or more characters")


def test_an_endpoint_that_cannot_be_dialled_is_refused(serve):
    router, workers = serve()
    worker = workers.start("m0", Role.MIXED)
    info = worker._info()
    for endpoint in ("tcp://not an address", "ipc:///tmp/x", ""):
        bad = msgspec.structs.replace(info, party=Party("bad", 5), endpoint=endpoint)
        with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
            sender.connect(router.membership)
            before = router.metric("splitserve_workers_refused_total")
            sender.send(encode(Envelope(bad.party, None, Register(bad))))
            wait_until(lambda before=before: router.metric("splitserve_workers_refused_total") == before + 1)
    assert router.request("GET", "/ready")[0] == 200


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("dtype", "float4", "dtype must be one of float32, "), ("num_layers", 1025, "num_layers must be at most 1024")],
)
def test_a_layout_that_the_router_does_not_know_is_refused_with_the_reason(field, value, words):
    async def answers():
        router = LiveRouter()
        try:
            worker = WorkerByHand(router.fleet.endpoint, Party("newer", 1))
            router.by_hand.append(worker)
            layout = msgspec.structs.replace(DEFAULT_LAYOUT, **{field: value})
            worker.tell(Register(WorkerInfo(worker.party, Role.MIXED, worker.endpoint, 1, layout, 64, 8, 1000, 400)))
            arrived = []
            await until(lambda: arrived.extend(worker.answers()) or arrived, "an answer")
            return arrived
        finally:
            router.close()

    [refused] = asyncio.run(answers())
    assert words in refused.reason and f"got {value!r}; run the same version" in refused.reason
    assert refused.for_good


def test_a_hundred_requests_with_a_third_abandoned_leave_nothing_behind(serve):
    router, workers = serve()
    pair = [workers.start(f"{role[0]}0", role, SLOW) for role in (Role.PREFILL, Role.DECODE)]
    ready(router)
    streams = [Stream(router, max_tokens=4) for _ in range(30)]
    for index, stream in enumerate(streams):
        if index % 3 == 0:
            stream.socket.close()
    for index, stream in enumerate(streams):
        if index % 3:
            stream.read_until("[DONE]")
            assert "error" not in stream.text
    wait_until(lambda: router.metric("splitserve_requests_in_flight") == 0)
    for role, worker in zip(("prefill", "decode"), ("p0", "d0"), strict=True):
        assert router.metric(f'splitserve_worker_requests_in_flight{{role="{role}",worker="{worker}"}}') == 0
    keys = [body.key for worker in pair[:1] for body in worker.requests]
    assert len(set(keys)) == len(keys)
