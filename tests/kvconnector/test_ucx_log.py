"""UCX's log: transports and complaints are found once each, and memory is freed as the log is read."""

import io
import logging
import os
from collections.abc import Iterator

import pytest

from splitserve.kvconnector.nixl.ucx_log import UNKNOWN, UcxLog

TABLE = """\
[1796025034.351022] [vm:14429:1]   +--------+-------------+----------------------------------+
[1796025034.351022] [vm:14429:1]   | {agent} intra-node cfg#1                                 |
[1796025034.351022] [vm:14429:1]   | remote memory read by ucp_get*(multi) into {kind} memory |
[1796025034.351022] [vm:14429:1]   +--------+-------------+----------------------------------+
[1796025034.351022] [vm:14429:1]   | Range  | Description |              Config              |
[1796025034.351022] [vm:14429:1]   +--------+-------------+----------------------------------+
[1796025034.351022] [vm:14429:1]   | 0..inf | zero-copy   | {transport}/memory               |
[1796025034.351022] [vm:14429:1]   +--------+-------------+----------------------------------+
"""
WRITES = TABLE.replace("remote memory read by ucp_get*(multi) into", "remote memory write by ucp_put* from")
COMPLAINT = "[1796025034.351022] [vm:14429:1]    tcp_ep.c:1259 UCX  ERROR {text}\n"


class Written:
    """A log, and the file that UCX would write it to."""

    def __init__(self) -> None:
        self.log = UcxLog()
        with self.log.watching():
            self._file = io.FileIO(os.environ["UCX_LOG_FILE"], "w")

    def write(self, text: str | bytes) -> None:
        self._file.write(text.encode() if isinstance(text, str) else text)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    @property
    def num_bytes_in_memory(self) -> int:
        return os.fstat(self._file.fileno()).st_blocks * 512

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    for name in ("UCX_LOG_FILE", "UCX_PROTO_INFO"):
        monkeypatch.delenv(name, raising=False)
    written = Written()
    yield written
    written.close()


def test_memory_and_time_do_not_grow_with_the_number_of_connections(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    original = os.pread

    def pread(fd: int, num_bytes: int, offset: int) -> bytes:
        sizes.append(num_bytes)
        return original(fd, num_bytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    for number in range(1000, 1300):
        agent = f"{number}/read-0/rank-0/decode-0@00000016"
        written.write(WRITES.format(agent=agent[:31], kind="host", transport="tcp") * 40)
        written.write(TABLE.format(agent=agent[:31], kind="host", transport="cma"))
        assert written.log.transport(agent, of_gpu=False) == "cma"
        assert written.num_bytes_in_memory < 64 << 10
    assert written.num_bytes > 5 << 20
    assert len(set(sizes)) == 1, "each connection's text is read once"


def test_each_agent_has_the_transport_of_its_last_reads(written: Written) -> None:
    assert written.log.transport("a", of_gpu=False) == UNKNOWN
    for agent, kind, transport in (("a", "host", "tcp"), ("b", "host", "cma"), ("b", "cuda", "cuda_ipc")):
        written.write(TABLE.format(agent=agent, kind=kind, transport=transport))
    written.write(WRITES.format(agent="a", kind="host", transport="rc"))
    assert written.log.transport("a", of_gpu=False) == "tcp"
    assert written.log.transport("a", of_gpu=True) == UNKNOWN
    assert written.log.transport("b", of_gpu=True) == "cuda_ipc"
    written.write(TABLE.format(agent="a", kind="host", transport="sysv"))
    assert written.log.transport("a", of_gpu=False) == "sysv"
    assert written.log.transport("b", of_gpu=False) == "cma"


def test_complaints_are_forwarded_once_each(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for text in ("first", "second"):
        written.write(COMPLAINT.format(text=text))
        assert written.log.transport("a", of_gpu=False) == UNKNOWN  # reads the line
    written.write(COMPLAINT.format(text="third"))
    assert not caplog.messages
    written.log.forward_complaints()
    written.log.forward_complaints()
    assert caplog.messages == ["UCX: first", "UCX: second", "UCX: third"]


def test_a_line_is_read_when_it_is_complete(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    table, complaint = TABLE.format(agent="a", kind="host", transport="cma"), COMPLAINT.format(text="zu spät")
    line = (table + complaint).encode()
    for byte in line:
        assert not caplog.messages
        written.write(bytes([byte]))
        written.log.forward_complaints()
    assert caplog.messages == ["UCX: zu spät"]
    assert written.log.transport("a", of_gpu=False) == "cma"
