"""NIXL for real, between processes: bytes, generations, killed and frozen peers, idle cost, the end."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import psutil
import pytest

from nixl_reader import Reader, Source, changed
from nixl_source import FIRST_GENERATION, NUM_BLOCKS, SOURCE, make_memory
from splitserve.kvconnector.blocks.digest import no_digests
from splitserve.kvconnector.nixl import peer_access
from splitserve.kvconnector.nixl import read_thread as nixl_read_thread
from splitserve.kvconnector.nixl.peer_access import LocalSide
from splitserve.kvconnector.nixl.reader import PeerReader
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.handover.reads import ReadCommand, ReadPath, ReadResult
from splitserve.protocol.memory_records import MappableMemory, MemoryKind
from splitserve.protocol.request import Party
from waiting import PATIENCE_SECONDS, wait_until

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.connector.close()


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        ([3], [60]),
        ([10, 11, 12, 13], [20, 21, 22, 23]),
        ([5, 6, 7, 1, 2], [40, 41, 9, 10, 11]),
        ([9, 2, 33, 8, 0], [1, 50, 7, 63, 0]),
    ],
    ids=["one", "a run", "runs that end at different places", "shuffled"],
)
def test_bytes_and_generations_are_those_of_the_source(
    source: Source, reader: Reader, local: list[int], remote: list[int]
) -> None:
    reader.connect(source)
    reader.read(1, local, remote)
    result = reader.result(1)
    assert result is not None and result.error is None
    assert list(result.generations) == [FIRST_GENERATION + block_id for block_id in remote]
    reader.assert_holds(local, remote)
    others = sorted(set(range(NUM_BLOCKS)) - set(local))
    assert not reader.memory.blocks[others].any(), "a block that wasn't asked for was written"


@pytest.mark.parametrize("lands_first", [None, True], ids=["into place", "beside it first"])
@pytest.mark.parametrize("remote", [[70], [3, 79, 64, 7, 66, 65, 12], list(range(79, 58, -1))], ids=len)
def test_slots_of_the_host_tier_beside_blocks(source: Source, lands_first: bool | None, remote: list[int]) -> None:
    reader = Reader(settings=ReadSettings.of(MemoryKind.DRAM, lands_first=lands_first))
    try:
        reader.connect(source)
        for read_id in range(3):  # in flight at once
            reader.read(read_id, list(range(21 * read_id, 21 * read_id + len(remote))), remote)
        for read_id in range(3):
            result = reader.result(read_id)
            assert result is not None and result.error is None
            assert list(result.generations) == [FIRST_GENERATION + block_id for block_id in remote]
        reader.assert_holds(list(range(42, 42 + len(remote))), remote)
    finally:
        reader.connector.close()


def test_a_slot_that_was_taken_shows_in_its_generation(reader: Reader) -> None:
    source = Source()
    try:
        reader.connect(source)
        source.tell("70")
        reader.read(1, [1, 2], [70, 71])
        result = reader.result(1)
        assert result is not None and result.error is None
        assert list(result.generations) == [FIRST_GENERATION + 71, FIRST_GENERATION + 71]
        source.signal(signal.SIGKILL)
        source.process.join(PATIENCE_SECONDS)
        reader.read(2, [3], [72])
        result = reader.result(2)
        assert result is not None and result.error is not None
    finally:
        source.close()


def test_many_reads_at_once_each_end_once(source: Source, reader: Reader) -> None:
    reader.connect(source)
    reads = [(read_id, [4 * read_id + i for i in range(4)]) for read_id in range(NUM_BLOCKS // 4)]
    for read_id, block_ids in reads:
        reader.read(read_id, block_ids, block_ids[::-1])
    assert reader.wait(lambda: len(reader.events) == len(reads)), reader.events
    for read_id, block_ids in reads:
        result = reader.result(read_id)
        assert result is not None and result.error is None
        assert list(result.generations) == [FIRST_GENERATION + b for b in block_ids[::-1]]
        reader.assert_holds(block_ids, block_ids[::-1])


def test_a_large_read_is_joined_from_its_parts() -> None:
    num_blocks = 320  # 10 MiB
    source, reader = Source(num_blocks), Reader(num_blocks=num_blocks)
    try:
        reader.connect(source)
        local, remote = list(range(num_blocks)), list(reversed(range(num_blocks)))
        reader.read(1, local, remote)
        result = reader.result(1)
        assert result is not None and result.error is None
        assert list(result.generations) == [FIRST_GENERATION + block_id for block_id in remote]
        reader.assert_holds(local, remote)
    finally:
        reader.connector.close()
        source.close()


def test_generations_are_read_as_they_are_now() -> None:
    source, reader = Source(8), Reader(num_blocks=8)
    try:
        reader.connect(source)
        source.tell("3")
        reader.read(1, [0, 1], [2, 3])
        result = reader.result(1)
        assert result is not None
        assert list(result.generations) == [FIRST_GENERATION + 2, FIRST_GENERATION + 3 + 1]
        assert bool((reader.memory.blocks[1] == -1.0).all())
    finally:
        reader.connector.close()
        source.close()


def test_generations_that_were_read_before_the_data_was_there_do_not_count() -> None:
    source, memory = Source(8), make_memory(8)
    reader = PeerReader("reads", LocalSide(memory, 0, ReadSettings.of(memory.kind), no_digests), source.welcome)
    data = Mock(expected_at=time.monotonic() + 60.0, queued_at=0.0)
    data.is_done.return_value = False
    reader.access.mapped = Mock()
    reader.access.mapped.read.return_value = data
    reader.read(ReadCommand(1, SOURCE, [0, 1], [2, 3]), ReadPath.MAPPED)
    try:
        wait_until(lambda: reader.poll() == [] and reader.active[0].pending is data)
        generations = reader.access.generations.scratch[reader.active[0].scratch_row]
        assert generations[3] == FIRST_GENERATION + 3, "they were read to warm up"
        source.tell("3")
        data.is_done.return_value = True
        results: list[ReadResult] = []
        wait_until(lambda: results.extend(reader.poll()) or results)
        assert [list(result.generations) for result in results] == [[FIRST_GENERATION + 2, FIRST_GENERATION + 3 + 1]]
    finally:
        reader.destroy()
        source.close()


def test_a_peer_that_was_never_connected(reader: Reader) -> None:
    reader.read(7, [0], [0], peer=Party("nobody", 1))
    result = reader.result(7)
    assert result is not None and result.error is not None and "isn't connected" in result.error


@pytest.mark.parametrize("metadata", [b"", b"not what NIXL sends"])
def test_metadata_that_nixl_refuses_is_an_error_and_not_the_end(
    source: Source, reader: Reader, metadata: bytes
) -> None:
    welcome = changed(source.welcome, metadata=metadata)
    reader.connector.connect(Party("broken", 1), welcome)
    assert reader.wait(lambda: bool(reader.events))
    (event,) = reader.events
    assert isinstance(event, PeerConnected) and event.error
    reader.events.clear()
    reader.connect(source)
    reader.read(1, [0], [5])
    result = reader.result(1)
    assert result is not None and result.error is None


def test_what_was_mapped_of_a_peer_is_given_back_when_reading_from_it_fails(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bytes] = []

    class Mapping:
        address = 4096

        def __init__(self, memory: MappableMemory, _num_bytes: int) -> None:
            self.close = lambda: closed.append(memory.handle)

    monkeypatch.setattr(peer_access, "PeerMapping", Mapping)
    monkeypatch.setattr(peer_access, "MappedReader", Mock(side_effect=RuntimeError("no stream")))
    memory = make_memory()
    settings = ReadSettings.of(memory.kind, maps=True)
    ranks = [msgspec.structs.replace(source.welcome.ranks[0], mappable=[MappableMemory(b"h" * 64, 0)])]
    welcome = msgspec.structs.replace(source.welcome, ranks=ranks)
    with pytest.raises(RuntimeError, match="no stream"):
        PeerReader("reads", LocalSide(memory, 0, settings, no_digests), welcome)
    assert closed == [b"h" * 64]


def test_after_a_disconnect_the_same_peer_can_be_connected_again(source: Source, reader: Reader) -> None:
    for read_id in range(3):
        reader.connect(source)
        reader.read(read_id, [read_id], [read_id + 1])
        result = reader.result(read_id)
        assert result is not None and result.error is None
        reader.connector.disconnect(SOURCE)
    reader.read(9, [0], [0])
    result = reader.result(9)
    assert result is not None and result.error is not None


def test_the_outcome_of_an_earlier_attempt_does_not_count(source: Source, reader: Reader) -> None:
    reader.connector.connect(SOURCE, source.welcome)
    assert reader.woken.wait(PATIENCE_SECONDS)
    reader.connector.connect(SOURCE, changed(source.welcome, metadata=b"?"))
    assert reader.wait(lambda: bool(reader.events))
    (event,) = reader.events
    assert isinstance(event, PeerConnected) and event.error


def test_a_killed_source_is_an_error_and_other_peers_go_on(source: Source, reader: Reader) -> None:
    doomed, doomed_party = Source(8), Party("prefill-doomed", 1)
    try:
        reader.connect(source)
        reader.connect(doomed, doomed_party)
        doomed.signal(signal.SIGKILL)
        doomed.process.join(PATIENCE_SECONDS)
        reader.read(1, [0, 1], [0, 1], peer=doomed_party)
        result = reader.result(1)
        assert result is not None and result.error is not None
        reader.read(2, [0, 1], [8, 9])
        result = reader.result(2)
        assert result is not None and result.error is None
        reader.assert_holds([0, 1], [8, 9])
    finally:
        doomed.close()


def test_a_killed_reader_leaves_the_source_serving(source: Source, reader: Reader) -> None:
    script = """
        import os, sys, threading
        sys.path.insert(0, sys.argv[1])
        import msgspec
        from nixl_reader import Reader
        from splitserve.protocol.messages.handover import PeerWelcome
        class Given: welcome = msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=PeerWelcome)
        reader = Reader()
        reader.connect(Given)
        reader.read(1, list(range(64)), list(range(64)))
        os.kill(os.getpid(), 9)
    """
    welcome = msgspec.msgpack.encode(source.welcome).hex()
    command = [sys.executable, "-c", textwrap.dedent(script), str(SUPPORT), welcome]
    ended = subprocess.run(command, timeout=200, check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    reader.connect(source)
    reader.read(1, [0, 1], [8, 9])
    result = reader.result(1)
    assert result is not None and result.error is None
    reader.assert_holds([0, 1], [8, 9])


FROZEN_SOURCE = """
    import os, signal, sys, time
    from types import SimpleNamespace
    sys.path.insert(0, sys.argv[1])
    import msgspec
    from nixl_reader import PeerWelcome, Reader, SOURCE
    from stopping import stop_process

    pid, reader = int(sys.argv[2]), Reader()
    reader.connect(SimpleNamespace(welcome=msgspec.msgpack.decode(bytes.fromhex(sys.argv[3]), type=PeerWelcome)))
    reader.read(1, [0], [1])
    assert reader.result(1).error is None
    reader.memory.blocks.zero_()
    stop_process(pid)
    block_ids = list(range(32))
    reader.read(2, block_ids, block_ids)
    assert reader.result(2, seconds=1.0) is None, "a frozen peer gives no result"
    reader.connector.disconnect(SOURCE)
    result = reader.result(2)
    assert result is not None and result.error == "disconnected", result
    reader.memory.blocks.fill_(-7.0)  # the blocks belong to somebody else now
    os.kill(pid, signal.SIGCONT)
    time.sleep(1.0)
    assert bool((reader.memory.blocks == -7.0).all()), "late bytes landed"
    reader.connector.close()
    print("nothing landed")
