"""What UCX says of the transports that it chose: nobody else knows, and a wrong one costs a factor of a hundred.

UCX prints a table per endpoint and operation when it first uses them (``UCX_PROTO_INFO``). It's made to print into a
file of ours without a name, which is there from the time that its library is loaded to the end of the process. Where
the user has set ``UCX_LOG_FILE`` or ``UCX_PROTO_INFO``, that stays as it is, and the transport is unknown.
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
MAX_NAME_LENGTH = 31  # UCX cuts agents' names
_READ = "remote memory read by ucp_get"
_TITLE = re.compile(r"\| (?P<title>\S.*?) +\|$")
_ROW = re.compile(r"\| +\S+\.\.inf +\| (?P<description>.*?) +\| (?P<config>.*?) +\|$")
_COMPLAINT = re.compile(r"\s(?P<level>WARN|ERROR|FATAL)\s+(?P<text>.*)$")


class UcxLog:
    """One per process: UCX is loaded once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._is_ours = not {"UCX_LOG_FILE", "UCX_PROTO_INFO"} & os.environ.keys()
        self._num_read = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the making of an agent. The variables are gone afterwards: our children would print into nowhere."""
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
        """All that UCX has said so far; "" if it doesn't speak to us."""
        if self._fd is None:
            return ""
        ctypes.CDLL(None).fflush(None)  # UCX writes through a C stream
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace")

    def forward_complaints(self) -> None:
        """Pass on warnings and errors that are new since the last call."""
        with self._lock:
            text = self.text()
            new, self._num_read = text[self._num_read :], len(text)
        for line in new.splitlines():
            if (found := _COMPLAINT.search(line)) is not None:
                logger.warning("UCX: %s", found["text"])


UCX_LOG = UcxLog()


def read_transport(text: str, agent: str, *, of_gpu: bool) -> str:
    """What ``agent`` reads large blocks by, like ``cuda_ipc`` or ``cma``, as the last table of its reads says.

    Several are joined by ``+``. Emulations say so: ``tcp (software emulation)``. :data:`UNKNOWN` without a table.
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
    """``50% on cuda_ipc/cuda and 50% on ...`` -> ``cuda_ipc+...``"""
    names = list(dict.fromkeys(re.findall(r"([a-z][a-z0-9_]*)/", config))) or [config]
    copies = "zero-copy" in description
    return "+".join(names) + ("" if copies else f" ({description})")
