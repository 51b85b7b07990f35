"""Logs of a cluster in the background: kept short while their processes write them; old traces go."""

import os
import queue
import re
from pathlib import Path

import pytest

from chatty_worker import NUM_LINES
from splitserve.engine.profiling.step_profiler import MAX_TRACES, remove_old_traces
from splitserve.orchestration.cluster.host import ChildExited, Event
from splitserve.orchestration.hosts import log_files
from splitserve.orchestration.hosts.log_files import begin_anew_if_long, read_log
from splitserve.orchestration.hosts.process import ChildProcess
from splitserve.protocol.config import EngineConfig, WorkerConfig
from waiting import PATIENCE_SECONDS


def test_a_long_log_moves_away_and_its_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_LOG_BYTES", 100)
    path, old = tmp_path / "a.log", tmp_path / "a.log.1"
    with path.open("ab", buffering=0) as log:
        log.write(b"x" * 99 + b"\n")
        begin_anew_if_long(path)
        assert not old.exists() and path.stat().st_size == 100
        log.write(b"more\n")
        begin_anew_if_long(path)
        log.write(b"anew\n")
    assert old.read_bytes() == b"x" * 99 + b"\nmore\n"
    assert path.read_bytes() == b"anew\n"
    assert read_log(path, 5, 105) == ("anew\n", 5)
    begin_anew_if_long(tmp_path / "none")


def test_a_running_process_has_short_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_LOG_BYTES", 20_000)
    monkeypatch.setattr(log_files, "LOG_CHECK_SECONDS", 0.02)
    path = tmp_path / "chatty.log"
    events: queue.Queue[Event] = queue.Queue()
    engine = EngineConfig(model="m")
    config = WorkerConfig(engine_id="chatty", role="mixed", membership="tcp://127.0.0.1:9", engine=engine)
    child = ChildProcess(
        name="chatty",
        entry="chatty_worker:run_worker",
        config=config,
        threads=1,
        log_level="info",
        emit=events.put,
        environment={
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]
            )
        },
        log_file=path,
    )
    while not isinstance(event := events.get(timeout=PATIENCE_SECONDS), ChildExited):
        pass
    assert event.returncode == 0 and child.join(PATIENCE_SECONDS)
    old = path.with_name("chatty.log.1")
    kept = [int(number) for file in (old, path) for number in re.findall(r"line (\d+)", file.read_text())]
    assert len(kept) < NUM_LINES and kept == sorted(kept) and kept[-1] == NUM_LINES - 1
    assert old.stat().st_size + path.stat().st_size < NUM_LINES * 50


def test_old_traces_of_a_worker_go(tmp_path: Path) -> None:
    def trace(name: str, number: int) -> Path:
        path = tmp_path / f"{name}-20261123T101112-{number}.pt.trace.json"
        path.touch()
        os.utime(path, (number, number))
        return path

    others = [trace("mixed.mixed-0-b", 1), trace("mixed.mixed-1", 1), tmp_path / "mixed.mixed-0-notes.txt"]
    others[-1].touch()
    mine = [trace("mixed.mixed-0", number) for number in range(1, MAX_TRACES + 4)]
    remove_old_traces(tmp_path, "mixed.mixed-0")
    assert sorted(tmp_path.iterdir()) == sorted(others + mine[3:])
