"""A cluster on several raylets of this machine: placement, death and arrival of nodes, control, with load on it."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from cluster_load import bodies, right_tokens, steady_load
from serving import wait_until_quiet
from splitserve.orchestration.client import follow, log_lines, status_of
from splitserve.orchestration.control import ClusterStatus, Refused, Scale, UpgradeCluster, accepted
from splitserve.orchestration.ray_client import RayClient, connect
from splitserve.orchestration.ray_commands import client_on_ray, up_on_ray
from splitserve.orchestration.ray_names import CLUSTER_VARIABLE, NAMESPACE, controller_name
from splitserve.orchestration.spec_document import read_spec
from splitserve.orchestration.state_folder import StateFolder

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "SPLITSERVE_RAY_TESTS" not in os.environ, reason="several Ray nodes on one machine: make ray-test"
    ),
]

NODE = {"num_cpus": 5, "object_store_memory": 80 << 20, "include_dashboard": False}


def splitserve(*arguments: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "splitserve.orchestration.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition didn't come true"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def raylets() -> Iterator[Cluster]:
    """A head, which this process is connected to, and one more node."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        connect(cluster.address, with_code=True)
        cluster.add_node(**NODE)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPLITSERVE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def write_spec(path: Path, model: Path, name: str, threads: int = 1) -> str:
    path.write_text(f"""
name: {name}
model: {{path: {model}, served_name: tiny, max_model_len: 512}}
pools:
- {{name: fill, role: prefill, count: 2, threads: {threads}, memory: {{kv: 16MiB}}}}
- {{name: gen, role: decode, count: 2, threads: {threads}, memory: {{kv: 16MiB}}}}
router: {{port: 0}}
network: {{host: 127.0.0.1}}
""")
    return str(path)


def places(status: ClusterStatus, raylets: Cluster) -> Counter[tuple[str, str]]:
    """How many workers of each pool are on each node, by the node's raylet."""
    found: Counter[tuple[str, str]] = Counter()
    for worker in status.workers:
        raylet = raylet_above(worker.pid)
        found[next(n.node_id for n in raylets.list_all_nodes() if raylet_of(n) == raylet), worker.pool] += 1
    return found


