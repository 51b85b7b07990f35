"""Remains of failed starts, and who removes them."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import splitserve
from splitserve.common.errors import ConfigError
from splitserve.orchestration.control.state_folder import StateFolder, choose_cluster, known_clusters
from splitserve.orchestration.doctor.machine import look_at_machine
from waiting import wait_until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPLITSERVE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def broken_model(tiny_qwen3: Path, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint whose fault only the worker sees: a tensor is cut off."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny_qwen3, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    yield broken


def test_a_failed_up_leaves_no_record(broken_model: Path, state: Path) -> None:
    said = splitserve("up", str(broken_model), "--mixed", "1", "--port", "0", status=2)
    assert "splitserve: error:" in said and f"(logs: {state}/default/logs)" in said
    assert (state / "default" / "logs" / "launcher.log").exists(), "what it logged stays"
    assert known_clusters() == []
    with pytest.raises(ConfigError, match="no cluster is known"):
        choose_cluster("")
    assert not look_at_machine().dead_clusters, "nor does the doctor speak of one"
    assert f"removed the logs that a failed start has left in {state}/default" in splitserve("down")
    assert not state.exists()


def test_down_removes_only_what_a_failed_start_has_left(state: Path) -> None:
    for name in ("failed", "starting"):
        StateFolder(name).logs.mkdir(parents=True)
    log = state / "starting" / "logs" / "launcher.log"
    module = "splitserve.orchestration.cluster.detached"
    program = "print(flush=True); import time; time.sleep(60)"
    with log.open("w") as file, subprocess.Popen([sys.executable, "-c", program, module], stdout=file) as launcher:
        wait_until(lambda: log.stat().st_size > 0)
        refusal = splitserve("down", "--name", "starting", status=2)
        assert f"starting is starting (process {launcher.pid})" in refusal
        launcher.kill()
    for name in ("other", "../state/failed", "failed/logs"):
        assert splitserve("down", "--name", name, status=2)
    assert "failed: no cluster runs; removed the logs" in splitserve("down", "--name", "failed")
    assert [path.name for path in state.iterdir()] == ["starting"]


def test_only_who_has_claimed_a_folder_discards_it(state: Path) -> None:
    mine, other = StateFolder("a"), StateFolder("a")
    mine.claim()
    other.discard()
    assert mine.is_claimed()
    mine.discard()
    assert not mine.is_claimed() and known_clusters() == []
