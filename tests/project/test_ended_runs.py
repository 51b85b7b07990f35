"""Test runs that are terminated: what their fixtures have started ends with them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from running import is_running
from waiting import PATIENCE_SECONDS, wait_until

TESTS = Path(__file__).parents[1]
SUITE = """
import subprocess, sys, time
from pathlib import Path

import pytest

@pytest.fixture(scope="module")
def started():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as process:
        Path(__file__).with_name("new").write_text(str(process.pid))
        Path(__file__).with_name("new").rename(Path(__file__).with_name("pid"))
        yield
        process.kill()

def test_endless(started):
    time.sleep(1000)
"""


@pytest.mark.parametrize("processes", [0, 1])
def test_what_a_run_has_started_ends_with_it(processes: int, tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --disable-plugin-autoload -p xdist.plugin -p conftest\n")
    paths = os.pathsep.join((str(TESTS), str(TESTS / "support")))
    command = [sys.executable, "-m", "pytest", "--numprocesses", str(processes), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as run:
        try:
            wait_until((tmp_path / "pid").exists, "the fixture hasn't started its process")
            started = psutil.Process(int((tmp_path / "pid").read_text()))
            run.send_signal(signal.SIGTERM)
            output, _ = run.communicate(timeout=PATIENCE_SECONDS)
        finally:
            run.kill()
    is_left = is_running(started)
    if is_left:
        started.kill()
    assert not is_left and run.returncode == 128 + signal.SIGTERM, output
    assert "ended by SIGTERM" in output
