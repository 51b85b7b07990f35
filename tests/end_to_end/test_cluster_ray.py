"""A cluster on several raylets of this machine: placement, death and arrival of nodes, control, with load on it."""

import os
import queue
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

import launcher_children
import splitserve as package
from cluster_load import bodies, right_tokens, steady_load
from command_line import command, splitserve
from lmcache_metrics import CHUNK_TOKENS, availability
from lmcache_server import python_with_lmcache, segments_of
from ray_processes import keepers_of, processes_of, raylet_above, raylet_of
from serving import complete_all, wait_until_quiet
from splitserve.benchmarks.cluster.recovery_times import recoveries
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.client import ClusterClient, follow, log_lines, status_of
from splitserve.orchestration.cluster.host import ChildExited, ChildProgress, Event
from splitserve.orchestration.cluster.launch_errors import LaunchError
from splitserve.orchestration.cluster.launcher import LocalCluster
from splitserve.orchestration.control.requests import (
    ClusterStatus,
    DrainWorker,
    Refused,
    Scale,
    UpgradeCluster,
    accepted,
)
from splitserve.orchestration.control.state_folder import StateFolder
from splitserve.orchestration.hosts.local import Entries
from splitserve.orchestration.ray.client import RayClient, connect, start_on_ray
from splitserve.orchestration.ray.commands import client_on_ray, up_on_ray
from splitserve.orchestration.ray.host import RayChild, RayHost, groups_of
from splitserve.orchestration.ray.names import NAMESPACE, controller_name
from splitserve.orchestration.spec.cluster_spec import NetworkSpec
from splitserve.orchestration.spec.document import read_spec
from splitserve.orchestration.spec.shorthand import simple_spec
from splitserve.protocol.config import EngineConfig
from waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")

NODE = {"num_cpus": 5, "object_store_memory": 80 << 20, "no_monitor": True}  # of an autoscaler
NODE |= {"include_dashboard": False, "include_log_monitor": False}
PATIENCE_SECONDS = 250.0  # for what Ray does; a quiet machine takes a small part of it


@pytest.fixture(scope="module")
def raylets() -> Iterator[Cluster]:
    """A head, which this process is connected to, and one more node."""
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # what else fills the memory here isn't their fault
    os.environ.setdefault("RAY_health_check_period_ms", "500")  # a node that is gone doesn't answer five times
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # none of them would have our code
    os.environ.setdefault("RAY_worker_niceness", "0")  # other tests run beside these, and Ray's would wait for them
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        connect(cluster.address, with_code=True)
        cluster.add_node(**NODE)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@dataclass(frozen=True)
class Life:
    """A cluster of two pools of two workers. ``expected``: its right answers, by the number of the body."""

    client: RayClient
    state: Path
    url: str
    expected: list[list[int]]


