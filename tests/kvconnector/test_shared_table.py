"""Tables that another process reads in place: only the right ones, and only while their owner lives."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from nixl_reader import Source
from nixl_source import FIRST_GENERATION, SOURCE, make_memory
from splitserve.kvconnector.blocks.digest import no_digests
from splitserve.kvconnector.layout import shared_table
from splitserve.kvconnector.layout.shared_table import OwnTable, open_table
from splitserve.kvconnector.nixl.generation_reads import READS_AT_ONCE, GenerationReads
from splitserve.kvconnector.nixl.peer_access import LocalSide, PeerAccess
from splitserve.kvconnector.nixl.reader import PeerReader
from splitserve.kvconnector.transfer.errors import TransferError
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.handover.reads import ReadCommand, ReadPath, ReadResult
from splitserve.protocol.memory_records import HostTierMemory, MemoryKind, MemoryRegion, RankMemory, SharedTable
from waiting import PATIENCE_SECONDS, wait_until

COUNT = 1000
OWNER = """
import sys, msgspec
from splitserve.kvconnector.layout.shared_table import OwnTable
table = OwnTable(int(sys.argv[1]))
table.numbers[7] = 2**64 - 1
sys.stdout.buffer.write(msgspec.json.encode(table.record()) + b"\\n")
sys.stdout.flush()
for line in sys.stdin:
    index, number = map(int, line.split())
    table.numbers[index] = number
    print("done", flush=True)
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", OWNER, str(COUNT)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def record_of(owner: subprocess.Popen[bytes]) -> SharedTable:
    assert owner.stdout is not None
    return msgspec.json.decode(owner.stdout.readline(), type=SharedTable)


