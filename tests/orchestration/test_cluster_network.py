"""Processes of a cluster find each other: over IPv6, by an interface's name, started in any order."""

import random
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cluster_load import bodies, right_tokens, steady_load
from serving import wait_until_quiet
from splitserve.orchestration.cluster.host import ChildExited, ChildProgress, Event
from splitserve.orchestration.cluster.launcher import LocalCluster, probe_ready
from splitserve.orchestration.hosts.local import LocalHost
from splitserve.orchestration.hosts.process import ChildProcess
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.document import parse_spec
from splitserve.orchestration.spec.expansion import RouterPorts
from waiting import PATIENCE_SECONDS, wait_until


def spec_of(model: Path, **parts: str) -> ClusterSpec:
    text = f"""
model: {{path: {model}, served_name: tiny, max_model_len: 512}}
pools:
- {{name: fill, role: prefill, threads: 1, memory: {{kv: 16MiB}}}}
- {{name: gen, role: decode, threads: 1, memory: {{kv: 16MiB}}}}
"""
    return parse_spec(text + "\n".join(f"{name}: {value}" for name, value in parts.items()))


def loopback_interface() -> str:
    """Its name, where it has an IPv6 address; skips the test elsewhere."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET6 and entry.address == "::1" for entry in entries):
            return name
    pytest.skip("no interface has the address ::1")


def test_a_cluster_on_ipv6_by_the_name_of_an_interface(tiny_qwen3: Path, tmp_path: Path) -> None:
    """Membership, hand-over messages and the HTTP edge; tokens as of transformers."""
    network = f"{{interface: {loopback_interface()}, ip_version: 6}}"
    spec = spec_of(tiny_qwen3, network=network, router='{host: "::1", port: 0, policy: least-loaded}')
    with LocalCluster(spec, log_folder=tmp_path) as cluster:
        assert cluster.url.startswith("http://[::1]:")
        right_tokens(cluster.url, "tiny", tiny_qwen3)
        metrics = wait_until_quiet(cluster.url)
        assert metrics["gen-0"]["handovers_total"] == len(bodies("tiny"))
    log = (tmp_path / "router.log").read_text()
    for worker in ("fill-0", "gen-0"):
        assert re.search(rf"worker {worker}@\w+ \(\w+\) registered from tcp://\[::1\]:", log)


class Started:
    """Processes of a cluster that nobody but the test starts, each with what it has told of itself."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.host = LocalHost(log_level="warning", num_cores=2)
        self.host.prepare(spec)
        self.stages: dict[str, dict[str, dict[str, str]]] = {}
        self.children: list[ChildProcess] = []

    def emit(self, event: Event) -> None:
        match event:
            case ChildProgress(name, stage, detail):
                self.stages.setdefault(name, {})[stage] = detail
            case ChildExited(name, returncode):
                self.stages.setdefault(name, {})["exit"] = {"returncode": str(returncode)}

    def worker(self, pool: str, membership: str) -> None:
        child = self.host.start_worker(f"{pool}-0", self.spec, self.spec.pool(pool), membership, self.emit)
        self.children.append(child)

    def router(self, ports: RouterPorts) -> ChildProcess:
        self.stages.pop("router", None)
        self.children.append(self.host.start_router("router", self.spec, ports, self.emit))
        return self.children[-1]

    def wait(self, name: str, stage: str) -> dict[str, str]:
        wait_until(lambda: stage in self.stages.get(name, {}), f"{name} is {stage}")
        return self.stages[name][stage]

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.join(PATIENCE_SECONDS)
        self.host.close()


@pytest.fixture
def started(tiny_qwen3: Path) -> Iterator[Started]:
    processes = Started(spec_of(tiny_qwen3, router="{port: 0, policy: least-loaded}"))
    yield processes
    processes.end()


def free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to whoever asks for any: nobody else takes them before they are used."""
    free: set[int] = set()
    while len(free) < count:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            free.add(int(listener.getsockname()[1]))
    return list(free)


def test_processes_may_start_in_any_order(started: Started, tiny_qwen3: Path) -> None:
    """Workers long before the router, decode before prefill; and a router that comes after another one."""
    http, membership_port = free_ports(2)
    ports = RouterPorts(http=http, membership=membership_port)
    membership = f"tcp://127.0.0.1:{ports.membership}"
    for pool in ("gen", "fill"):
        started.worker(pool, membership)
        started.wait(f"{pool}-0", "placement")
    first = started.router(ports)
    url = started.wait("router", "listening")["url"]
    wait_until(lambda: probe_ready(url)[0], "the router is ready")
    expected = right_tokens(url, "tiny", tiny_qwen3)

    first.kill()
    assert first.join(PATIENCE_SECONDS)
    started.router(ports)
    assert started.wait("router", "listening")["url"] == url
    wait_until(lambda: probe_ready(url)[0], "the next router is ready")
    with steady_load(url, bodies("tiny"), expected, streams=2) as load:
        # The router is ready with decode alone, which then computes prompts, too.
        wait_until(lambda: load.num_done >= 4 and "fill-0" in load.workers, "some requests are done, on both workers")
    assert not load.problems, load.problems[:3]
    assert load.workers == {"fill-0", "gen-0"}
    assert not any("exit" in stages for name, stages in started.stages.items() if name != "router")