@pytest.fixture(scope="module")
def life(raylets: Cluster, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """The cluster of several tests, each of which asks for the workers that it needs. Its driver was killed while it
    started."""
    folder, client = tmp_path_factory.mktemp("life"), RayClient("life", raylets.address)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPLITSERVE_STATE_DIR", str(folder / "state"))
        try:
            spec = write_spec(folder / "spec.yaml", tiny_qwen3, "life")
            kill_in_the_middle("up", "--ray", raylets.address, "--spec", spec)
            url = follow(client, print, lambda status: status.state == "serving", 0, PATIENCE_SECONDS).url
            yield Life(client, folder / "state", url, right_tokens(url, "tiny", tiny_qwen3))
        finally:
            take_down(client)


@pytest.fixture
def left_alone(raylets: Cluster) -> Iterator[None]:
    """A test that fails takes its cluster down, or the next one would find no room."""
    yield
    take_down(RayClient("near", raylets.address))


def take_down(client: RayClient) -> None:
    if client.leftovers():
        client.down(print)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPLITSERVE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def write_spec(path: Path, model: Path, name: str, threads: int = 1, num_prefill: int = 2) -> str:
    path.write_text(f"""
name: {name}
model: {{path: {model}, served_name: tiny, max_model_len: 512}}
pools:
- {{name: fill, role: prefill, count: {num_prefill}, threads: {threads}, memory: {{kv: 16MiB}}}}
- {{name: gen, role: decode, count: 2, threads: {threads}, memory: {{kv: 16MiB}}}}
router: {{port: 0, policy: least-loaded}}
network: {{host: 127.0.0.1}}
""")
    return str(path)


def places(status: ClusterStatus, raylets: Cluster) -> Counter[tuple[str, str]]:
    """Count the workers of each pool on each node, by the node's raylet."""
    found: Counter[tuple[str, str]] = Counter()
    for worker in status.workers:
        raylet = raylet_above(worker.pid)
        found[next(n.node_id for n in raylets.list_all_nodes() if raylet_of(n) == raylet), worker.pool] += 1
    return found


def is_idle() -> bool:
    total, free = ray.cluster_resources(), ray.available_resources()
    return total.get("CPU") == free.get("CPU")


def settle(client: RayClient, counts: dict[str, int]) -> ClusterStatus:
    return follow(client, print, lambda status: status.is_settled and status.counts == counts, 0, PATIENCE_SECONDS)


def scale(client: RayClient, counts: dict[str, int]) -> ClusterStatus:
    for pool, count in counts.items():
        accepted(client.ask(Scale(pool, count)))
    return settle(client, counts)


def test_nodes_come_and_die_under_load(raylets: Cluster, life: Life, tiny_qwen3: Path, tmp_path: Path) -> None:
    client = life.client
    home, other = raylets.list_all_nodes()
    assert raylet_above(status_of(client).router.pid) == raylet_of(home), "the router is where `up` was run"
    assert set(places(status_of(client), raylets).values()) == {1}, "each pool is spread over the nodes"
    with pytest.raises(ConfigError, match="a cluster called life is on Ray"):
        spec = read_spec(write_spec(tmp_path / "spec.yaml", tiny_qwen3, "life"))
        start_on_ray(spec, raylets.address, "info", restart=True, show=print)

    with steady_load(life.url, bodies("tiny"), life.expected, streams=2) as load:
        newcomer = raylets.add_node(**NODE)
        status = scale(client, {"fill": 2, "gen": 3})
        assert places(status, raylets)[newcomer.node_id, "gen"] == 1, "it had none"

        died_at = time.time()
        raylets.remove_node(other, allow_graceful=False)
        wait_until(lambda: any(worker.phase != "ready" for worker in status_of(client).workers), "a worker is missed")
        status = settle(client, {"fill": 2, "gen": 3})
        assert {node for node, _ in places(status, raylets)} == {home.node_id, newcomer.node_id}
        # Others may have been started again, too: UCX has been seen to abort in a reader whose source died.
        lost = [worker for worker in status.workers if "was lost" in worker.last_words]
        assert sorted(worker.pool for worker in lost) == ["fill", "gen"] and all(each.num_restarts for each in lost)
        names = [worker.name for worker in lost]
        ways_back = recoveries(msgspec.to_builtins(status), names, died_at)
        assert [each.worker for each in ways_back] == sorted(names, key=lambda name: ready_at(status, name))
        assert all(min(each.detection, each.delay, each.assignment, each.start) >= 0 for each in ways_back)
    assert not load.problems, load.problems[:3]
    assert load.num_done > 4


def ready_at(status: ClusterStatus, name: str) -> float:
    return next(worker.times.ready_at or 0.0 for worker in status.workers if worker.name == name)


def is_upgraded(status: ClusterStatus) -> bool:
    return status.upgrade is not None and status.upgrade.state != "running"


@pytest.mark.slow
def test_the_controller_comes_back(life: Life, tiny_qwen3: Path) -> None:
    client = life.client
    status = scale(client, {"fill": 1, "gen": 2})
    controller = ray.get_actor(controller_name("life"), namespace=NAMESPACE)
    pids = {worker.name: worker.pid for worker in status.workers}
    # What Ray makes of a group whose node is gone while there is no controller to remove it.
    placement_group([{"CPU": 1}], name="life/agent/gen-1/0badcafe", lifetime="detached")
    assert "life/agent/gen-1/0badcafe" in groups_of("life")
    with steady_load(life.url, bodies("tiny"), life.expected, streams=2) as load:
        ray.kill(controller, no_restart=False)
        after = follow(
            client, print, lambda status: status.state == "serving" and status.is_settled, 0, PATIENCE_SECONDS
        )
        assert {worker.name: worker.pid for worker in after.workers} == pids and after.url == life.url
        wait_until(lambda: "life/agent/gen-1/0badcafe" not in groups_of("life"), "the group is still there")
        assert isinstance(client.ask(Scale("gen", 0)), Refused)
        victim = next(worker for worker in after.workers if worker.pool == "gen")
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: num_restarts(client, victim.name) > victim.num_restarts, f"{victim.name} is back")
        settle(client, {"fill": 1, "gen": 2})
    assert not load.problems, load.problems[:3]

    router = status_of(client).router.pid
    os.kill(router, signal.SIGKILL)
    wait_until(lambda: status_of(client).router.pid not in (0, router), "another router runs")
    wait_until(lambda: right_tokens_or_none(life.url, tiny_qwen3) == life.expected, "it answers as before")


