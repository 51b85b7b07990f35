"""A launcher that is stopped: commands end with words that name it."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from splitserve.common.errors import ConfigError
from splitserve.orchestration.control import socket as control_socket
from splitserve.orchestration.control.requests import Accepted, GetStatus
from splitserve.orchestration.control.socket import ask
from waiting import wait_until

LAUNCHER = """
import pathlib, sys, time
from splitserve.orchestration.control.requests import Accepted
from splitserve.orchestration.control.socket import ControlServer
server = ControlServer(pathlib.Path(sys.argv[1]), lambda request: Accepted())
time.sleep(600)
"""


def test_a_stopped_launcher_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "control.sock"
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(path)]) as launcher:
        try:
            wait_until(path.exists, "the launcher listens")
            assert ask(path, GetStatus()) == Accepted()
            launcher.send_signal(signal.SIGSTOP)
            stopped = psutil.Process(launcher.pid)
            wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "the launcher stands still")
            monkeypatch.setattr(control_socket, "_ANSWER_SECONDS", 1.0)
            with pytest.raises(
                ConfigError, match=r"no answer came within 1 s at .*: the cluster's launcher is stopped or hangs"
            ):
                ask(path, GetStatus())
            launcher.send_signal(signal.SIGCONT)
            monkeypatch.undo()
            assert ask(path, GetStatus()) == Accepted()
        finally:
            launcher.kill()
