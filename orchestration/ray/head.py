"""A Ray head on this machine, for ``splitserve up --ray local``: it lives as long as its cluster.

It is one process in the foreground (``ray start --block``): when it ends, it ends Ray's other processes. It is ended by
its process id; ``ray stop`` would end every Ray on the machine.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from splitserve.common.errors import SplitserveError
from splitserve.common.processes import has_ended, processes_with
from splitserve.common.security import drawn_secret
from splitserve.orchestration.hosts.addresses import LOOPBACK
from splitserve.orchestration.ray.names import ADDRESS_VARIABLE, HEAD_SECRET, HEAD_VARIABLE
from splitserve.orchestration.spec.expansion import random_secret

START_SECONDS = 60.0
STOP_SECONDS = 5.0
ORPHAN_SECONDS = 3.0  # time for processes whose head is gone to end by themselves
_TEMP_PREFIX = "splitserve-ray-"
_LOG = "start.log"
# Ray would kill workers again and again while other programs fill the machine's memory; and its worker niceness would
# give other programs precedence, so that tokens would have to wait.
NODE_SETTINGS = {"RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0"}


class RayHeadError(SplitserveError):
    """Failure to start Ray on this machine."""


@dataclass(frozen=True, slots=True)
class RayHead:
    """Ray head on this machine."""

    address: str
    pid: int
    start_seconds: float  # distinguishes the process from a later one of the same id
    # Contains its session, its token, without which other users can't access it, and a secret for a cluster that
    # configures none.
    folder: str


def authenticate(folder: str) -> None:
    """Let this process and its children use the head whose session is in ``folder``."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(Path(folder) / "token")}
    os.environ.pop("RAY_AUTH_TOKEN", None)


def start_head(num_cpus: int, say: Callable[[str], None], note: Callable[[RayHead], None]) -> RayHead:
    """Start Ray on this machine, in a session of its own; our processes on it are reached at the loopback address.

    Ray itself never accepts that address for a node: it listens at another one of the machine's, and requires its
    token. ``note`` is called before the head answers, so that the head is known even if this process is killed. Raises
    :class:`RayHeadError`.
    """
    folder = tempfile.mkdtemp(prefix=_TEMP_PREFIX)  # short: the paths of Ray's sockets are limited
    for name, content in (("token", random_secret()), (HEAD_SECRET, drawn_secret())):
        path = Path(folder) / name
        path.touch(mode=0o600)
        path.write_text(content)
    authenticate(folder)
    port = _free_port()
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *(f"--port={port}", "--node-ip-address=127.0.0.1", f"--num-cpus={num_cpus}", f"--temp-dir={folder}"),
        *("--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"),
    ]
    log_path = Path(folder) / _LOG
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**NODE_SETTINGS, **os.environ, ADDRESS_VARIABLE: LOOPBACK, HEAD_VARIABLE: folder},
        )
    head = RayHead(f"127.0.0.1:{port}", process.pid, psutil.Process(process.pid).create_time(), folder)
    note(head)
    say(f"  ray        head at 127.0.0.1:{port}, pid {process.pid}")
    deadline = time.monotonic() + START_SECONDS
    while not has_started(head):
        if process.poll() is not None or time.monotonic() > deadline:
            words = " ".join(log_path.read_text(errors="replace").split())[-500:]
            stop_head(head)
            raise RayHeadError(f"Ray didn't start here: {words}")
        time.sleep(0.05)
    return head


def has_started(head: RayHead) -> bool:
    """Return whether the head has ever answered."""
    try:
        return "Ray runtime started" in (Path(head.folder) / _LOG).read_text(errors="replace")
    except OSError:
        return False


def is_running(head: RayHead) -> bool:
    try:
        return abs(psutil.Process(head.pid).create_time() - head.start_seconds) < 1.0
    except psutil.NoSuchProcess:
        return False


def stop_head(head: RayHead) -> None:
    """End the head and all processes that it has started. Harmless if it's gone."""
    processes = processes_with(HEAD_VARIABLE, head.folder)  # its own, if it lives, and all that it has started
    was_running = is_running(head)
    if was_running:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(head.pid).send_signal(signal.SIGTERM)
    for each in _left_of(processes, STOP_SECONDS if was_running else ORPHAN_SECONDS):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    _left_of(processes, STOP_SECONDS)
    if Path(head.folder).name.startswith(_TEMP_PREFIX):
        shutil.rmtree(head.folder, ignore_errors=True)


def _left_of(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return the processes that still run after so long, zombies left out."""
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if not has_ended(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