@pytest.mark.slow
def test_the_same_spec_gives_the_same_tokens_without_ray(life: Life, tiny_qwen3: Path, tmp_path: Path) -> None:
    drawn = [{**body, "temperature": 0.9, "top_p": 0.9, "seed": 5} for body in bodies("tiny")]
    requests = [*bodies("tiny"), *drawn]
    spec = read_spec(write_spec(tmp_path / "spec.yaml", tiny_qwen3, "same", num_prefill=1))
    with LocalCluster(spec, log_level="warning") as local:
        ours, theirs = [
            [answer["choices"][0]["token_ids"] for answer in complete_all(each, requests, at_once=False)]
            for each in (life.url, local.url)
        ]
    assert ours[: len(drawn)] != ours[len(drawn) :], "drawing draws"
    assert ours == theirs


def num_restarts(client: RayClient, name: str) -> int:
    return next(worker.num_restarts for worker in status_of(client).workers if worker.name == name)


def test_an_upgrade_under_load_and_an_end_that_leaves_nothing(life: Life, tiny_qwen3: Path, tmp_path: Path) -> None:
    client = life.client
    with steady_load(life.url, bodies("tiny"), life.expected, streams=2) as load:
        pids = {worker.pid for worker in scale(client, {"fill": 1, "gen": 1}).workers}
        client.bring_code()
        target = read_spec(write_spec(tmp_path / "next.yaml", tiny_qwen3, "x", threads=2))
        accepted(client.ask(UpgradeCluster(msgspec.to_builtins(target))))
        status = follow(client, print, is_upgraded, 0, PATIENCE_SECONDS)
        assert status.upgrade is not None and (status.upgrade.state, status.upgrade.num_replaced) == ("done", 2)
        assert not pids & {worker.pid for worker in status.workers}
    assert not load.problems, load.problems[:3]
    assert load.num_done > 4
    wait_until_quiet(life.url)
    assert any("is asked to finish its requests" in line for line in log_lines(client, "launcher", 99, follow=False))

    folders = [Path(each) for process in processes_of("life") if (each := process.environ().get("UCX_POSIX_DIR"))]
    assert len(folders) == 2 and all(folder.is_dir() for folder in folders)
    text = splitserve("down")
    assert "all processes have ended" in text
    assert not any(folder.exists() for folder in folders), "shared memory"
    assert not processes_of("life") and not client.leftovers() and not life.state.exists()
    wait_until(is_idle, "nothing is reserved on any node")


def kill_in_the_middle(*arguments: str) -> None:
    """Run a command until it speaks of a process that listens; then kill it."""
    said: list[str] = []
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        too_late = threading.Timer(PATIENCE_SECONDS, driver.kill)
        too_late.start()
        try:
            for line in driver.stdout:
                said.append(line)
                if "listening" in line:
                    break
        finally:
            too_late.cancel()
            driver.kill()
    assert "listening" in said[-1], f"it never came so far: {said}"


def right_tokens_or_none(url: str, checkpoint: Path) -> list[list[int]] | None:
    try:
        return right_tokens(url, "tiny", checkpoint)
    except (OSError, KeyError, AssertionError):
        return None


