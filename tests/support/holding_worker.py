"""A decode worker that reads late, and a prefill worker with few blocks: an entry for the launcher in tests. Not a test
module.

Reads begin when the file ``SPLITSERVE_TEST_GATE`` appears; without that setting, up to a second late.
``SPLITSERVE_TEST_PREFILL_BYTES`` is prefill's KV memory, and ``SPLITSERVE_TEST_HOST_BYTES`` that of its host tier.
"""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from splitserve.kvconnector.nixl.connector import NixlConnector
from splitserve.protocol.config import WorkerConfig
from splitserve.protocol.handover.reads import ReadCommand
from splitserve.protocol.request import Role
from splitserve.worker import entry

LONG_SECONDS = 600.0


class LateConnector(NixlConnector):
    def read(self, command: ReadCommand, *, awaited: bool = False) -> None:
        timer = threading.Timer(random.random(), super().read, (command,))
        timer.daemon = True
        timer.start()


class HoldingConnector(NixlConnector):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gate = Path(os.environ["SPLITSERVE_TEST_GATE"])
        self._held: list[ReadCommand] | None = []
        self._lock = threading.Lock()
        threading.Thread(target=self._wait_for_gate, daemon=True).start()

    def read(self, command: ReadCommand, *, awaited: bool = False) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(command)
                return
        super().read(command)

    def _wait_for_gate(self) -> None:
        pause = threading.Event()
        while not self._gate.exists():
            pause.wait(0.05)
        with self._lock:
            held, self._held = self._held or [], None
        for command in held:
            super().read(command)


def run_worker(config: WorkerConfig, progress: Callable[[str, dict[str, str]], None]) -> None:
    engine, protocol = config.engine, config.protocol
    protocol = msgspec.structs.replace(protocol, read_deadline_seconds=LONG_SECONDS, host_offer_after_seconds=0.05)
    if config.role is Role.PREFILL:
        engine = msgspec.structs.replace(
            engine,
            kv_memory_bytes=int(os.environ["SPLITSERVE_TEST_PREFILL_BYTES"]),
            host_kv_memory_bytes=int(os.environ["SPLITSERVE_TEST_HOST_BYTES"]),
        )
    else:
        has_gate = "SPLITSERVE_TEST_GATE" in os.environ
        entry.NixlConnector = HoldingConnector if has_gate else LateConnector  # type: ignore[misc]
    entry.run_worker(msgspec.structs.replace(config, engine=engine, protocol=protocol), progress)
