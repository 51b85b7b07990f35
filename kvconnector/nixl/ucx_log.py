"""UCX's report of the transports that it chose: it is available nowhere else, and a wrong transport is up to a hundred
times slower.

UCX prints a table per endpoint and operation at first use (``UCX_PROTO_INFO``). It is configured to print into an
unnamed file of this process, which exists from the loading of its library to the end of the process. If the user has
set ``UCX_LOG_FILE`` or ``UCX_PROTO_INFO``, these stay as they are, and the transport is unknown.
"""

import contextlib
import ctypes
import logging
import os
import re
import threading
from collections.abc import Iterator

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"
MAX_NAME_LENGTH = 31  # UCX truncates agents' names
_READ = "remote memory read by ucp_get"
_TITLE = re.compile(r"\| (?P<title>\S.*?) +\|$")
_ROW = re.compile(r"\| +\S+\.\.inf +\| (?P<description>.*?) +\| (?P<config>.*?) +\|$")
_COMPLAINT = re.compile(r"\s(?P<level>WARN|ERROR|FATAL)\s+(?P<text>.*)$")


class UcxLog:
    """UCX's log; one per process, because UCX is loaded once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._is_ours = not {"UCX_LOG_FILE", "UCX_PROTO_INFO"} & os.environ.keys()
        self._num_read = 0

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

    def text(self) -> str:
        """Return all that UCX has logged so far; "" if its log is not captured."""
        if self._fd is None:
            return ""
        ctypes.CDLL(None).fflush(None)  # UCX writes through a C stream
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace")

    def forward_complaints(self) -> None:
        """Log the warnings and errors since the last call."""
        with self._lock:
            text = self.text()
            new, self._num_read = text[self._num_read :], len(text)
        for line in new.splitlines():
            if (found := _COMPLAINT.search(line)) is not None:
                logger.warning("UCX: %s", found["text"])


UCX_LOG = UcxLog()


def read_transport(text: str, agent: str, *, of_gpu: bool) -> str:
    """Return the transport of ``agent``'s large reads, like ``cuda_ipc`` or ``cma``, from the last table of its reads.

    Several are joined by ``+``. Emulations are marked: ``tcp (software emulation)``. :data:`UNKNOWN` without a table.
    """
    kind = "cuda" if of_gpu else "host"
    found, title, wanted = UNKNOWN, "", False
    for logged in text.splitlines():
        line = logged[logged.find("|") :] if "|" in logged else ""
        if (row := _ROW.match(line)) is not None:
            if wanted:
                found = _transport(row["config"], row["description"])
                wanted = False
        elif (match := _TITLE.match(line)) is not None and match["title"].count("|") == 0:
            if _READ in match["title"]:
                wanted = title.startswith(f"{agent[:MAX_NAME_LENGTH]} ") and kind in match["title"]
            title = match["title"]
    return found


def _transport(config: str, description: str) -> str:
    """Convert ``50% on cuda_ipc/cuda and 50% on ...`` to ``cuda_ipc+...``."""
    names = list(dict.fromkeys(re.findall(r"([a-z][a-z0-9_]*)/", config))) or [config]
    copies = "zero-copy" in description
    return "+".join(names) + ("" if copies else f" ({description})")
