"""Two router processes on one port: requests through both, limits and pauses that hold in both, the loss of one."""

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from small_clusters import BLOCK_SIZE
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.spec.cluster_spec import SecretRef, SecretsSpec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig, ProtocolConfig
from stopping import stop_process
from waiting import PATIENCE_SECONDS, wait_until

OWN_KEY = "key-of-the-cluster-itself-0123456789"
KEYS = {"small": "key-of-the-small-tenant-0123456789", "large": "key-of-the-large-tenant-0123456789"}
TENANTS = f"""
tenants:
- {{name: small, keys: ["{KEYS["small"]}"], max_requests_in_flight: 1}}
- {{name: large, keys: ["{KEYS["large"]}"]}}
"""
ROUTERS = ("router", "router-1")


class Client:
    """A connection that one router process has accepted."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE_SECONDS)
        self.get("/version")

    def get(self, path: str) -> Any:
        answer = self.begin("GET", path)
        content = answer.read()
        return json.loads(content) if content.startswith((b"{", b"[")) else content.decode()

    def post(self, path: str, body: Any, key: str = OWN_KEY) -> tuple[int, Any]:
        answer = self.begin("POST", path, body, key)
        return answer.status, json.loads(answer.read())

    def begin(self, method: str, path: str, body: Any = None, key: str = OWN_KEY) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        return self._connection.getresponse()

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def cluster(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    tenants.write_text(TENANTS)
    key = tenants.with_name("key")
    key.write_text(OWN_KEY)
    config = EngineConfig(
        model=str(tiny_qwen3), dtype="float32", block_size=BLOCK_SIZE, kv_memory_bytes=32 << 20, max_num_seqs=16
    )
    spec = simple_spec(config, port=0, protocol=ProtocolConfig(heartbeat_seconds=0.25), num_mixed=2)
    router = msgspec.structs.replace(spec.router, workers=2, tenants=str(tenants))
    spec = msgspec.structs.replace(spec, router=router, secrets=SecretsSpec(api_key=SecretRef(file=str(key))))
    with LocalCluster(spec, log_level="warning") as running, running.supervised():
        yield running


@contextmanager
def client_of(cluster: LocalCluster, router: str) -> Iterator[Client]:
    """A connection to one router: the other one accepts none meanwhile."""
    other = next(name for name in ROUTERS if name != router)
    pid = cluster.pids[other]
    stop_process(pid)
    try:
        client = Client(cluster.url)
    finally:
        os.kill(pid, signal.SIGCONT)
    try:
        yield client
    finally:
        client.close()


def body(prompt: list[int], max_tokens: int = 4, **options: Any) -> dict[str, Any]:
    return {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_route": True,
        "model": options.pop("model", None), "return_token_ids": True, **options,
    }  # fmt: skip


def complete(client: Client, cluster: LocalCluster, prompt: list[int], max_tokens: int = 4) -> dict[str, Any]:
    status, answer = client.post("/v1/completions", body(prompt, max_tokens, model=cluster.spec.served_model_name))
    assert status == 200, answer
    return answer  # type: ignore[no-any-return]


def test_both_serve_on_one_port_and_metrics_have_the_series_of_both(cluster: LocalCluster) -> None:
    prompt = list(range(10, 60))
    tokens = []
    for name in ROUTERS:
        with client_of(cluster, name) as client:
            assert client.get("/admin/workers")["pid"] == cluster.pids[name]
            tokens.append(complete(client, cluster, prompt)["choices"][0]["token_ids"])
    assert tokens[0] == tokens[1]
    with client_of(cluster, "router") as client:
        lines = client.get("/metrics").splitlines()
    for name in ROUTERS:
        [total] = [
            line for line in lines if line.startswith("splitserve_output_tokens_total") and f'router="{name}"' in line
        ]
        assert float(total.split()[-1]) >= 4
    assert len([line for line in lines if line.startswith("# HELP splitserve_output_tokens")]) == 1
    assert len([line for line in lines if line.startswith("splitserve_worker_ready")]) == 2, "once per worker"


def test_a_prefix_that_one_has_sent_is_found_by_the_other(cluster: LocalCluster) -> None:
    with client_of(cluster, "router") as one, client_of(cluster, "router-1") as other:
        for number in range(6):
            prompt = [100 + number] * 200
            complete(one, cluster, prompt)
            time.sleep(0.3)
            answer = complete(other, cluster, [*prompt, 7])
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192, (
                f"prompt {number} is computed again"
            )


def test_a_tenants_limit_holds_over_both(cluster: LocalCluster) -> None:
    with client_of(cluster, "router") as one, client_of(cluster, "router-1") as other:
        name = cluster.spec.served_model_name
        stream = one.begin("POST", "/v1/completions", body([5] * 20, 900, model=name, stream=True), KEYS["small"])
        assert stream.status == 200
        time.sleep(0.2)
        status, answer = other.post("/v1/completions", body([6] * 20, model=name), KEYS["small"])
        assert (status, answer["error"]["code"]) == (429, "too_many_requests")
        status, _ = other.post("/v1/completions", body([6] * 20, model=name), KEYS["large"])
        assert status == 200, "the other tenant has no limit"


def test_a_pause_through_one_stops_both_and_either_ends_it(cluster: LocalCluster) -> None:
    with client_of(cluster, "router") as one, client_of(cluster, "router-1") as other:
        state = one.post("/admin/pause", {"mode": "keep"})[1]
        assert state["paused"] and state["routers_pending"] == []
        assert other.get("/admin/pause")["paused"], "the other router is asked after the answer"
        wait_until(lambda: other.get("/admin/pause")["settled"], "the workers aren't frozen")
        assert other.post("/admin/resume", {})[1]["paused"] is False
        assert not one.get("/admin/pause")["paused"], "the first router is asked after the answer"
        wait_until(lambda: not one.get("/admin/pause")["workers_frozen"], "workers are still frozen")
        complete(one, cluster, [9] * 20)
        assert one.post("/admin/reset-prefix-cache", {})[1]["pending"] == []


def test_the_loss_of_one_costs_its_own_streams_and_it_comes_back(cluster: LocalCluster) -> None:
    prompt = [77] * 200
    name = cluster.spec.served_model_name
    with client_of(cluster, "router") as one:
        complete(one, cluster, prompt)
        with client_of(cluster, "router-1") as doomed:
            stream = one.begin("POST", "/v1/completions", body([5] * 20, 600, model=name, stream=True))
            assert doomed.begin("POST", "/v1/completions", body([6] * 20, 900, model=name, stream=True)).status == 200
            pid = cluster.pids["router-1"]
            os.kill(pid, signal.SIGKILL)
            for _ in range(5):
                fresh = Client(cluster.url)
                assert complete(fresh, cluster, [8] * 20)["choices"]
                fresh.close()
            events = stream.read().decode().strip().split("\n\n")
            assert events[-1] == "data: [DONE]" and not any('"error"' in event for event in events)
        wait_until(lambda: cluster.pids.get("router-1", pid) != pid, "it is not started again")
        wait_until(lambda: one.get("/ready") == {"status": "ready"})
    time.sleep(2.0)
    with client_of(cluster, "router-1") as client:
        answer = complete(client, cluster, [*prompt, 7])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
