"""``splitserve up --ray local``: Ray comes and goes with the cluster, also when somebody is killed on the way."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pytest

from cluster_load import right_tokens
from command_line import command, splitserve
from splitserve.common.processes import processes_with
from splitserve.orchestration.ray.access import accepts_strangers
from splitserve.orchestration.ray.names import HEAD_VARIABLE
from splitserve.worker.machine.threads import NICE_LEVELS_ON_CPU
from waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def spec(tiny_qwen3: Path, tmp_path: Path) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(f"""
name: home
model: {{path: {tiny_qwen3}, served_name: tiny, max_model_len: 512}}
pools:
- {{name: fill, role: prefill, threads: 1, memory: {{kv: 16MiB}}}}
- {{name: gen, role: decode, threads: 1, memory: {{kv: 16MiB}}}}
router: {{port: 0, policy: least-loaded}}
""")
    return str(path)


def everything_of(head_folder: str) -> list[psutil.Process]:
    """Running processes that a Ray head has started, itself included."""
    return processes_with(HEAD_VARIABLE, head_folder)


def shared_memory_of(processes: list[psutil.Process]) -> list[Path]:
    folders = {process.environ().get("UCX_POSIX_DIR", "") for process in processes} - {""}
    return [Path(folder) for folder in folders]


def test_a_cluster_whose_ray_head_was_killed(spec: str, state: Path, tiny_qwen3: Path) -> None:
    text = splitserve("up", "--ray", "local", "--spec", spec)
    right_tokens(text.split("Ready: ")[1].split("/v1")[0], "tiny", tiny_qwen3)
    record = json.loads((state / "home" / "cluster.json").read_text())
    processes = everything_of(record["head_folder"])
    folders = shared_memory_of(processes)
    assert len(processes) > 5, "Ray's, their agents, a router and two workers"
    assert len(folders) == 2 and all(folder.is_dir() for folder in folders)
    assert not accepts_strangers(record["ray"])
    refusal = splitserve("status", "--ray", record["ray"], "--name", "elsewhere", status=2)
    assert "requires a token" in refusal and "RAY_AUTH_TOKEN_PATH" in refusal
    levels = {os.nice(0), os.nice(0) + NICE_LEVELS_ON_CPU}  # of workers and of all others; Ray's own would be 15 more
    assert {process.nice() for process in processes} == levels, "workers give way to others"
    os.kill(record["head_pid"], signal.SIGKILL)
    assert "the Ray head that was started for it has ended" in splitserve("down")
    psutil.wait_procs(processes, PATIENCE_SECONDS)
    assert everything_of(record["head_folder"]) == []
    assert not state.exists() and not Path(record["head_folder"]).exists()
    assert not any(folder.exists() for folder in folders)


def test_a_driver_that_is_killed_while_ray_starts(spec: str, state: Path) -> None:
    with subprocess.Popen(command("up", "--ray", "local", "--spec", spec), stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        too_late = threading.Timer(2 * PATIENCE_SECONDS, driver.kill)
        too_late.start()
        try:
            assert any("head at" in line for line in driver.stdout), "it never spoke of a head"
        finally:
            too_late.cancel()
            driver.kill()
    record = json.loads((state / "home" / "cluster.json").read_text())
    assert everything_of(record["head_folder"])
    assert "the Ray head that was started for it has ended" in splitserve("down")
    assert everything_of(record["head_folder"]) == []
    assert not state.exists() and not Path(record["head_folder"]).exists()