"""


def test_a_frozen_source_gives_no_result_until_disconnect_and_nothing_lands_after() -> None:
    """Over TCP, as between machines: CMA copies without the source's help, so it ignores a SIGSTOP."""
    source = Source()
    try:
        given = str(source.process.pid), msgspec.msgpack.encode(source.welcome).hex()
        command = [sys.executable, "-c", textwrap.dedent(FROZEN_SOURCE), str(SUPPORT), *given]
        environment = os.environ | {"UCX_TLS": "tcp"}
        ended = subprocess.run(command, timeout=200, check=False, capture_output=True, text=True, env=environment)
    finally:
        source.process.kill()
        source.close()
    assert ended.returncode == 0 and "nothing landed" in ended.stdout, ended.stderr[-3000:]


def test_an_idle_connected_pair_does_not_spin(source: Source, reader: Reader) -> None:
    reader.connect(source)
    reader.read(1, [0], [0])
    assert reader.result(1) is not None
    source.tell("rest")
    try:
        wait_until(lambda: is_idle_for_a_while(source), "one of them spins")
    finally:
        source.tell("serve")


def is_idle_for_a_while(source: Source) -> bool:
    """Return whether neither side used more than a tenth of a core, with some room for a busy machine."""
    before = time.process_time(), cpu_seconds(source)
    time.sleep(1.0)
    return max(time.process_time() - before[0], cpu_seconds(source) - before[1]) < 0.1