@pytest.mark.slow
@pytest.mark.usefixtures("left_alone")
def test_each_node_has_an_lmcache_server(
    raylets: Cluster, tiny_qwen3: Path, tmp_path: Path, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers use their own node's; what they share is a folder. A server that dies comes back at the same place, one
    that nobody uses any more ends, and another controller goes on with those that it finds."""
    python_with_lmcache()
    shared, spec = tmp_path / "shared", tmp_path / "spec.yaml"
    spec.write_text(f"""
name: near
model: {{path: {tiny_qwen3}, served_name: tiny, max_model_len: 512}}
pools: [{{name: both, role: mixed, count: 2, threads: 1, memory: {{kv: 16MiB}}}}]
lmcache: {{memory: 32MiB, chunk_tokens: {CHUNK_TOKENS}, backends: [{{type: fs, base_path: {shared}}}]}}
router: {{port: 0, policy: least-loaded}}
network: {{host: 127.0.0.1}}
""")
    url = up_on_ray(read_spec(str(spec)), StateFolder("near"), raylets.address, "info", restart=True)
    warnings = [record.getMessage() for record in caplog.records if record.name.endswith("ray.commands")]
    assert "has no authentication" in warnings[0]
    assert "notices a machine without power or network after up to" in warnings[1]
    client = client_on_ray("near", raylets.address)
    stays, goes = (raylet_above(worker.pid) for worker in status_of(client).workers)
    wait_until(lambda: set(keepers_of("near")) == {stays, goes}, "each node has its server", PATIENCE_SECONDS)
    wait_until(lambda: availability(url) == {"both-0": True, "both-1": True}, "workers find them", PATIENCE_SECONDS)
    theirs, expected = prompts_of("both-1", url, shared)

    keepers = keepers_of("near")
    pids = {keeper.pid for keeper in keepers.values()}
    assert len(segments_of(pids)) == 2
    ray.kill(ray.get_actor(controller_name("near"), namespace=NAMESPACE), no_restart=False)
    keepers[stays].kill()
    settle(client, {"both": 2})
    assert keepers_of("near")[goes] == keepers[goes]
    accepted(client.ask(DrainWorker("both-1")))
    assert [worker.name for worker in settle(client, {"both": 1}).workers] == ["both-0"]
    wait_until(lambda: set(keepers_of("near")) == {stays}, "one is back, one has ended", PATIENCE_SECONDS)
    wait_until(lambda: knows_that_it_is_back(client, "both-0"), "it's found where it was", PATIENCE_SECONDS)
    wait_until(lambda: availability(url) == {"both-0": True}, "it's used", PATIENCE_SECONDS)
    answers = complete_all(url, theirs, at_once=False)
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= CHUNK_TOKENS for answer in answers)

    pids |= {keeper.pid for keeper in keepers_of("near").values()}
    client.down(print)
    assert not processes_of("near") and not client.leftovers() and not segments_of(pids)


@pytest.mark.usefixtures("left_alone")
def test_a_process_that_was_adopted_takes_signals_before_its_events_are_read(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is drained just after its controller has come back would be killed otherwise."""
    spec = simple_spec(EngineConfig(model=str(tiny_qwen3)), port=0, num_mixed=1)
    path = os.pathsep.join((str(Path(launcher_children.__file__).parent), str(Path(package.__file__).parent.parent)))
    pool = msgspec.structs.replace(spec.pools[0], environment={"PYTHONPATH": path})
    spec = msgspec.structs.replace(spec, pools=[pool], network=NetworkSpec(host="127.0.0.1"))
    entries = Entries(worker="launcher_children:run_worker")
    events: queue.Queue[Event] = queue.Queue()
    started = RayHost("back", "", entries=entries)
    worker = started.start_worker("mixed-0", spec, pool, "tcp://127.0.0.1:1", events.put)
    stage = ""
    while stage != "ready":
        event = events.get(timeout=PATIENCE_SECONDS)
        assert isinstance(event, ChildProgress), worker.describe_exit(event.returncode)
        stage = event.stage

    gate = threading.Event()
    listen = RayChild._listen
    monkeypatch.setattr(RayChild, "_listen", lambda child: gate.wait() and listen(child))
    adopted = RayHost("back", "", entries=entries).adopt(spec, {"mixed-0"}, lambda _event: None)["mixed-0"]
    adopted.send_signal(signal.SIGTERM)
    while not isinstance(event := events.get(timeout=PATIENCE_SECONDS), ChildExited):
        pass
    assert event == ChildExited("mixed-0", 0)
    gate.set()
    assert adopted.join(PATIENCE_SECONDS)


def knows_that_it_is_back(client: ClusterClient, worker: str) -> bool:
    return any("lmcache.link" in line and "is back" in line for line in log_lines(client, worker, 99, follow=False))


def prompts_of(worker: str, url: str, shared: Path) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Requests whose prompts a worker computed, and whose chunks are in the shared folder by now; their tokens."""
    longer = [{**body, "prompt": [400 + number, *range(500, 590)]} for number, body in enumerate(bodies("tiny"))]
    answers = complete_all(url, longer, at_once=True)
    theirs = [number for number, answer in enumerate(answers) if answer["splitserve"]["prefill"] == worker]
    assert theirs, f"{worker} got nothing to do"
    num_chunks = len(longer) * (len(longer[0]["prompt"]) // CHUNK_TOKENS)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(shared.rglob("*.data"))) < num_chunks:
        assert time.monotonic() < deadline, "chunks are missing in the folder"
        time.sleep(0.5)
        complete_all(url, longer, at_once=True)  # a store that fails is tried again when its blocks are used again
    return [longer[n] for n in theirs], [answers[n]["choices"][0]["token_ids"] for n in theirs]


def test_what_no_node_can_run_is_refused(raylets: Cluster, tiny_qwen3: Path, tmp_path: Path, state: Path) -> None:
    spec = write_spec(tmp_path / "spec.yaml", tiny_qwen3, "huge", threads=64)
    text = splitserve("up", "--ray", raylets.address, "--spec", spec, status=2)
    assert "no node of the Ray cluster could ever run a worker of pool fill: it takes 64 CPU" in text
    Path(spec).write_text(Path(spec).read_text().replace("threads: 64", "threads: 1, nodes: {labels: {zone: mars}}"))
    with pytest.raises(LaunchError, match=r"on a node with labels \{'zone': 'mars'\}"):
        start_on_ray(read_spec(spec), raylets.address, "info", restart=True, show=print)
    assert not RayClient("huge", raylets.address).leftovers() and not state.exists()
