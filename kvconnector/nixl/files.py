"""Reading and writing files with NIXL: its POSIX backend, which uses the kernel's asynchronous I/O where possible, or
its GDS backend, which uses cuFile and bypasses the page cache."""

import logging
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from splitserve.common.errors import ConfigError
from splitserve.kvconnector.layout.numa_memory import HostMemory
from splitserve.protocol.memory_records import MemoryKind

POLL_SECONDS = 0.0002
BACKENDS = {"posix": "POSIX", "gds": "GDS"}


class FileRange(NamedTuple):
    """``num_bytes`` of memory at ``address``, and of an open file at ``offset``."""

    address: int
    file: int
    offset: int
    num_bytes: int


class FileTransferError(Exception):
    """The backend failed. Some of the bytes may have moved, and others still may: the memory can't be reused."""


class FileAgent:
    """Agent for file transfers, used by one thread only.

    ``memory``: the memory that transfers may touch, kept alive as long as the agent. ``backend``: one of
    :data:`BACKENDS`. Raises :class:`ConfigError` if NIXL doesn't have it.
    """

    def __init__(self, name: str, memory: Sequence[HostMemory], backend: str = "posix") -> None:
        try:
            from nixl_cu13 import _api as nixl
        except ImportError:
            from nixl_cu12 import _api as nixl
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        self._name = name
        self._agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._backends = [BACKENDS[backend]]
        try:
            self._agent.create_backend(BACKENDS[backend], {})
        except Exception as error:
            advice = "; it needs NVIDIA's GPUDirect Storage (nvidia-fs, libcufile): install that, or use posix"
            raise ConfigError(
                f"--disk-kv-backend {backend}: NIXL doesn't have its {BACKENDS[backend]} backend here ({error})"
                + (advice if backend == "gds" else "")
            ) from error
        self._memory = memory  # after the agent, because attributes are released in the order in which they were set
        ranges = [(part.address, len(part.bytes), 0, "") for part in memory]
        self._registration = self._agent.register_memory(ranges, MemoryKind.DRAM.value, backends=self._backends)

    def write(self, ranges: Sequence[FileRange]) -> None:
        """Write memory into files. Raises :class:`FileTransferError`."""
        self._transfer("WRITE", ranges)

    def read(self, ranges: Sequence[FileRange]) -> None:
        """Read files into memory. Raises :class:`FileTransferError`, also for a file that ends early."""
        self._transfer("READ", ranges)

    def _transfer(self, operation: str, ranges: Sequence[FileRange]) -> None:
        files = {part.file: max(p.offset + p.num_bytes for p in ranges if p.file == part.file) for part in ranges}
        try:
            registration = self._agent.register_memory(
                [(0, num_bytes, file, "") for file, num_bytes in files.items()], "FILE", backends=self._backends
            )
            memory = [(part.address, part.num_bytes, 0) for part in ranges]
            local = self._agent.get_xfer_descs(memory, MemoryKind.DRAM.value)
            remote = self._agent.get_xfer_descs([(part.offset, part.num_bytes, part.file) for part in ranges], "FILE")
            handle = self._agent.initialize_xfer(operation, local, remote, self._name, backends=self._backends)
            state = self._agent.transfer(handle)
            while state == "PROC":
                time.sleep(POLL_SECONDS)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise FileTransferError(f"{operation} of {len(files)} files ended as {state}")
            self._agent.release_xfer_handle(handle)
            self._agent.deregister_memory(registration)
        except FileTransferError:
            raise
        except Exception as error:  # NIXL's own exceptions share no public base
            raise FileTransferError(f"{operation} of {len(files)} files failed: {error}") from error