def cpu_seconds(source: Source) -> float:
    times = psutil.Process(source.process.pid).cpu_times()
    return times.user + times.system


def test_close_ends_reads_and_leaves_no_thread(source: Source) -> None:
    before = set(threading.enumerate())
    reader = Reader()
    assert set(threading.enumerate()) > before
    reader.connect(source)
    reader.connector.close()
    assert set(threading.enumerate()) == before


def test_the_death_of_a_thread_is_not_silent(reader: Reader) -> None:
    def fail() -> None:
        raise OSError("planted")

    reader.connector._threads[0].submit(fail)
    with pytest.raises(RuntimeError, match=r"read-0.* failed"):
        reader.wait(lambda: False, seconds=PATIENCE_SECONDS)


def test_what_a_thread_computes_is_not_the_peers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is compiled for one peer must not cost another one its connection."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(nixl_read_thread.time, "monotonic", lambda: clock.now)
    thread = object.__new__(nixl_read_thread.ReadThread)
    probes = [SimpleNamespace(deadline=105.0), SimpleNamespace(deadline=103.0)]
    thread._probes = {SOURCE: (1, probes[0]), Party("another", 1): (2, probes[1])}  # type: ignore[dict-item]
    with pytest.raises(RuntimeError), thread._not_the_peers_time():
        clock.now += 30.0
        raise RuntimeError("it fails, but took its time")
    assert [probe.deadline for probe in probes] == [135.0, 133.0]
