"""Child processes of benches: they end with their bench, and a module runs in them as a program."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from running import is_running
from splitserve.benchmarks.common.children import child_process, next_line
from waiting import wait_until

MODULE = """
import sys, time
print(__name__, sys.argv[1:], flush=True)
time.sleep(1000)
"""
BENCH = """
from splitserve.benchmarks.common.children import child_process
with child_process("sleeper") as child:
    print(child.pid, flush=True)
    child.wait()
"""


def write_module(folder: Path) -> None:
    (folder / "sleeper.py").write_text(MODULE)


def test_a_module_runs_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with child_process("sleeper", "--rate", "3") as child:
        assert next_line(child) == "__main__ ['--rate', '3']"
    assert child.returncode is not None


def test_a_child_ends_with_a_bench_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", BENCH], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        child = psutil.Process(int(bench.stdout.readline()))
        assert is_running(child)
        bench.kill()
    wait_until(lambda: not is_running(child), "the child has ended")
