"""A cluster on Ray nodes that share no network but a bridge: namespaces of this machine, each with its own address."""

import json
import os
import secrets
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster_load import bodies, right_tokens, steady_load
from serving import worker_metrics
from splitserve.benchmarks.cluster.ray_machines import Machines
from waiting import wait_until


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"ss{secrets.token_hex(3)}"
    bridge = ["ip", "link", "add", name, "type", "bridge"]
    possible = [
        subprocess.run(each, capture_output=True, check=False) for each in (["ip", "netns", "add", name], bridge)
    ]
    for undo in (["ip", "netns", "del", name], ["ip", "link", "del", name]):
        subprocess.run(undo, capture_output=True, check=False)
    return all(done.returncode == 0 for done in possible)


pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root, iproute2 and the right to make namespaces"),
]

SPEC = """
name: machines
model: {{path: {model}, served_name: tiny, max_model_len: 512}}
pools:
- {{name: fill, role: prefill, count: 2, threads: 1, memory: {{kv: 16MiB}}}}
- {{name: gen, role: decode, count: 2, threads: 1, memory: {{kv: 16MiB}}}}
router: {{host: 0.0.0.0, port: 0, policy: least-loaded}}
secrets: {{shared: {{file: {secret}}}}}
connector: {{transports: [tcp]}}
"""


def test_two_machines_one_of_which_dies(tiny_qwen3: Path, tmp_path: Path) -> None:
    """KV crosses the network by TCP; when a machine is gone without a word, its requests go on at the other one."""
    secret, spec = tmp_path / "secret", tmp_path / "spec.yaml"
    secret.write_text(secrets.token_hex(32))
    spec.write_text(SPEC.format(model=tiny_qwen3, secret=secret))
    with Machines(num_cpus=5, environment={"SPLITSERVE_STATE_DIR": str(tmp_path / "state")}) as machines:
        home, other = machines.add(), machines.add()
        machines.run(home, ["up", "--ray", machines.ray_address, "--spec", str(spec)])
        status = json.loads(machines.run(home, ["status", "--json"]))
        places = sorted((worker["pool"], worker["runs_on"]) for worker in status["workers"])
        assert places == [(pool, machine.address) for pool in ("fill", "gen") for machine in (home, other)]
        url = status["url"]
        assert url.startswith(f"http://{home.address}:")
        expected = right_tokens(url, "tiny", tiny_qwen3)

        with steady_load(url, bodies("tiny"), expected, streams=4) as load:
            names = {worker["name"] for worker in status["workers"]}
            wait_until(lambda: names <= load.workers, "every worker has had a request")
            machines.kill(other)
            num_done = load.num_done
            wait_until(lambda: load.num_done >= num_done + 20, "requests go on without the machine")
        assert not load.problems, load.problems[:3]
        at_home = [worker["name"] for worker in status["workers"] if worker["runs_on"] == home.address]
        wait_until(lambda: not any(held(url, name) for name in at_home), "nothing is held for a request")
        logs = machines.run(home, ["logs", "-n", "300"])
        assert "reads from fill-" in logs and " use tcp, " in logs and " use cma" not in logs
        assert "all processes have ended" in machines.run(home, ["down"])


def held(url: str, worker: str) -> float:
    metrics = worker_metrics(url)[worker]
    return sum(metrics[name] for name in ("blocks_referenced", "blocks_quarantined", "reads_in_flight", "num_running"))
