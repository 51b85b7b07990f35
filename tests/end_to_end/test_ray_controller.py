"""A Ray controller that is lost: while its cluster starts, or for good, in the middle of an upgrade. The next one goes
on."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster
from ray.experimental import internal_kv

from cluster_load import bodies, right_tokens, steady_load
from command_line import PATIENCE_SECONDS, splitserve
from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.client import status_of
from splitserve.orchestration.cluster.host import ChildProgress
from splitserve.orchestration.ray.client import RayClient, connect, create_controller, start_on_ray
from splitserve.orchestration.ray.host import agents_of
from splitserve.orchestration.ray.names import NAMESPACE, controller_name, memory_key
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.document import parse_spec
from waiting import wait_until

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "no_monitor": True}
NODE |= {"include_dashboard": False, "include_log_monitor": False}
# `splitserve upgrade`, killed once it has removed the old controller.
KILLED_UPGRADE = """
import os, signal, sys
from splitserve.orchestration.cli import main
from splitserve.orchestration.ray import client
client.create_controller = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main.main(["upgrade", *sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        connect(cluster.address, with_code=True)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def spec_of(name: str, model: Path) -> ClusterSpec:
    return parse_spec(f"""
name: {name}
model: {{path: {model}, served_name: tiny, max_model_len: 512}}
pools: [{{name: both, role: mixed, threads: 1, memory: {{kv: 16MiB}}}}]
router: {{port: 0, policy: least-loaded}}
network: {{host: 127.0.0.1}}
""")


def lose_controller(name: str) -> None:
    """Have Ray restart the controller, as after a crash."""
    ray.kill(ray.get_actor(controller_name(name), namespace=NAMESPACE), no_restart=False)


def refuses_what_it_cannot_read(client: RayClient) -> None:
    """A controller with other code, which can't read what this one has stored, doesn't take its place."""
    stored = internal_kv._internal_kv_get(memory_key("starting"))
    internal_kv._internal_kv_put(memory_key("starting"), b'{"of": "another version"}')
    with pytest.raises(ConfigError, match="the state of cluster starting is one of another version of Splitserve"):
        client.bring_code()
    assert client.is_alive() and status_of(client).state == "serving"
    internal_kv._internal_kv_put(memory_key("starting"), stored)


@pytest.mark.parametrize("moment", ["once the router's agent is there", "while a worker loads"])
def test_the_start_goes_on(head: Cluster, tiny_qwen3: Path, moment: str) -> None:
    spec = spec_of("starting", tiny_qwen3)
    client, seen, urls = RayClient("starting", head.address), list[ChildProgress](), list[str]()
    create_controller(spec, "info", restart=True)
    try:
        follower = threading.Thread(target=lambda: urls.append(client.follow_start(seen.append)), daemon=True)
        follower.start()
        if moment == "while a worker loads":
            wait_until(lambda: any(each.stage == "plan" for each in seen), "no worker starts", PATIENCE_SECONDS)
        else:
            wait_until(lambda: list(agents_of("starting")), "no router starts", PATIENCE_SECONDS)
        lose_controller("starting")
        follower.join(PATIENCE_SECONDS)
        status = status_of(client)
        assert urls == [status.url] and status.state == "serving"
        assert [worker.phase for worker in status.workers] == ["ready"]
        assert sorted(name for name, _, _ in agents_of("starting")) == ["both-0", "router"], "another router is left"
        if moment == "while a worker loads":
            refuses_what_it_cannot_read(client)
    finally:
        client.down(print)
    assert not client.leftovers()


def test_an_upgrade_that_is_killed_between_two_controllers_is_continued_by_the_next(
    head: Cluster, tiny_qwen3: Path
) -> None:
    spec, client = spec_of("headless", tiny_qwen3), RayClient("headless", head.address)
    options = ("--ray", head.address, "--name", "headless")
    create_controller(spec, "info", restart=True)
    try:
        url = client.follow_start(lambda _progress: None)
        expected = right_tokens(url, "tiny", tiny_qwen3)
        before = {name for name, _, _ in agents_of("headless")}
        with steady_load(url, bodies("tiny"), expected, streams=1) as load:
            upgrade = [sys.executable, "-c", KILLED_UPGRADE, *options]
            assert subprocess.run(upgrade, timeout=PATIENCE_SECONDS, check=False).returncode == -signal.SIGKILL
            assert not client.is_alive() and {name for name, _, _ in agents_of("headless")} == before
            for said in (splitserve("status", *options, status=2), refusal_of_another_start(spec, head.address)):
                assert "headless has no controller: `splitserve upgrade` was ended" in said
                assert f"`splitserve upgrade --ray {head.address} --name headless` creates" in said
            assert "1 workers replaced" in splitserve("upgrade", *options, "--allow-gap")
        assert not load.problems, load.problems[:3]
        status = status_of(client)
        assert status.url == url and [(worker.phase, worker.revision) for worker in status.workers] == [("ready", 2)]
    finally:
        client.down(print)
    assert not client.leftovers()


def test_a_cluster_that_is_ended_between_two_controllers_of_an_upgrade_is_not_started_again(
    head: Cluster, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, kill = RayClient("ended", head.address), ray.kill

    def kill_and_end(controller: ActorHandle[Any]) -> None:
        monkeypatch.setattr(ray, "kill", kill)
        kill(controller)
        wait_until(lambda: not client.is_alive(), "the controller is removed")
        assert "its controller is gone" in splitserve("down", "--ray", head.address, "--name", "ended")

    create_controller(spec_of("ended", tiny_qwen3), "info", restart=True)
    try:
        client.follow_start(lambda _progress: None)
        monkeypatch.setattr(ray, "kill", kill_and_end)
        with pytest.raises(ConfigError, match="ended was ended by `splitserve down` during this upgrade"):
            client.bring_code()
        assert not client.leftovers()
    finally:
        client.down(print)


def refusal_of_another_start(spec: ClusterSpec, address: str) -> str:
    with pytest.raises(ConfigError) as caught:
        start_on_ray(spec, address, "info", restart=True, show=lambda _progress: None)
    return str(caught.value)
