"""A Ray head on this machine, for ``splitserve up --ray local``: it lives as long as the cluster that it is for.

It is one process that was told to stay (``ray start --block``): it ends Ray's other processes when it ends. It is
ended by its process id; ``ray stop`` would end every Ray on the machine.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from splitserve.errors import SplitserveError

START_SECONDS = 60.0
STOP_SECONDS = 20.0
_TEMP_PREFIX = "splitserve-ray-"


class RayHeadError(SplitserveError):
    """Ray could not be started here."""


@dataclass(frozen=True, slots=True)
class RayHead:
    """``start_seconds`` tells the process apart from a later one of the same id; ``folder`` holds its session, and the
    token without which nobody else on the machine can use it."""

    address: str
    pid: int
    start_seconds: float
    folder: str


def authenticate(folder: str) -> None:
    """Let this process, and those that it starts, use the head whose session is in ``folder``."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(Path(folder) / "token")}
    os.environ.pop("RAY_AUTH_TOKEN", None)


def start_head(num_cpus: int, say: Callable[[str], None]) -> RayHead:
    """Start Ray on this machine's loopback, in a session of its own. Raises :class:`RayHeadError`."""
    folder = tempfile.mkdtemp(prefix=_TEMP_PREFIX)  # short: Ray's sockets lie in it
    token = Path(folder) / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    authenticate(folder)
    port = _free_port()
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *(f"--port={port}", "--node-ip-address=127.0.0.1", f"--num-cpus={num_cpus}", f"--temp-dir={folder}"),
        *("--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"),
    ]
    log_path = Path(folder) / "start.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    say(f"  ray        head at 127.0.0.1:{port}, pid {process.pid}")
    head = RayHead(f"127.0.0.1:{port}", process.pid, psutil.Process(process.pid).create_time(), folder)
    deadline = time.monotonic() + START_SECONDS
    while "Ray runtime started" not in log_path.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            words = " ".join(log_path.read_text(errors="replace").split())[-500:]
            stop_head(head)
            raise RayHeadError(f"Ray didn't start here: {words}")
        time.sleep(0.05)
    return head


def stop_head(head: RayHead) -> None:
    """End it and all that it has started; harmless when it's gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(head.pid)
        if abs(process.create_time() - head.start_seconds) < 1.0:
            family = [*process.children(recursive=True), process]
            process.send_signal(signal.SIGTERM)
            _, left = psutil.wait_procs(family, STOP_SECONDS)
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(left, STOP_SECONDS)
    if Path(head.folder).name.startswith(_TEMP_PREFIX):
        shutil.rmtree(head.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
