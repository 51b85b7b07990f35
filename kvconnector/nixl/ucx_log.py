"""UCX's report of the transports that it chose: it is available nowhere else, and a wrong transport is up to a hundred
times slower.

UCX prints a table per endpoint and operation at first use (``UCX_PROTO_INFO``). It is configured to print into an
unnamed file of this process, which exists from the loading of its library to the end of the process. The file lies in
memory, and each connection adds 30 KB: what has been read is freed. If the user has set ``UCX_LOG_FILE`` or
``UCX_PROTO_INFO``, these stay as they are, and the transport is unknown.
"""

import contextlib
import ctypes
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"
MAX_NAME_LENGTH = 31  # UCX truncates agents' names
MAX_TABLES = 1000  # a connection's is looked up as soon as it is there
MAX_COMPLAINTS = 1000
_READ = "remote memory read by ucp_get"
_TITLE = re.compile(r"\| (?P<title>\S.*?) +\|$")
_ROW = re.compile(r"\| +\S+\.\.inf +\| (?P<description>.*?) +\| (?P<config>.*?) +\|$")
_COMPLAINT = re.compile(r"\s(?P<level>WARN|ERROR|FATAL)\s+(?P<text>.*)$")


class _ReadTable(NamedTuple):
    """A table of an agent's reads."""

    agent: str  # its name, shortened, then the kind of endpoint
    operation: str  # and between which memories
    transport: str  # of large reads


class ReadTables:
    """The newest tables of reads in a log, which is added line by line."""

    def __init__(self) -> None:
        self._tables: deque[_ReadTable] = deque(maxlen=MAX_TABLES)
        self._titles = "", ""  # the last two: an agent's, then an operation's

    def add(self, logged: str) -> None:
        """Add the log's next line."""
        line = logged[logged.find("|") :] if "|" in logged else ""
        if (row := _ROW.match(line)) is not None:
            agent, operation = self._titles
            if _READ in operation:
                self._tables.append(_ReadTable(agent, operation, _transport(row["config"], row["description"])))
        elif (match := _TITLE.match(line)) is not None and "|" not in match["title"]:
            self._titles = self._titles[1], match["title"]

    def transport(self, agent: str, *, of_gpu: bool) -> str:
        """Return the transport of ``agent``'s large reads, like ``cuda_ipc`` or ``cma``, from the last table of its
        reads.

        Several are joined by ``+``. Emulations are marked: ``tcp (software emulation)``. :data:`UNKNOWN` without a
        table.
        """
        kind, name = "cuda" if of_gpu else "host", f"{agent[:MAX_NAME_LENGTH]} "
        for table in reversed(self._tables):
            if table.agent.startswith(name) and kind in table.operation:
                return table.transport
        return UNKNOWN


class UcxLog:
    """UCX's log; one per process, because UCX is loaded once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the variables
        self._reading = threading.Lock()
        self._fd: int | None = None
        self._is_ours = not {"UCX_LOG_FILE", "UCX_PROTO_INFO"} & os.environ.keys()
        self._num_bytes_read = 0
        self._tables = ReadTables()
        self._complaints: deque[str] = deque(maxlen=MAX_COMPLAINTS)  # not forwarded yet

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Set the variables while an agent is created. They are removed afterwards: child processes would print into a
        file that they don't have."""
        with self._lock:
            variables = {}
            if self._is_ours and hasattr(os, "memfd_create"):
                variables["UCX_PROTO_INFO"] = "y"  # read by every agent
                if self._fd is None:  # read once, when UCX is loaded
                    self._fd = os.memfd_create("ucx-log", os.MFD_CLOEXEC)
                    variables["UCX_LOG_FILE"] = f"/proc/self/fd/{self._fd}"
            os.environ.update(variables)
            try:
                yield
            finally:
                for name in variables:
                    del os.environ[name]

    def transport(self, agent: str, *, of_gpu: bool) -> str:
        """Return the transport of ``agent``'s large reads: see :meth:`ReadTables.transport`."""
        with self._reading:
            self._read()
            return self._tables.transport(agent, of_gpu=of_gpu)

    def forward_complaints(self) -> None:
        """Log the warnings and errors since the last call."""
        with self._reading:
            self._read()
            complaints = list(self._complaints)
            self._complaints.clear()
        for complaint in complaints:
            logger.warning("UCX: %s", complaint)

    def _read(self) -> None:
        """Read the lines that UCX has completed since the last call, and free their memory."""
        if self._fd is None:
            return
        ctypes.CDLL(None).fflush(None)  # UCX writes through a C stream
        num_new = os.fstat(self._fd).st_size - self._num_bytes_read
        data = os.pread(self._fd, num_new, self._num_bytes_read)
        data = data[: data.rfind(b"\n") + 1]  # the rest of a line that is being written follows
        for line in data.decode(errors="replace").splitlines():
            self._tables.add(line)
            if (found := _COMPLAINT.search(line)) is not None:
                self._complaints.append(found["text"])
        self._num_bytes_read += len(data)
        _free_beginning(self._fd, self._num_bytes_read)


UCX_LOG = UcxLog()


def _free_beginning(fd: int, num_bytes: int) -> None:
    """Free the memory of a file's first bytes; offsets stay as they are. From 0 on each time, since only whole pages
    are freed. A failure costs memory only."""
    keep_size, punch_hole = 1, 2  # FALLOC_FL_*
    ctypes.CDLL(None).fallocate(fd, keep_size | punch_hole, ctypes.c_int64(0), ctypes.c_int64(num_bytes))


def _transport(config: str, description: str) -> str:
    """Convert ``50% on cuda_ipc/cuda and 50% on ...`` to ``cuda_ipc+...``."""
    names = list(dict.fromkeys(re.findall(r"([a-z][a-z0-9_]*)/", config))) or [config]
    copies = "zero-copy" in description
    return "+".join(names) + ("" if copies else f" ({description})")
