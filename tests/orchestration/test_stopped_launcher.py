"""A launcher that is stopped: commands end with words that name it, and ``down`` ends it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from splitserve.common.errors import ConfigError
from splitserve.orchestration.cli.client import LocalClient
from splitserve.orchestration.control import socket as control_socket
from splitserve.orchestration.control.requests import Accepted, GetStatus
from splitserve.orchestration.control.socket import ask
from splitserve.orchestration.control.state_folder import StateFolder
from waiting import wait_until

LAUNCHER = """
import os, pathlib, sys, threading
from splitserve.orchestration.control.requests import Accepted, Stop
from splitserve.orchestration.control.socket import ControlServer
from splitserve.orchestration.control.state_folder import Record, StateFolder

def answer(request):
    if isinstance(request, Stop):
        end.set()
    return Accepted()

end = threading.Event()
path = pathlib.Path(sys.argv[1])
folder = StateFolder(path.name, path.parent)
folder.claim()
folder.write(Record(name=path.name, launcher_pid=os.getpid()))
server = ControlServer(folder.socket, answer)
end.wait()
server.close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder("stopped", tmp_path)


@pytest.fixture
def launcher(folder: StateFolder) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher with no processes, which has answered once and stands still."""
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(folder.path)]) as process:
        try:
            wait_until(folder.socket.exists, "the launcher listens")
            assert ask(folder.socket, GetStatus()) == Accepted()
            process.send_signal(signal.SIGSTOP)
            stopped = psutil.Process(process.pid)
            wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "the launcher stands still")
            yield process
        finally:
            process.kill()


def test_a_stopped_launcher_is_named(
    folder: StateFolder, launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "_ANSWER_SECONDS", 1.0)
    with pytest.raises(ConfigError, match="no answer came within 1 s") as found:
        ask(folder.socket, GetStatus())
    assert f"the cluster's launcher, process {launcher.pid}, is stopped or hangs" in str(found.value)
    assert f"`kill -CONT {launcher.pid}`" in str(found.value)
    launcher.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    assert ask(folder.socket, GetStatus()) == Accepted()


def test_down_lets_a_stopped_launcher_go_on_and_end(folder: StateFolder, launcher: subprocess.Popen[bytes]) -> None:
    said = list[str]()
    LocalClient(folder).down(said.append)
    assert said == ["stopped: all processes have ended"] and launcher.wait() == 0
    assert not folder.path.exists()
