"""`splitserve up`, `scale`, `upgrade`, `drain`, `logs`, `down` as a user runs them, with load on the cluster."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from cluster_load import bodies, right_tokens, steady_load
from command_line import command, splitserve
from running import is_running
from serving import wait_until_quiet
from splitserve.orchestration.cli.client import processes_of
from splitserve.orchestration.cli.serve import FOLDER_VARIABLE
from splitserve.orchestration.cluster.router_keeper import probe_ready
from splitserve.orchestration.control.state_folder import StateFolder
from splitserve.orchestration.doctor.http import Endpoint
from waiting import PATIENCE_SECONDS, wait_until


def write_spec(path: Path, model: Path, threads: int = 1) -> str:
    path.write_text(f"""
model: {{path: {model}, served_name: tiny, max_model_len: 512}}
pools:
- {{name: fill, role: prefill, threads: {threads}, memory: {{kv: 16MiB}}}}
- {{name: gen, role: decode, threads: {threads}, memory: {{kv: 16MiB}}}}
router: {{port: 0, policy: least-loaded}}
""")
    return str(path)


def test_a_life_under_load(tiny_qwen3: Path, tmp_path: Path, state: Path) -> None:
    spec = write_spec(tmp_path / "spec.yaml", tiny_qwen3)
    text = splitserve("up", "--spec", spec, "--name", "life")
    url = text.split("Ready: ")[1].split("/v1")[0]
    assert "called life is running already" in splitserve("up", "--spec", spec, "--name", "life", status=2)
    assert [path.name for path in state.iterdir()] == ["life"]

    expected = right_tokens(url, "tiny", tiny_qwen3)
    with steady_load(url, bodies("tiny"), expected, streams=2) as load:
        splitserve("scale", "gen", "2")
        assert "2 workers replaced" not in splitserve("status")
        upgraded = write_spec(tmp_path / "next.yaml", tiny_qwen3, threads=2)
        text = splitserve("upgrade", "--spec", upgraded)
        assert "gen        keeps its 2 workers" in text and "3 workers replaced" in text
        assert "fill       keeps" not in text, "successors don't count"
        status = json.loads(splitserve("status", "--json"))
        assert status["counts"] == {"fill": 1, "gen": 2} and status["revision"] == 2
        newest = max(status["workers"], key=lambda worker: worker["name"])
        [fill] = [worker["name"] for worker in status["workers"] if worker["pool"] == "fill"]
        assert "last prefill worker" in splitserve("drain", fill, status=2)
        drain_over_http(url, newest["name"])
        assert "the cluster couldn't serve" in splitserve("scale", "gen", "0", status=2)
    assert not load.problems, load.problems[:3]
    assert load.num_done > 4
    assert {"fill-0", "gen-0"} < load.workers, "the work was done by predecessors and successors"
    wait_until_quiet(url)
    assert "drained: idle" in splitserve("logs", newest["name"])
    present = {worker["name"] for worker in json.loads(splitserve("status", "--json"))["workers"]}
    assert newest["name"] not in present, "it is not started again"

    processes = [*processes_of(state / "life"), launcher_of(state / "life")]
    splitserve("down")
    assert not any(is_running(process) for process in processes) and not state.exists()


def drain_over_http(url: str, worker: str) -> None:
    """Ask the router to drain a worker, and wait until the launcher knows that it is gone."""
    Endpoint(url).post(f"/admin/workers/{worker}/drain", {}, 30.0)
    wait_until(lambda: all(each["name"] != worker for each in json.loads(splitserve("status", "--json"))["workers"]))


def launcher_of(folder: Path) -> psutil.Process:
    return psutil.Process(json.loads((folder / "cluster.json").read_text())["launcher_pid"])


def test_the_router_comes_back_to_its_address_and_down_ends_what_a_killed_launcher_has_left(
    tiny_qwen3: Path, tmp_path: Path, state: Path
) -> None:
    spec = write_spec(tmp_path / "spec.yaml", tiny_qwen3)
    url = splitserve("up", "--spec", spec).split("Ready: ")[1].split("/v1")[0]
    expected = right_tokens(url, "tiny", tiny_qwen3)
    os.kill(json.loads(splitserve("status", "--json"))["router"]["pid"], signal.SIGKILL)
    wait_until(lambda: probe_ready(url)[0], "the workers didn't come back to a router")
    assert right_tokens(url, "tiny", tiny_qwen3) == expected

    processes = processes_of(state / "default")
    assert len(processes) == 8, "two of them render templates, one tokenises, one forks workers, one routers"
    launcher = launcher_of(state / "default")
    processes[0].send_signal(signal.SIGSTOP)  # the kernel lets it go on when its parent is gone
    environment = {**os.environ, FOLDER_VARIABLE: str(state / "default")}
    shell = ["sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo $!"]  # what somebody of the cluster has started
    stubborn = int(subprocess.run(shell, env=environment, capture_output=True, text=True, check=True).stdout)
    processes.append(psutil.Process(stubborn))
    launcher.kill()
    assert "doesn't run any more" in splitserve("status", status=2)
    text = splitserve("down")
    assert "its launcher is gone" in text and f"pid {stubborn} was left over: killed" in text
    assert text.count("left over") == 1
    assert not any(is_running(process) for process in processes) and not state.exists()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"splitserve-{launcher.pid}-")]


def test_a_cluster_that_ends_by_itself_says_why(tiny_qwen3: Path, tmp_path: Path, state: Path) -> None:
    spec = write_spec(tmp_path / "spec.yaml", tiny_qwen3)
    splitserve("up", "--spec", spec, "--no-restart")
    os.kill(json.loads(splitserve("status", "--json"))["router"]["pid"], signal.SIGKILL)
    wait_until(lambda: not StateFolder("default").is_claimed(), "the launcher doesn't end")
    assert "cluster default doesn't run any more" in splitserve("status", status=2)
    assert "the router is gone: stopping" in splitserve("logs", "launcher")
    splitserve("down")
    assert not processes_of(state / "default") and not state.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_up_that_is_interrupted_leaves_nothing(
    number: signal.Signals, tiny_qwen3: Path, tmp_path: Path, state: Path
) -> None:
    spec = write_spec(tmp_path / "spec.yaml", tiny_qwen3)
    with subprocess.Popen(command("up", "--spec", spec), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("splitserve ")
        wait_until(lambda: processes_of(state / "default"), "no process was started")
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == 130
    wait_until(lambda: not state.exists(), "something is left of it")
    assert not processes_of(state / "default")


def test_a_start_that_fails_says_why(tiny_qwen3: Path, tmp_path: Path, state: Path) -> None:
    config = json.loads((tiny_qwen3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 3}))
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_qwen3 / name)
    text = splitserve("up", str(tmp_path), "--mixed", "1", "--port", "0", status=2)
    assert "share 3 key/value heads" in text and "Traceback" not in text and text.count("\n") == 1
    assert not state.exists(), "nothing was started"