def raylet_above(pid: int) -> int:
    return next(parent.pid for parent in psutil.Process(pid).parents() if parent.name().startswith("raylet"))


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def processes_of(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(CLUSTER_VARIABLE) == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_idle(raylets: Cluster) -> bool:
    """Whether nothing is reserved on any node."""
    del raylets
    total, free = ray.cluster_resources(), ray.available_resources()
    return total.get("CPU") == free.get("CPU")


def test_a_life_under_load_on_several_nodes(raylets: Cluster, tiny_qwen3: Path, tmp_path: Path, state: Path) -> None:
    spec = write_spec(tmp_path / "spec.yaml", tiny_qwen3, "life")
    url = up_on_ray(read_spec(spec), StateFolder("life"), raylets.address, "info", restart=True)
    client = client_on_ray("life", raylets.address)
    home, other = raylets.list_all_nodes()
    assert raylet_above(status_of(client).router.pid) in (raylet_of(home), raylet_of(other))
    assert set(places(status_of(client), raylets).values()) == {1}, "each pool is spread over the nodes"
    expected = right_tokens(url, "tiny", tiny_qwen3)
    assert "a cluster called life is on Ray" in splitserve("up", "--ray", raylets.address, "--spec", spec, status=2)

    def settle(counts: dict[str, int]) -> ClusterStatus:
        return follow(client, print, lambda status: status.is_settled and status.counts == counts, 0)

    with steady_load(url, bodies("tiny"), expected, streams=2) as load:
        raylets.remove_node(other, allow_graceful=False)
        wait_until(lambda: any(worker.phase != "ready" for worker in status_of(client).workers))
        status = settle({"fill": 2, "gen": 2})
        assert {node for node, _ in places(status, raylets)} == {home.node_id}
        assert all("was lost" in worker.last_words for worker in status.workers if worker.num_restarts)

        third = raylets.add_node(**NODE)
        accepted(client.ask(Scale("gen", 3)))
        status = settle({"fill": 2, "gen": 3})
        assert places(status, raylets)[third.node_id, "gen"] == 1, "the newcomer has room and nobody"
        for pool in ("fill", "gen"):
            accepted(client.ask(Scale(pool, 1)))
        status = settle({"fill": 1, "gen": 1})

        pids = {worker.pid for worker in status.workers}
        client.bring_code()
        target = read_spec(write_spec(tmp_path / "next.yaml", tiny_qwen3, "x", threads=2))
        accepted(client.ask(UpgradeCluster(msgspec.to_builtins(target))))
        status = follow(
            client, print, lambda status: status.upgrade is not None and status.upgrade.state != "running", 0
        )
        assert status.upgrade is not None and (status.upgrade.state, status.upgrade.num_replaced) == ("done", 2)
        assert not pids & {worker.pid for worker in status.workers}
    assert not load.problems, load.problems[:3]
    assert load.num_done > 4
    wait_until_quiet(url)
    assert any("is asked to finish its requests" in line for line in log_lines(client, "launcher", 99, follow=False))

    said: list[str] = []
    client.down(said.append)
    assert said == ["life: all processes have ended"]
    assert not processes_of("life") and not client.leftovers() and not state.exists()
    wait_until(lambda: is_idle(raylets))


def test_the_controller_comes_back_and_a_killed_driver_leaves_nothing(
    raylets: Cluster, tiny_qwen3: Path, tmp_path: Path, state: Path
) -> None:
    spec = write_spec(tmp_path / "spec.yaml", tiny_qwen3, "back")
    command = [sys.executable, "-m", "splitserve.orchestration.cli", "up", "--ray", raylets.address, "--spec", spec]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert any("listening" in line for line in driver.stdout)
        driver.kill()
    client = RayClient("back", raylets.address)
    status = follow(client, print, lambda status: status.state == "serving", 0)
    expected = right_tokens(status.url, "tiny", tiny_qwen3)

    controller = ray.get_actor(controller_name("back"), namespace=NAMESPACE)
    pids = {worker.name: worker.pid for worker in status.workers}
    with steady_load(status.url, bodies("tiny"), expected, streams=2) as load:
        ray.kill(controller, no_restart=False)
        after = follow(client, print, lambda status: status.state == "serving" and status.is_settled, 0)
        assert {worker.name: worker.pid for worker in after.workers} == pids and after.url == status.url
        assert isinstance(client.ask(Scale("gen", 0)), Refused)
        os.kill(pids["gen-1"], signal.SIGKILL)
        wait_until(lambda: any(worker.num_restarts for worker in status_of(client).workers))
        follow(client, print, lambda status: status.is_settled, 0)
    assert not load.problems, load.problems[:3]

    router = status_of(client).router.pid
    os.kill(router, signal.SIGKILL)
    wait_until(lambda: status_of(client).router.pid not in (0, router))
    wait_until(lambda: right_tokens_or_none(status.url, tiny_qwen3) == expected)

    text = splitserve("down")
    assert "all processes have ended" in text
    assert not processes_of("back") and not client.leftovers() and not state.exists()


def right_tokens_or_none(url: str, checkpoint: Path) -> list[list[int]] | None:
    try:
        return right_tokens(url, "tiny", checkpoint)
    except (OSError, KeyError, AssertionError):
        return None


def test_what_no_node_can_run_is_refused(raylets: Cluster, tiny_qwen3: Path, tmp_path: Path, state: Path) -> None:
    spec = write_spec(tmp_path / "spec.yaml", tiny_qwen3, "huge", threads=64)
    text = splitserve("up", "--ray", raylets.address, "--spec", spec, status=2)
    assert "no node of the Ray cluster could ever run a worker of pool fill: it takes 64 CPU" in text
    Path(spec).write_text(Path(spec).read_text().replace("threads: 64", "threads: 1, nodes: {labels: {zone: mars}}"))
    assert "on a node with labels {'zone': 'mars'}" in splitserve(
        "up", "--ray", raylets.address, "--spec", spec, status=2
    )
    Path(spec).write_text(write_spec(tmp_path / "x", tmp_path / "nowhere", "huge") and (tmp_path / "x").read_text())
    assert "no such directory" in splitserve("up", "--ray", raylets.address, "--spec", spec, status=2)
    assert not RayClient("huge", raylets.address).leftovers() and not state.exists()