def test_another_process_reads_the_numbers_as_they_are_now(owner: subprocess.Popen[bytes]) -> None:
    table = open_table(record_of(owner), COUNT)
    assert table is not None and owner.stdin is not None and owner.stdout is not None
    assert [table.numbers[index] for index in (0, 7, COUNT - 1)] == [0, 2**64 - 1, 0]
    owner.stdin.write(b"999 42\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == b"done\n"
    assert table.numbers[COUNT - 1] == 42 and table.is_current
    owner.kill()
    owner.wait()
    assert table.numbers[COUNT - 1] == 42 and not table.is_current
    table.close()


def test_two_threads_may_ask_at_once_whether_the_owner_lives() -> None:
    """Threads that wait for different reads of one peer do."""
    own = OwnTable(COUNT)
    record = own.record()
    assert record is not None
    table = open_table(record, COUNT)
    assert table is not None
    answers: list[bool] = []

    def ask() -> None:
        for _ in range(2000):
            answers.append(table.is_current)

    other = threading.Thread(target=ask)
    other.start()
    ask()
    other.join()
    assert answers == [True] * 4000
    table.close()


def test_a_closed_table_is_not_current_though_its_descriptor_is_in_use_again() -> None:
    own = OwnTable(COUNT)
    record = own.record()
    assert record is not None
    table = open_table(record, COUNT)
    assert table is not None
    table.close()
    living = os.pidfd_open(os.getpid())
    again = living if living == table._owner else os.dup2(living, table._owner)
    try:
        assert not table.is_current
    finally:
        for descriptor in {living, again}:
            os.close(descriptor)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_no_table_is_not_opened(owner: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Nor one of another worker that now has the number, one that is too short, or one that could shrink."""
    record = record_of(owner)
    table = open_table(record, COUNT)
    assert table is not None
    table.close()
    before = open_descriptors()
    replace = msgspec.structs.replace
    assert open_table(replace(record, token=bytes(16)), COUNT) is None
    assert open_table(record, COUNT + 1) is None
    assert open_table(replace(record, descriptor=1), COUNT) is None, "its output"
    assert open_table(replace(record, descriptor=9999), COUNT) is None
    assert open_table(replace(record, pid=2**22 + 1), COUNT) is None, "no process has such a number"
    sibling = msgspec.structs.replace(record, pid=os.getpid())
    assert open_table(sibling, COUNT) is None, "the same number of a descriptor, of another process"
    own = OwnTable(COUNT)
    (tmp_path / "memfd:splitserve-table").write_bytes(bytes(64 + 8 * COUNT))
    with (tmp_path / "memfd:splitserve-table").open() as file:
        assert open_table(SharedTable(os.getpid(), file.fileno(), bytes(16)), COUNT) is None
    unsealed = os.memfd_create("splitserve-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 64 + 8 * COUNT)
    assert open_table(SharedTable(os.getpid(), unsealed, bytes(16)), COUNT) is None
    os.close(unsealed)
    del own
    assert open_descriptors() == before


def test_a_table_cannot_shrink() -> None:
    table = OwnTable(COUNT)
    record = table.record()
    assert record is not None
    with pytest.raises(PermissionError):
        os.ftruncate(record.descriptor, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(record.descriptor, fcntl.F_ADD_SEALS, 0)


def test_where_there_are_no_such_files_a_table_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str, _flags: int) -> int:
        raise PermissionError("vm.memfd_noexec")

    monkeypatch.setattr(shared_table.os, "memfd_create", refuse)
    table = OwnTable(3)
    table.numbers[:] = [1, 2, 3]
    assert table.record() is None and table.numbers.tolist() == [1, 2, 3]


def test_a_python_that_was_built_for_an_older_system_shares_nothing(
    owner: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of(owner)
    for name in ("memfd_create", "pidfd_open"):
        monkeypatch.delattr(os, name)
    assert OwnTable(3).record() is None and open_table(record, COUNT) is None


def reads_of(record: SharedTable | None) -> GenerationReads:
    region = MemoryRegion(MemoryKind.VRAM, 0, 4096, COUNT, 64)
    host = HostTierMemory(MemoryRegion(MemoryKind.DRAM, 0, 1 << 30, 8, 64), 1 << 20)
    rank = RankMemory(b"x", [region], host=host, generations=record)
    welcome = SimpleNamespace(ranks=[rank], generations_addresses=[4096])
    agent = SimpleNamespace(register=lambda *_: None, make_read=lambda *arguments: arguments)
    return GenerationReads(agent, welcome)  # type: ignore[arg-type]


def test_generations_are_read_in_place_while_the_peer_lives(owner: subprocess.Popen[bytes]) -> None:
    reads = reads_of(record_of(owner))
    assert len(reads.make("peer", [3, 7], 0)) == 1, "not mapped yet"
    reads.map()
    assert reads.make("peer", [3, 7], 0) == [] and reads.landed([7, 3], 0) == [2**64 - 1, 0]
    reads.scratch[0, COUNT + 2] = 5
    assert len(reads.make("peer", [7, COUNT + 2], 0)) == 1, "a slot of the host tier"
    assert reads.landed([COUNT + 2, 7], 0) == [5, 2**64 - 1]
    owner.kill()
    owner.wait()
    with pytest.raises(TransferError, match="has ended"):
        reads.landed([7, 3], 0)
    reads.unmap()
    reads.scratch[0, :9] = np.arange(9)
    assert reads.landed([7, 3], 0) == [7, 3]


@pytest.mark.parametrize(
    "spoil", [lambda record: None, lambda record: msgspec.structs.replace(record, token=bytes(16))]
)
def test_generations_that_cannot_be_mapped_are_read_by_nixl(
    owner: subprocess.Popen[bytes], spoil: Callable[[SharedTable], SharedTable | None]
) -> None:
    reads = reads_of(spoil(record_of(owner)))
    reads.map()
    assert len(reads.make("peer", [3, 7], 0)) == 1
    reads.scratch[0, :9] = np.arange(9)
    assert reads.landed([7, 3], 0) == [7, 3]


def test_a_closed_table_keeps_no_memory() -> None:
    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count("splitserve-table")

    own = OwnTable(COUNT)
    record = own.record()
    assert record is not None
    before = num_mapped()
    table = open_table(record, COUNT)
    assert table is not None and num_mapped() == before + 1
    table.close()
    del table
    assert num_mapped() == before


def test_generations_of_a_mapped_peer_are_read_in_place_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """And after the data; a peer that has ended can't vouch for it."""
    source, memory = Source(8), make_memory(8)
    data = Mock(expected_at=0.0, queued_at=0.0)
    mapped = Mock()
    mapped.read.return_value = data
    monkeypatch.setattr(PeerAccess, "_make_mapped", lambda _access: mapped)
    reader = PeerReader("reads", LocalSide(memory, 0, ReadSettings.of(memory.kind), no_digests), source.welcome)
    monkeypatch.setattr(reader.access.agent, "make_read", Mock(side_effect=AssertionError("by NIXL")))

    def result_of(read_id: int, meanwhile: Callable[[], None]) -> ReadResult:
        data.is_done.return_value = False
        reader.read(ReadCommand(read_id, SOURCE, [0, 1], [2, 3]), ReadPath.MAPPED)
        wait_until(lambda: reader.poll() == [] and reader.active[0].pending is data)
        meanwhile()
        data.is_done.return_value = True
        (result,) = reader.poll()
        return result

    def end_source() -> None:
        source.signal(signal.SIGKILL)
        source.process.join(PATIENCE_SECONDS)

    try:
        found = result_of(1, lambda: source.tell("3"))
        assert found.error is None
        assert list(found.generations) == [FIRST_GENERATION + 2, FIRST_GENERATION + 3 + 1]
        found = result_of(2, end_source)
        assert found.error == "the peer's process has ended" and not found.generations
        assert len(reader.access.generations.free_rows) == READS_AT_ONCE and not reader.active
    finally:
        reader.destroy()
        source.close()
