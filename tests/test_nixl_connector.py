"""NIXL for real, between processes: bytes, generations, killed and frozen peers, idle cost, the end."""

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from nixl_source import FIRST_GENERATION, NUM_BLOCKS, PATTERN, SOURCE, make_memory, serve_blocks
from splitserve.handover import ReadCommand, ReadResult
from splitserve.kvconnector.connector import PeerConnected
from splitserve.kvconnector.memory import KVMemory
from splitserve.kvconnector.nixl import NixlConnector
from splitserve.kvconnector.nixl_agent import HERE, Agent, Transfer
from splitserve.kvconnector.read_plan import region_rows
from splitserve.kvconnector.read_settings import ReadSettings
from splitserve.messages import MemoryKind, PeerWelcome
from splitserve.request import Party
from waiting import PATIENCE_SECONDS, wait_until

ME = Party("decode-0", 22)
TESTS = Path(__file__).parent


class Source:
    """The process that is read from."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve_blocks, args=(theirs, num_blocks), daemon=True)
        self.process.start()
        theirs.close()
        self.welcome: PeerWelcome = receive(self.pipe)

    def tell(self, command: str) -> None:
        self.pipe.send(command)
        assert receive(self.pipe) == "done"

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send("end")
            self.process.join(PATIENCE_SECONDS)
        self.process.kill()
        self.process.join(PATIENCE_SECONDS)
        self.pipe.close()


def receive(pipe: "Connection[object, object]") -> object:
    assert pipe.poll(2 * PATIENCE_SECONDS), "the source process doesn't answer"
    return pipe.recv()


class Reader:
    """A connector of this process, with the events that came out of it."""

    def __init__(self, me: Party = ME, num_blocks: int = NUM_BLOCKS, settings: ReadSettings | None = None) -> None:
        self.memory: KVMemory = make_memory(num_blocks)
        self.woken = threading.Event()
        self.connector = NixlConnector(me, self.memory, self.woken.set, settings=settings)
        self.events: list[ReadResult | PeerConnected] = []

    def wait(self, is_done: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
        deadline = time.monotonic() + seconds
        while not is_done() and time.monotonic() < deadline:
            self.woken.wait(0.05)
            self.woken.clear()
            self.events += self.connector.events()
        return is_done()

    def connect(self, source: Source, peer: Party = SOURCE) -> None:
        self.connector.connect(peer, source.welcome)
        assert self.wait(lambda: PeerConnected(peer, None) in self.events), self.events
        self.events.remove(PeerConnected(peer, None))

    def result(self, read_id: int, seconds: float = PATIENCE_SECONDS) -> ReadResult | None:
        self.wait(lambda: any(isinstance(e, ReadResult) and e.read_id == read_id for e in self.events), seconds)
        found = [e for e in self.events if isinstance(e, ReadResult) and e.read_id == read_id]
        assert len(found) <= 1, "a read ended twice"
        return found[0] if found else None

    def read(self, read_id: int, local: list[int], remote: list[int], peer: Party = SOURCE) -> None:
        self.connector.read(ReadCommand(read_id, peer, local, remote))

    def assert_holds(self, local: list[int], remote: list[int]) -> None:
        for local_id, remote_id in zip(local, remote, strict=True):
            assert bool((self.memory.blocks[local_id] == PATTERN + remote_id).all()), (local_id, remote_id)


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
        for read_id in range(3):  # under way at once
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
        from test_nixl_connector import Reader
        from splitserve.messages import PeerWelcome
        class Given: welcome = msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=PeerWelcome)
        reader = Reader()
        reader.connect(Given)
        reader.read(1, list(range(64)), list(range(64)))
        os.kill(os.getpid(), 9)
    """
    welcome = msgspec.msgpack.encode(source.welcome).hex()
    command = [sys.executable, "-c", textwrap.dedent(script), str(TESTS), welcome]
    ended = subprocess.run(command, timeout=200, check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    reader.connect(source)
    reader.read(1, [0, 1], [8, 9])
    result = reader.result(1)
    assert result is not None and result.error is None
    reader.assert_holds([0, 1], [8, 9])


FROZEN_SOURCE = """
    import signal, sys, time
    sys.path.insert(0, sys.argv[1])
    from test_nixl_connector import Reader, Source, SOURCE, PATTERN

    def main():
        source, reader = Source(), Reader()
        reader.connect(source)
        reader.read(1, [0], [1])
        assert reader.result(1).error is None
        reader.memory.blocks.zero_()
        source.signal(signal.SIGSTOP)
        block_ids = list(range(32))
        reader.read(2, block_ids, block_ids)
        assert reader.result(2, seconds=1.0) is None, "a frozen peer gives no result"
        reader.connector.disconnect(SOURCE)
        result = reader.result(2)
        assert result is not None and result.error == "disconnected", result
        reader.memory.blocks.fill_(-7.0)  # the blocks belong to somebody else now
        source.signal(signal.SIGCONT)
        time.sleep(1.0)
        assert bool((reader.memory.blocks == -7.0).all()), "late bytes landed"
        reader.connector.close()
        source.process.kill()
        source.process.join()
        print("nothing landed")

    if __name__ == "__main__":
        main()
"""


def test_a_frozen_source_gives_no_result_until_disconnect_and_nothing_lands_after(tmp_path: Path) -> None:
    """Over TCP, as between machines: CMA copies without the source's help, so it ignores a SIGSTOP."""
    script = tmp_path / "frozen_source.py"
    script.write_text(textwrap.dedent(FROZEN_SOURCE))
    environment = os.environ | {"UCX_TLS": "tcp"}
    ended = subprocess.run(
        [sys.executable, str(script), str(TESTS)],
        timeout=200,
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
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
    """Whether neither side used more than a tenth of a core; what others do here may cost this process a little."""
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
    with pytest.raises(RuntimeError, match=r"read-0.* died"):
        reader.wait(lambda: False, seconds=PATIENCE_SECONDS)


LIES = {
    "no blocks": ({"num_blocks": 0}, "it registered no blocks"),
    "negative": ({"num_blocks": -5}, "it registered no blocks"),
    "gigantic": ({"num_blocks": 2**62}, "KV blocks; at most"),
    "one more than registered": ({"num_blocks": NUM_BLOCKS + 1}, "aren't in the memory that it registered"),
    "many more than registered": ({"num_blocks": 1 << 18}, "aren't in the memory that it registered"),
    "other size": ({"block_bytes": 1}, "blocks have 1 bytes"),
    "null": ({"blocks_address": 0}, "can't be"),
    "unregistered": ({"blocks_address": 4096}, "aren't in the memory that it registered"),
    "beyond the address space": ({"blocks_address": 2**64 - 8}, "can't be"),
    "on a GPU": ({"kind": MemoryKind.VRAM}, "are in a GPU's memory, ours in host memory"),
    "negative address": ({"generations_address": -8}, "can't be"),
    "unregistered generations": ({"generations_address": 4096}, "NOT_FOUND"),
}


def changed(welcome: PeerWelcome, **changes: object) -> PeerWelcome:
    """With other facts about the memory of its only rank."""
    (rank,) = welcome.ranks
    ours = {name: value for name, value in changes.items() if name == "generations_address"}
    of_rank = {name: value for name, value in changes.items() if name == "metadata"}
    of_region = {name: value for name, value in changes.items() if name not in ours | of_rank}
    region = msgspec.structs.replace(rank.region, **of_region)
    return msgspec.structs.replace(welcome, ranks=[msgspec.structs.replace(rank, region=region, **of_rank)], **ours)


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_about_its_memory_is_refused_before_a_byte_is_read(
    source: Source, reader: Reader, lie: str
) -> None:
    changes, expected = LIES[lie]
    resident = psutil.Process().memory_info().rss
    reader.connector.connect(SOURCE, changed(source.welcome, **changes))
    assert reader.wait(lambda: bool(reader.events))
    (event,) = reader.events
    assert isinstance(event, PeerConnected) and event.error is not None and expected in event.error
    assert psutil.Process().memory_info().rss - resident < 256 << 20
    reader.events.clear()
    reader.connect(source)  # the truth still works
    reader.read(1, [0], [3])
    result = reader.result(1)
    assert result is not None and result.error is None
    reader.assert_holds([0], [3])


LINK_OF = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from test_nixl_connector import Reader, Source, SOURCE

    def main():
        source, reader = Source(), Reader()
        reader.connector.connect(SOURCE, source.welcome)
        assert reader.wait(lambda: bool(reader.events))
        print(reader.events[0].link)
        reader.connector.close()
        source.close()

    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize(
    ("variables", "transport"),
    [
        ({"UCX_TLS": "tcp"}, "tcp (software emulation)"),
        ({"UCX_PROTO_INFO": "n"}, "unknown"),
    ],
)
def test_the_transport_is_known(tmp_path: Path, variables: dict[str, str], transport: str) -> None:
    """UCX chooses it, and says so in its log only; a user who wants that log for himself keeps it."""
    script = tmp_path / "link_of.py"
    script.write_text(textwrap.dedent(LINK_OF))
    command = [sys.executable, str(script), str(TESTS)]
    ended = subprocess.run(
        command, timeout=200, check=False, capture_output=True, text=True, env=os.environ | variables
    )
    assert f"transport='{transport}'" in ended.stdout, ended.stdout + ended.stderr[-3000:]


def test_the_speed_of_a_link_is_measured(source: Source, reader: Reader) -> None:
    reader.connector.connect(SOURCE, source.welcome)
    assert reader.wait(lambda: bool(reader.events))
    (event,) = reader.events
    assert isinstance(event, PeerConnected) and event.link is not None
    assert event.link.transport in ("cma", "tcp (software emulation)")  # some containers forbid the first one
    assert 1e5 < event.link.bytes_per_second < 1e12
    assert not event.link.problem


def test_a_slow_link_is_shouted_about(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(ReadSettings.of(MemoryKind.DRAM), min_bytes_per_second=1e15)
    reader = Reader(settings=settings)
    try:
        reader.connector.connect(SOURCE, source.welcome)
        assert reader.wait(lambda: bool(reader.events))
    finally:
        reader.connector.close()
    (event,) = reader.events
    assert isinstance(event, PeerConnected) and event.error is None and event.link is not None
    assert "CUDA IPC isn't used" in event.link.problem and event.link.transport in event.link.problem
    shouts = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(shouts) == 1 and event.link.problem in shouts[0].getMessage()


@pytest.mark.parametrize(
    ("local", "remote", "num_descriptors"),
    [([3, 4, 5, 9], [7, 8, 9, 1], 2), ([3, 4, 5], [9, 8, 7], 3), ([3, 5], [7, 9], 2)],
    ids=["a run and one", "adjacent on one side only", "gaps"],
)
def test_adjacent_blocks_travel_as_one(
    source: Source, local: list[int], remote: list[int], num_descriptors: int
) -> None:
    """NIXL merges what is adjacent on both sides: each descriptor costs time, on a GPU more than its bytes."""
    memory, agent = make_memory(), Agent("merging", telemetry=True)
    (rank,) = source.welcome.ranks
    agent.register(MemoryKind.DRAM, memory.region().blocks_address, memory.num_blocks * memory.block_bytes)
    theirs = agent.prepare(agent.add_remote(rank.metadata), MemoryKind.DRAM, region_rows(rank.region))
    ours = agent.prepare(HERE, MemoryKind.DRAM, region_rows(memory.region()))
    nixl = agent._nixl
    ids = np.array(local, dtype=np.int32), np.array(remote, dtype=np.int32)
    handle = nixl.make_prepped_xfer("READ", agent._lists[ours], ids[0], agent._lists[theirs], ids[1], b"")
    nixl.transfer(handle)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while agent.state(handle) == "PROC" and time.monotonic() < deadline:
        time.sleep(0.001)
    assert nixl.get_xfer_telemetry(handle).descCount == num_descriptors
    assert bool((memory.blocks[local[0]] == PATTERN + remote[0]).all())
    agent.release(handle)


def test_posting_leaves_the_interpreter_to_others(source: Source) -> None:
    """The engine loop runs beside it: thousands of descriptors may not hold the GIL while they are posted."""
    count = 8192
    agent, here = Agent("posting"), np.zeros(count * 64, dtype=np.uint8)
    (rank,) = source.welcome.ranks
    agent.register(MemoryKind.DRAM, here.ctypes.data, here.nbytes)
    peer = agent.add_remote(rank.metadata)
    rows = np.zeros((2, count, 3), dtype=np.uint64)
    rows[0, :, 0] = here.ctypes.data + 64 * np.arange(count, dtype=np.uint64)
    rows[1, :, 0] = rank.region.blocks_address + 128 * np.random.default_rng(0).permutation(count).astype(np.uint64)
    rows[:, :, 1] = 64
    transfer = agent.read_rows(peer, MemoryKind.DRAM, rows[0][:1], rows[1][:1])  # connects
    finish(transfer)
    turns, stop = [0], threading.Event()

    def take_turns() -> None:
        while not stop.is_set():
            turns[0] += 1

    other = threading.Thread(target=take_turns)
    other.start()

    def has_turns() -> bool:
        before = turns[0]
        transfer = agent.read_rows(peer, MemoryKind.DRAM, rows[0], rows[1])
        during = turns[0] - before
        finish(transfer)
        return during > 1000

    try:  # where others want the cores, the other thread may get none of them in so short a time
        assert any(has_turns() for _ in range(5)), "posting held the GIL"
    finally:
        stop.set()
        other.join()


def finish(transfer: Transfer) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not transfer.is_done():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_nothing_keeps_a_destroyed_agent_alive(source: Source) -> None:
    """What is under way ends with the agent alone; and NIXL's handles hold on to it."""
    memory, agent = make_memory(), Agent("destroyed")
    (rank,) = source.welcome.ranks
    agent.register(MemoryKind.DRAM, memory.region().blocks_address, memory.num_blocks * memory.block_bytes)
    theirs = agent.prepare(agent.add_remote(rank.metadata), MemoryKind.DRAM, region_rows(rank.region))
    ours = agent.prepare(HERE, MemoryKind.DRAM, region_rows(memory.region()))
    ids = np.arange(4, dtype=np.int32)
    transfers = [agent.read_prepared(ours, ids, theirs, ids) for _ in range(3)]
    inner = agent._nixl.agent
    agent.destroy()
    assert sys.getrefcount(inner) == 2, "somebody else holds it"
    assert all(transfer.is_done() for transfer in transfers)
