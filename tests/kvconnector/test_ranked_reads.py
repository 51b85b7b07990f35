"""Tensor parallelism: every pair of numbers of ranks, in both directions, moves the right heads, for real."""

import random
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import wait

import msgspec
import pytest

from forked_processes import fork_context
from ranked_worker import FIRST_GENERATION, NUM_BLOCKS, SETTINGS, SOURCE, RankedWorker, content, layout_of, serve_ranks
from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl.connector import NixlConnector
from splitserve.kvconnector.ranks.transfers import RankedConnector, RankEnd, TransferRankError
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.cache_layout import HeadSpan
from splitserve.protocol.handover.reads import ReadCommand, ReadPath, ReadResult
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party
from waiting import PATIENCE_SECONDS

ME = Party("decode-0", 22)
SIZES = (1, 2, 4)
PAIRS = [(8, x, y) for x in SIZES for y in SIZES] + [(2, x, y) for x in SIZES for y in SIZES if 4 in (x, y)]
PAIRS += [(6, 3, 2), (6, 2, 3)]  # some ranks read different numbers of heads from two
OFTEN = {(8, 2, 2), (8, 1, 4), (8, 4, 2), (2, 1, 4), (2, 4, 1), (2, 4, 4), *PAIRS[-2:]}
"""Heads split and joined, shared by ranks or not, in both directions: the other pairs are slow tests."""


class Sources:
    """A process with workers that are read from, by their number of heads and of ranks."""

    def __init__(self) -> None:
        context = fork_context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve_ranks, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._welcomes: dict[tuple[int, int], PeerWelcome] = {}

    def welcome(self, num_heads: int, num_ranks: int) -> PeerWelcome:
        if (num_heads, num_ranks) not in self._welcomes:
            self._welcomes[num_heads, num_ranks] = self._tell("start", num_heads, num_ranks)
        return self._welcomes[num_heads, num_ranks]

    def tell(self, command: str, num_heads: int, num_ranks: int, *block_ids: int) -> None:
        self._tell(command, num_heads, num_ranks, *block_ids)

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(PATIENCE_SECONDS)
        assert not self.process.is_alive()

    def change(self, what: str, value: int = 0) -> None:
        self.pipe.send((what, value, 0))
        assert self.pipe.recv() == b""

    def _tell(self, *command: object) -> PeerWelcome:
        self.pipe.send(command)
        assert self.pipe.poll(60.0), "the source process doesn't answer"
        return msgspec.msgpack.decode(self.pipe.recv(), type=PeerWelcome)


@pytest.fixture(scope="module")
def sources() -> Iterator[Sources]:
    sources = Sources()
    yield sources
    sources.close()


class Reader:
    """A worker of this process, with the events that came out of its connector."""

    def __init__(self, num_heads: int, num_ranks: int) -> None:
        self.woken = threading.Event()
        self.worker = RankedWorker(ME, layout_of(num_heads, num_ranks), self.woken.set)
        self.events: list[ReadResult | PeerConnected] = []

    def event(self) -> ReadResult | PeerConnected:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.events and time.monotonic() < deadline:
            self.woken.wait(0.01)
            self.woken.clear()
            self.events += self.worker.connector.events()
        assert self.events, "nothing happened"
        return self.events.pop(0)

    def connect(self, welcome: PeerWelcome) -> PeerConnected:
        self.worker.connector.connect(SOURCE, welcome)
        event = self.event()
        assert isinstance(event, PeerConnected)
        return event

    def read(self, local: list[int], remote: list[int], *, awaited: bool = False) -> ReadResult:
        self.worker.connector.read(ReadCommand(1, SOURCE, local, remote), awaited=awaited)
        while awaited and self.worker.connector.is_landing():
            time.sleep(0.0001)
        event = self.event()
        assert isinstance(event, ReadResult)
        return event

    def assert_holds(self, local: list[int], remote: list[int]) -> None:
        layout = self.worker.layout
        for rank, memory in enumerate(self.worker.memories):
            for local_id, remote_id in zip(local, remote, strict=True):
                assert bool((memory.blocks[local_id] == content(remote_id, layout, rank)).all()), (rank, local_id)
            others = sorted(set(range(NUM_BLOCKS)) - set(local))
            assert not memory.blocks[others].any(), "a block that wasn't asked for was written"


