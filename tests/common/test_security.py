"""Access: side channels under a shared secret, the endpoint under an API key, and the words of rejections."""

import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from router_harness import RouterProcess, Workers, write_model_dir
from splitserve.common.errors import ConfigError
from splitserve.common.security import _key_pairs, check_exposure, drawn_secret, is_loopback
from splitserve.engine.io.sockets import WorkerSockets
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.hosts.process import child_environment
from splitserve.orchestration.spec.cluster_spec import NetworkSpec
from splitserve.orchestration.spec.expansion import Secrets, read_secret, router_config, worker_config
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig, RouterConfig, WorkerConfig
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.membership import RegisterRefused
from splitserve.protocol.messages.requests import Abort, PeerRef
from splitserve.protocol.request import Party, RequestKey, Role
from splitserve.protocol.wire import decode, encode
from waiting import PATIENCE_SECONDS, wait_until

SECRET, OTHER = "correct horse battery", "another secret altogether"
NOWHERE = "tcp://127.0.0.1:9"
ENGINE = EngineConfig(model="m")


# ---- where a secret is needed, and where it must not show ----


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_loopback_works_without_a_secret(host: str) -> None:
    assert is_loopback(host)
    check_exposure(host, "")


@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1", "example.org"])
def test_other_addresses_need_a_secret(host: str) -> None:
    with pytest.raises(ConfigError, match="same shared secret"):
        check_exposure(host, "")
    check_exposure(host, SECRET)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", ""])
def test_wildcards_are_no_addresses_to_tell_others(host: str) -> None:
    with pytest.raises(ConfigError, match="address at which others reach"):
        check_exposure(host, SECRET)


def test_a_drawn_secret_is_its_keys_and_any_other_one_is_stretched(monkeypatch: pytest.MonkeyPatch) -> None:
    stretched: list[bytes] = []
    scrypt = hashlib.scrypt

    def noted(secret: bytes, **options: Any) -> bytes:
        stretched.append(secret)
        return scrypt(secret, **options)

    monkeypatch.setattr(hashlib, "scrypt", noted)
    drawn = drawn_secret(), drawn_secret()
    others = (SECRET, drawn[0][:-2], drawn[0] + "00", drawn[0].replace("drawn-keys:", ""), "drawn-keys:" + 128 * "x")
    keys = {key for secret in (*drawn, *others) for pair in _key_pairs(secret) for key in pair}
    assert len(keys) == 4 * len((*drawn, *others)), "all differ"
    assert stretched == [secret.encode() for secret in others]
    check_exposure("10.0.0.1", drawn[0])


def test_short_secrets_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        check_exposure("127.0.0.1", "123456")


def test_every_part_that_binds_checks() -> None:
    with pytest.raises(ConfigError, match="shared secret"):
        WorkerSockets(Party("w", 1), "10.0.0.1", NOWHERE)
    with pytest.raises(ConfigError, match="shared secret"):
        LocalCluster(simple_spec(ENGINE, num_mixed=1, network=NetworkSpec(host="10.0.0.1"))).start()
    with pytest.raises(ConfigError, match="--worker-host"):
        WorkerSockets(Party("w", 1), "203.0.113.7", NOWHERE, SECRET)


def test_secrets_are_in_no_repr_and_in_no_childs_environment() -> None:
    spec = simple_spec(ENGINE, num_mixed=1)
    secrets = Secrets(secret=SECRET, api_key="sk-123")
    router = router_config(spec, secrets, "10.0.0.1")
    worker = worker_config(spec, spec.pools[0], "mixed-0", secrets, membership=NOWHERE, host="10.0.0.1", threads=1)
    for config in (secrets, router, worker):
        assert SECRET not in repr(config) and "sk-123" not in f"{config}"
        assert config.secret == SECRET
    assert router.api_key == "sk-123"
    assert router.membership_host == "10.0.0.1" == worker.host
    assert "secret=''" in repr(RouterConfig(model="m", served_model_name="m"))
    environment = child_environment(1, {"SPLITSERVE_SECRET": SECRET, "SPLITSERVE_API_KEY": "k", "HOME": "/h"})
    assert environment["HOME"] == "/h" and not {"SPLITSERVE_SECRET", "SPLITSERVE_API_KEY"} & environment.keys()


def test_secrets_come_from_files_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_TEST_SECRET", " from the environment\n")
    (tmp_path / "secret").write_text("from the file\n")
    assert read_secret("", "SPLITSERVE_TEST_SECRET") == "from the environment"
    assert read_secret(str(tmp_path / "secret"), "SPLITSERVE_TEST_SECRET") == "from the file"
    assert read_secret("", "SPLITSERVE_TEST_NOTHING") == ""
    (tmp_path / "empty").touch()
    for name in ("empty", "missing"):
        with pytest.raises(ConfigError, match=name):
            read_secret(str(tmp_path / name), "SPLITSERVE_TEST_SECRET")


# ---- workers among each other ----


@pytest.fixture
def listener() -> Iterator[WorkerSockets]:
    sockets = WorkerSockets(Party("listener", 1), "127.0.0.1", NOWHERE, SECRET)
    yield sockets
    sockets.close()


