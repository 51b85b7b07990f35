"""``scripts/long-tests``: it resumes where it ended, begins anew at another commit, and keeps a result."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from waiting import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "long-tests"

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="not a checkout")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with a matrix of three pieces that do nothing and one of a single schedule."""
    loader = SourceFileLoader("long_tests", str(SCRIPT))
    spec = importlib.util.spec_from_loader("long_tests", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "long_tests", module)
    loader.exec_module(module)
    monkeypatch.setattr(module, "PYTHON", sys.executable)
    monkeypatch.setattr(module, "STATE", tmp_path / "state")
    pieces = [*[module.Piece((sys.executable, "-c", "pass"))] * 3, *module.schedules(number=1, size=1)]
    monkeypatch.setattr(module, "matrices", lambda: {"schedules": pieces})
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str, commit: str = "0a1b2c3") -> int:
    monkeypatch.setattr(script, "versions", lambda: {"commit": commit})
    monkeypatch.setattr(sys, "argv", ["long-tests", "schedules", *arguments])
    status = script.main()
    assert isinstance(status, int)
    return status


def test_it_resumes_and_keeps_a_result(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results = ["--result-dir", str(tmp_path / "results")]
    assert run(script, monkeypatch, "--pieces", "1", *results) == 0
    assert "1 of 4 pieces have passed at 0a1b2c3" in capfd.readouterr().out
    assert not (tmp_path / "results").exists()
    assert run(script, monkeypatch, *results) == 0
    out = capfd.readouterr().out
    assert "piece 2 of 4" in out and "piece 1 of 4" not in out
    (path,) = (tmp_path / "results").iterdir()
    assert path.name == "long-tests-schedules-0a1b2c3.json"
    result = json.loads(path.read_text())
    assert result["versions"] == {"commit": "0a1b2c3"} and len(result["seconds"]) == 4


@pytest.mark.parametrize("commit", ["4d5e6f7", "0a1b2c3+changes"])
def test_another_tree_begins_anew(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], commit: str
) -> None:
    assert run(script, monkeypatch, "--pieces", "1") == 0
    assert run(script, monkeypatch, "--pieces", "1", commit=commit) == 0
    assert capfd.readouterr().out.count("piece 1 of 4") == 2


def test_figures_add_up_and_lists_join(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = "import os; open(os.environ['SPLITSERVE_FIGURES'], 'w').write('{\"requests\": 5, \"each\": [\"a\"]}')"
    pieces = [script.Piece((sys.executable, "-c", program))] * 2
    monkeypatch.setattr(script, "matrices", lambda: {"schedules": pieces})
    assert run(script, monkeypatch, "--pieces", "1") == 0
    assert run(script, monkeypatch, "--result-dir", str(tmp_path)) == 0
    result = json.loads((tmp_path / "long-tests-schedules-0a1b2c3.json").read_text())
    assert (result["figures"], result["each"]) == ({"requests": 10}, ["a", "a"])


def test_a_piece_that_fails_ends_the_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = script.Piece((sys.executable, "-c", "raise SystemExit(3)"))
    monkeypatch.setattr(script, "matrices", lambda: {"schedules": [failing]})
    assert run(script, monkeypatch) == 1
    assert not (script.STATE / "schedules.json").exists()


def test_pieces_run_at_once_with_their_own_output_and_cores(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of two pieces waits for the other one's file: one after another they would fail."""
    program = (
        "import json, os, sys, time\n"
        "own, other = sys.argv[1:]\n"
        "open(own, 'w').close()\n"
        "for _ in range(3000):\n"
        "    if os.path.exists(other): break\n"
        "    time.sleep(0.01)\n"
        "else: sys.exit(3)\n"
        "print('this is', own)\n"
        "cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []\n"
        "json.dump({'requests': 2, 'cpus': [cpus]}, open(os.environ['SPLITSERVE_FIGURES'], 'w'))"
    )
    names = [str(tmp_path / name) for name in "ab"]
    pieces = [script.Piece((sys.executable, "-c", program, *order), minutes=1) for order in (names, names[::-1])]
    monkeypatch.setattr(script, "matrices", lambda: {"schedules": pieces})
    assert run(script, monkeypatch, "--jobs", "2", "--result-dir", str(tmp_path)) == 0
    logs = [(script.STATE / "schedules" / f"{number}.log").read_text() for number in (1, 2)]
    assert logs == [f"this is {name}\n" for name in names]
    result = json.loads((tmp_path / "long-tests-schedules-0a1b2c3.json").read_text())
    assert result["figures"] == {"requests": 4}
    first, second = result["cpus"]
    assert len({*first, *second}) < 2 or not {*first} & {*second}


def test_a_piece_that_takes_too_long_is_killed_with_its_processes(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    program = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    pieces = [script.Piece((sys.executable, "-c", program), minutes=0.05), script.Piece((sys.executable, "-c", "pass"))]
    monkeypatch.setattr(script, "matrices", lambda: {"schedules": pieces})
    groups: list[int] = []
    kill = script.kill_session

    def note_and_kill(process: subprocess.Popen[bytes]) -> None:
        groups.append(process.pid)
        kill(process)

    monkeypatch.setattr(script, "kill_session", note_and_kill)
    assert run(script, monkeypatch, "--jobs", "2", "--keep-going") == 1
    assert set(json.loads((script.STATE / "schedules.json").read_text())["passed"]) == {"1"}
    assert "piece 1 took more than 0.05 minutes" in capfd.readouterr().err
    wait_until(lambda: not any(is_any_alive(group) for group in groups), "the processes of both pieces have ended")


def is_any_alive(group: int) -> bool:
    """Return whether the process group has a process; one that has ended but isn't reaped counts as none."""
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return False


def test_two_runs_of_a_matrix_at_once_are_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with script.only_run(script.STATE / "schedules"), pytest.raises(SystemExit, match="another run of schedules"):
        run(script, monkeypatch)
    assert run(script, monkeypatch, "--pieces", "1") == 0
