"""Processes that are known by a variable of their environment."""

import os
import subprocess
import sys

import psutil

from splitserve.common.processes import has_ended, processes_with

VARIABLE = "SPLITSERVE_TEST_PROCESSES"


def test_processes_are_found_until_they_end() -> None:
    value = f"of-{os.getpid()}"
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    environment = {**os.environ, VARIABLE: value}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        process = psutil.Process(child.pid)
        assert not has_ended(process)
        assert processes_with(VARIABLE, value) == [process] and processes_with(VARIABLE, value + "0") == []
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process), "it has ended, but nobody has reaped it"
        assert processes_with(VARIABLE, value) == []
    assert has_ended(process)
