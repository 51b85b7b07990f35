"""The guard of a bench: without it the bench ends its clusters itself, or doesn't begin."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from running import is_running
from splitserve.benchmarks.common import commands
from splitserve.benchmarks.common.commands import ended_on_failure
from splitserve.common.errors import SplitserveError


def test_a_bench_that_has_lost_its_guard_ends_its_cluster_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "ORPHAN_SECONDS", 0.05)
    environment = {**os.environ, "SPLITSERVE_STATE_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], env=environment) as process:
        with pytest.raises(ZeroDivisionError), ended_on_failure(str(tmp_path)):
            [guard] = [each for each in psutil.Process().children() if str(tmp_path) in each.cmdline()]
            guard.kill()
            raise ZeroDivisionError
        has_ended = not is_running(process.pid)
        process.kill()
    assert has_ended
    assert "the guard of the bench ended with exit status -9: the bench ends its cluster" in capfd.readouterr().err


def test_a_bench_does_not_begin_without_its_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    message = "guard of the bench ended with exit status 1 before"
    with pytest.raises(SplitserveError, match=message), ended_on_failure(str(tmp_path)):
        pytest.fail("it has begun")