def is_heard(listener: WorkerSockets, secret: str, seconds: float = PATIENCE_SECONDS) -> bool:
    speaker = WorkerSockets(Party("speaker", 2), "127.0.0.1", NOWHERE, secret)
    try:
        speaker.dial(PeerRef(listener.me, listener.endpoint))
        speaker.send(listener.me, Abort(RequestKey("r")))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            listener.wait(0.05)
            if list(listener.receive()):
                return True
        return False
    finally:
        speaker.close()


def test_only_who_knows_the_secret_is_heard(listener: WorkerSockets) -> None:
    assert is_heard(listener, SECRET)
    assert not is_heard(listener, OTHER, seconds=0.5)
    assert not is_heard(listener, "", seconds=0.5)
    assert is_heard(listener, SECRET)


def test_the_servers_public_key_alone_opens_nothing(listener: WorkerSockets) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.curve_serverkey = listener._security._bound[0]
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(listener.endpoint)
        stranger.send(encode(Envelope(Party("x", 1), None, Abort(RequestKey("r")))))
        for _ in range(10):
            listener.wait(0.05)
            assert list(listener.receive()) == []


# ---- the router ----


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("router") / "tiny"
    write_model_dir(path)
    return path


@pytest.fixture(scope="module")
def router(model_dir: Path) -> Iterator[RouterProcess]:
    process = RouterProcess(model_dir, secret=SECRET, api_key="sk-right")
    workers = Workers(process.membership)
    try:
        workers.start("m0", Role.MIXED, secret=SECRET)
        wait_until(lambda: process.request("GET", "/ready")[0] == 200)
        yield process
    finally:
        workers.close()
        process.stop()


BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}


def test_a_request_goes_through_encrypted_links(router: RouterProcess) -> None:
    for scheme in ("Bearer", "bearer"):
        status, _, answer = router.request("POST", "/v1/completions", BODY, Authorization=f"{scheme} sk-right")
        assert status == 200 and answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer sk-wrong", "Basic sk-right", "sk-right", "Bearer sk-righ"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/tiny", "/v1/x"])
def test_without_the_key_there_is_no_v1(router: RouterProcess, path: str, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    method = "POST" if path.endswith("completions") else "GET"
    status, found, answer = router.request(method, path, BODY if method == "POST" else None, **headers)
    assert status == 401 and found["www-authenticate"] == 'Bearer realm="API key"'
    assert answer["error"]["type"] == "authentication_error" and answer["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
def test_what_operators_ask_stays_open(router: RouterProcess, path: str) -> None:
    assert router.request("GET", path)[0] == 200


def test_a_worker_without_the_secret_stays_outside(router: RouterProcess) -> None:
    workers = Workers(router.membership)
    try:
        strangers = [workers.start(f"s{i}", Role.MIXED, secret=s, wait=False) for i, s in enumerate(("", OTHER))]
        assert not any(stranger.registered.wait(0.5) for stranger in strangers)
        assert router.request("POST", "/v1/completions", BODY, Authorization="Bearer sk-right")[0] == 200
    finally:
        workers.close()


def test_an_open_endpoint_is_warned_of(model_dir: Path) -> None:
    process = RouterProcess(model_dir, host="0.0.0.0")
    assert "any client that reaches 0.0.0.0 can use the endpoint" in process.stop()[2]


# ---- refusals in words ----


def test_a_refused_worker_is_told_why(router: RouterProcess) -> None:
    workers = Workers(router.membership)
    try:
        odd = workers.start("odd", Role.MIXED, wait=False, vocab_size=77, secret=SECRET)
        wait_until(lambda: odd.refusal)
        assert re.fullmatch(r"vocab_size: 77 against worker \S+'s 400", odd.refusal)
    finally:
        workers.close()


_WORKER = """
import sys, msgspec
from splitserve.protocol.config import WorkerConfig
from splitserve.worker.entry import run_worker
from splitserve.common.errors import HandshakeError
try:
    run_worker(msgspec.json.decode(sys.stdin.read(), type=WorkerConfig), lambda stage, detail: None)
except HandshakeError as error:
    print(error)
"""


def test_a_worker_that_is_refused_at_start_ends_with_the_reason(tiny_qwen3: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as membership:
        port = membership.bind_to_random_port("tcp://127.0.0.1")
        engine = EngineConfig(model=str(tiny_qwen3), kv_memory_bytes=4 << 20, threads=1)
        config = WorkerConfig(engine_id="m0", role=Role.MIXED, engine=engine, membership=f"tcp://127.0.0.1:{port}")
        child = subprocess.Popen(
            [sys.executable, "-c", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdin is not None
        child.stdin.write(json.dumps(msgspec.to_builtins(config)))
        child.stdin.close()
        child.stdin = None
        assert membership.poll(60_000)
        identity, data = membership.recv_multipart()
        refusal = RegisterRefused("no such model here")
        membership.send_multipart([identity, encode(Envelope(Party("r", 1), decode(data).sender, refusal))])
        out, _ = child.communicate(timeout=PATIENCE_SECONDS)
    assert out.endswith("the router refuses m0: no such model here\n") and child.returncode == 0