@pytest.fixture(scope="module")
def readers() -> Iterator[dict[tuple[int, int], Reader]]:
    started: dict[tuple[int, int], Reader] = {}
    yield started
    for each in started.values():
        each.worker.close()


@pytest.fixture
def reader(request: pytest.FixtureRequest, readers: dict[tuple[int, int], Reader]) -> Reader:
    """The worker with the wanted heads and ranks, as if it had never read."""
    if request.param not in readers:
        readers[request.param] = Reader(*request.param)
    reader = readers[request.param]
    reader.worker.connector.disconnect(SOURCE)
    for memory in reader.worker.memories:
        memory.blocks.zero_()
    return reader


def paths(num_heads: int, prefill: int, decode: int) -> list[ReadPath]:
    """Ways between these two: where both have the same heads, whole blocks travel directly; others can't."""
    is_whole = layout_of(num_heads, prefill).kv_heads_per_rank == layout_of(num_heads, decode).kv_heads_per_rank
    return [ReadPath.GATHERED, *([ReadPath.DIRECT] if is_whole else [ReadPath.LAYERS, ReadPath.STAGED])]


@pytest.mark.parametrize(
    ("path", "num_heads", "prefill", "reader"),
    [
        pytest.param(
            path,
            heads,
            x,
            (heads, y),
            id=f"{heads} heads, {x} to {y}, {path}",
            marks=[] if (heads, x, y) in OFTEN else pytest.mark.slow,
        )
        for heads, x, y in PAIRS
        for path in paths(heads, x, y)
    ],
    indirect=["reader"],
)
def test_every_head_arrives(
    num_heads: int,
    prefill: int,
    reader: Reader,
    path: ReadPath,
    sources: Sources,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("splitserve.kvconnector.nixl.connector.choose_path", lambda *_: path)
    assert reader.connect(sources.welcome(num_heads, prefill)).error is None
    local, remote = [3, 4, 5, 20, 1, 39, 38, *range(6, 18)], [8, 9, 10, 0, 39, 2, 1, *range(11, 23)]
    for count in (4, len(local)):  # few are put together at once
        result = reader.read(local[:count], remote[:count], awaited=count > 4)
        assert result.error is None
        assert list(result.generations) == [FIRST_GENERATION + block_id for block_id in remote[:count]]
        assert result.path is path
        assert 0.0 <= result.stages.woken < result.stages.copied <= result.seconds
        reader.assert_holds(local[:count], remote[:count])


@pytest.mark.parametrize("reader", [(8, 2)], indirect=True)
def test_a_block_that_was_taken_meanwhile_is_told_by_every_rank(reader: Reader, sources: Sources) -> None:
    assert reader.connect(sources.welcome(8, 4)).error is None
    sources.tell("take", 8, 4, 30)
    result = reader.read([0, 1, 2], [29, 30, 31])
    assert result.error is None
    assert list(result.generations) == [FIRST_GENERATION + block_id for block_id in (29, 31, 31)]


@pytest.mark.parametrize("reader", [(8, 1)], indirect=True)
def test_a_source_that_puts_nothing_together_is_done_without(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.kvconnector.nixl.connector.choose_path", lambda *_: ReadPath.GATHERED)
    sources = Sources()
    assert reader.connect(sources.welcome(8, 1)).error is None
    sources.change("deaf")
    for expected in ([0, 1, 2], [5, 6]):  # the second time it isn't even asked
        result = reader.read([0, 1, 2][: len(expected)], expected)
        assert result.error is None and result.path is ReadPath.DIRECT
        assert list(result.generations) == [FIRST_GENERATION + block_id for block_id in expected]
    reader.assert_holds([0, 1, 2], [5, 6, 2])
    reader.worker.connector.disconnect(SOURCE)
    assert reader.connect(sources.welcome(8, 1)).error is None, "a new connection does without from the start"
    assert reader.read([0], [5]).path is ReadPath.DIRECT
    sources.close()


@pytest.mark.parametrize("reader", [(8, 1)], indirect=True)
def test_a_slot_that_was_taken_while_it_was_read_is_noticed(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that end at once: a read fails, or goes another way, or is right; it never gives another read's bytes."""
    monkeypatch.setattr("splitserve.kvconnector.nixl.connector.choose_path", lambda *_: ReadPath.GATHERED)
    sources = Sources()
    welcome = sources.welcome(8, 2)
    sources.change("lease", 1)
    outcomes: set[str] = set()
    chosen = random.Random(5)
    for number in range(200):
        if len(outcomes) > 1 and number >= 5:
            break
        if reader.connect(welcome).error is not None:
            continue
        local, remote = (chosen.sample(range(NUM_BLOCKS), 24) for _ in range(2))
        result = reader.read(local, remote)
        outcomes.add(str(result.error or result.path))
        if result.error is None:
            reader.assert_holds(local, remote)
        reader.worker.connector.disconnect(SOURCE)
        for memory in reader.worker.memories:
            memory.blocks.zero_()
    sources.close()
    assert len(outcomes) > 1, outcomes


@pytest.mark.parametrize("reader", [(8, 2)], indirect=True)
def test_a_source_that_dies_ends_the_reads_of_all_ranks(reader: Reader) -> None:
    sources = Sources()
    assert reader.connect(sources.welcome(8, 2)).error is None
    sources.process.kill()
    sources.process.join()
    result = reader.read([0], [0])
    assert result.error is not None


@pytest.mark.parametrize("reader", [(8, 2)], indirect=True)
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ranks": 1}, "declares the memory of 1 ranks, but has 2"),
        ({"num_blocks": 2}, "different numbers of blocks"),
        ({"metadata": b"?"}, "MISMATCH"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ranks_that_contradict_each_other_are_refused(
    reader: Reader, change: dict[str, object], expected: str, sources: Sources
) -> None:
    welcome = sources.welcome(8, 2)
    ranks = list(welcome.ranks)
    if "ranks" in change:
        ranks.pop()
    elif "num_blocks" in change:
        ranks[1] = msgspec.structs.replace(ranks[1], regions=[msgspec.structs.replace(ranks[1].region, num_blocks=2)])
    else:
        ranks[1] = msgspec.structs.replace(ranks[1], metadata=b"?")
    error = reader.connect(msgspec.structs.replace(welcome, ranks=ranks)).error
    assert error is not None and expected in error


@pytest.mark.parametrize("reader", [(8, 2)], indirect=True)
def test_a_ranks_answer_to_an_earlier_attempt_does_not_count(reader: Reader, sources: Sources) -> None:
    welcome, connector = sources.welcome(8, 2), reader.worker.connector
    ranks = [msgspec.structs.replace(rank, metadata=b"?") for rank in welcome.ranks]
    connector.connect(SOURCE, msgspec.structs.replace(welcome, ranks=ranks))
    assert wait(reader.worker.channels, PATIENCE_SECONDS), "the other rank says nothing"
    connector.disconnect(SOURCE)
    assert reader.connect(welcome).error is None
    assert not reader.events and not connector.events()


def test_a_rank_whose_transfers_end_takes_the_worker_with_it() -> None:
    reader = Reader(8, 2)
    reader.worker.channels[0].send_bytes(msgspec.msgpack.encode(RankEnd()))
    reader.worker.threads[0].join(PATIENCE_SECONDS)
    assert wait(reader.worker.channels, PATIENCE_SECONDS)
    with pytest.raises(TransferRankError, match="rank 1"):
        reader.worker.connector.events()
    reader.worker.close()


@pytest.mark.timeout(PATIENCE_SECONDS)
def test_a_rank_that_ends_before_its_transfers_start_is_named() -> None:
    channel, theirs = Pipe()
    theirs.close()
    local = NixlConnector(ME, KVMemory(layout_of(8, 2), NUM_BLOCKS), lambda: None, settings=SETTINGS)
    with pytest.raises(TransferRankError, match="rank 1 ended before it declared its memory"):
        RankedConnector(local, [channel])
    local.close()
    channel.close()


def test_ranks_that_share_a_head_read_from_different_ranks() -> None:
    """Otherwise one rank would have all the traffic."""
    ours, theirs = layout_of(2, 4), layout_of(2, 4)
    assert [ours.block_layout.spans(rank, theirs.block_layout) for rank in range(4)] == [
        (HeadSpan(rank, 0, 0, 1),) for rank in range(4)
    ]
    assert [
        span.rank for rank in range(2) for span in layout_of(2, 2).block_layout.spans(rank, theirs.block_layout)
    ] == [0, 3]
