"""``splitserve bench up`` with real processes: tokens without text, and no process left, however it ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from command_line import PATIENCE_SECONDS, command
from running import is_running
from splitserve.benchmarks.cluster.up_times import STAGES, phases_of
from splitserve.benchmarks.common import commands
from splitserve.benchmarks.tables.more_sections import starts
from splitserve.benchmarks.tables.runs import read_runs
from splitserve.models.demo.checkpoint import write_demo_config
from waiting import wait_until

STATE_VARIABLE = "SPLITSERVE_STATE_DIR"
UP_OPTIONS = ("--device", "cpu", "--dtype", "float32", "--load-format", "dummy", "--kv-memory", "16MiB")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A checkpoint without weights, of whose vocabulary the tokenizer knows a fiftieth."""
    directory = write_demo_config(tmp_path / "model", shape="tiny")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": 50 * config["vocab_size"]}))
    return str(directory)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of the bench's own ones, by which its processes are found; short, as the paths of sockets are."""
    with tempfile.TemporaryDirectory(prefix="up-") as directory:
        yield Path(directory)
        left = processes_below(Path(directory))
        for process in left:
            process.kill()
    assert not left


def processes_below(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(STATE_VARIABLE, "").startswith(str(folder)):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if is_running(process)]


def bench(folder: Path, model: str, *more: str, shell: str = 'exec "$@"') -> "subprocess.Popen[str]":
    workers = ("--prefill", "0", "--decode", "0", "--mixed", "1", "--no-ray", "--repeats", "1")
    return subprocess.Popen(
        ["sh", "-c", shell, "sh", *command("bench", "up", *workers, "--model", model, *more)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_model_whose_tokens_have_no_text_is_measured(model: str, folder: Path, tmp_path: Path) -> None:
    with bench(folder, model, "--result-dir", str(tmp_path / "results"), "--", *UP_OPTIONS) as process:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert processes_below(folder) == []
    [path] = (tmp_path / "results").iterdir()
    kept = json.loads(path.read_text())
    [result] = kept["results"]
    [run] = result["runs"]
    assert kept["bench"] == "up" and kept["problems"] == []
    times = [run[stage] for stage in STAGES if stage not in ("Ray", "down")]
    assert len(times) == 6 and times == sorted(times) and times[0] > 0
    assert all(result[stage] == run[stage] for stage in STAGES if stage != "Ray")
    assert {"imports", "weights", "KV memory"} <= run["phases"]["mixed-0"].keys()
    [row] = starts(read_runs(tmp_path / "results")).rows
    assert row[1:3] == ["a checkpoint, 1 mixed", "CPU"] and row[-2].startswith("imports ")


def test_a_first_request_that_fails_leaves_no_process(model: str, folder: Path) -> None:
    with bench(folder, model, "--", *UP_OPTIONS, "--api-key", "unknown-to-the-bench") as process:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert processes_below(folder) == []
    assert process.returncode == 2 and "the first request failed: HTTP 401" in output, output
    assert "could not be ended" not in output and "left over" not in output, output
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "shell"),
    [
        pytest.param(signal.SIGINT, 'exec "$@"', id="Ctrl-C", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "trap '' INT; exec \"$@\"", id="SIGTERM, Ctrl-C is ignored as in the background"),
    ],
)
def test_a_bench_that_is_interrupted_leaves_no_process(
    model: str, folder: Path, number: signal.Signals, shell: str
) -> None:
    def is_worker_there() -> bool:
        assert process.poll() is None, "it has ended before"
        return any("splitserve.worker.entry" in each.cmdline() for each in processes_below(folder))

    with bench(folder, model, "--", *UP_OPTIONS, shell=shell) as process:
        wait_until(is_worker_there, "no process was started")
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert processes_below(folder) == []
    assert process.returncode == 130 and "interrupted" in output, output


def test_a_bench_that_is_killed_leaves_no_process_either(model: str, folder: Path) -> None:
    with bench(folder, model, "--", *UP_OPTIONS) as process:
        wait_until(lambda: any("splitserve.worker.entry" in each.cmdline() for each in processes_below(folder)))
        process.kill()
    wait_until(lambda: processes_below(folder) == [], "its guard ends the cluster")


def test_a_process_that_ignores_everything_is_killed_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "ORPHAN_SECONDS", 0.2)
    monkeypatch.setattr(commands, "END_SECONDS", 2.0)
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
    environment = {**os.environ, STATE_VARIABLE: str(folder)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None and stubborn.stdout.readline()
        assert commands.end_clusters(str(folder)) == []
        assert stubborn.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    said = capsys.readouterr().err
    assert f"process {stubborn.pid} ({sys.executable}" in said and "was left over: kill\n" in said


def test_phases_are_read_from_the_log() -> None:
    lines = [
        "router: 2026-11-27 00:00:00 INFO router listening",
        "mixed-0: 2026-11-27 00:00:01 INFO mixed-0 worker.entry ready after 21.3 s: imports 3.2, "
        "attention kernels, beside the weights 4.1, CUDA graphs 10.0",
        'mixed-1: {"time": "2026-11-27T00:00:01Z", "message": "ready after 2.0 s: imports 1.5", "process": "mixed-1"}',
    ]
    assert phases_of(lines) == {
        "mixed-0": {"imports": 3.2, "attention kernels, beside the weights": 4.1, "CUDA graphs": 10.0},
        "mixed-1": {"imports": 1.5},
    }
