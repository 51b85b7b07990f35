"""A worker with something wrong: an entry for children in tests. Not a test module."""

import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

from splitserve.engine.io.sockets import WorkerSockets
from splitserve.protocol.config import WorkerConfig
from splitserve.worker import entry

FAULT = "SPLITSERVE_TEST_FAULT"
LOCKED_BYTES = 64 << 10
SECONDS_AHEAD = 90.0


def low_memlock() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKED_BYTES, LOCKED_BYTES))


def clock_off() -> None:
    right = time.time
    time.time = lambda: right() + SECONDS_AHEAD


class UnreachableSockets(WorkerSockets):
    """Tells everybody an address where nobody listens, as behind a firewall or on another interface."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"


def unreachable() -> None:
    entry.WorkerSockets = UnreachableSockets


FAULTS: dict[str, Callable[[], None]] = {
    "low_memlock": low_memlock,
    "clock_off": clock_off,
    "unreachable": unreachable,
}


def run_worker(config: WorkerConfig, progress: Callable[[str, dict[str, str]], None]) -> None:
    for fault in os.environ.get(FAULT, "").split():
        FAULTS[fault]()
    entry.run_worker(config, progress)
