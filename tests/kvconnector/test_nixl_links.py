"""NIXL between processes: what a link is, what travels as one, what keeps others waiting, and peers that lie."""

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from nixl_reader import Reader, Source, changed
from nixl_source import NUM_BLOCKS, PATTERN, SOURCE, make_memory
from splitserve.kvconnector.nixl.agent import HERE, Agent, Transfer
from splitserve.kvconnector.nixl.link import link_problem
from splitserve.kvconnector.nixl.ucx_log import UCX_LOG
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.kvconnector.transfer.read_plan import region_rows
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.memory_records import MemoryKind
from waiting import PATIENCE_SECONDS

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
    "negative address": ({"generations_addresses": [-8]}, "can't be"),
    "unregistered generations": ({"generations_addresses": [4096]}, "NOT_FOUND"),
}


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
    import msgspec
    sys.path.insert(0, sys.argv[1])
    from nixl_reader import PeerWelcome, Reader, SOURCE

    reader = Reader()
    reader.connector.connect(SOURCE, msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=PeerWelcome))
    assert reader.wait(lambda: bool(reader.events))
    print(reader.events[0].link)
    reader.connector.close()
"""


@pytest.mark.parametrize(
    ("variables", "transport"),
    [
        ({"UCX_TLS": "tcp"}, "tcp (software emulation)"),
        ({"UCX_PROTO_INFO": "n"}, "unknown"),
    ],
)
def test_the_transport_is_known(source: Source, variables: dict[str, str], transport: str) -> None:
    """UCX chooses it, and says so in its log only; a user who wants that log for himself keeps it."""
    command = [sys.executable, "-c", textwrap.dedent(LINK_OF), str(SUPPORT)]
    command.append(msgspec.msgpack.encode(source.welcome).hex())
    ended = subprocess.run(
        command, timeout=200, check=False, capture_output=True, text=True, env=os.environ | variables
    )
    assert f"transport='{transport}'" in ended.stdout, ended.stdout + ended.stderr[-3000:]


def test_what_ucx_logs_of_connections_is_freed(source: Source, reader: Reader) -> None:
    reader.connect(source)
    assert UCX_LOG._fd is not None
    num_bytes = os.fstat(UCX_LOG._fd).st_size
    for _ in range(4):
        reader.connector.disconnect(SOURCE)
        reader.connect(source)
    log = os.fstat(UCX_LOG._fd)
    assert log.st_size - num_bytes > 64 << 10, "each connection is in the log"
    assert log.st_blocks * 512 < 64 << 10


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
    ("is_slow", "uses_ipc", "is_near", "said"),
    [
        (False, True, True, ""),
        (False, False, False, ""),
        (False, False, None, ""),
        (False, None, True, ""),
        (False, False, True, "CUDA IPC isn't used. Are both processes in one PID namespace"),
        (True, False, True, "CUDA IPC isn't used"),
        (True, False, None, "CUDA IPC isn't used"),
        (True, None, True, "Is CUDA IPC used? Are both"),
        (True, True, True, "CUDA IPC is used. Are the GPUs joined by NVLink"),
        (True, False, False, "the peer is on another machine"),
    ],
)
def test_what_is_said_of_a_link_between_gpus(is_slow: bool, uses_ipc: bool, is_near: bool, said: str) -> None:
    """A fast network is not fast enough between GPUs of one machine."""
    why = link_problem(is_slow, uses_ipc, is_near=is_near)
    assert why.startswith(said) and bool(why) == bool(said)


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
    """Transfers in flight end with the agent only, and NIXL's handles would keep it alive."""
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
