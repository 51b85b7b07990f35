"""NIXL for real with a cache of two groups: each read gets the bytes and the generations of its own group."""

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from forked_processes import fork_context
from grouped_source import FIRST_GENERATIONS, FULL, NUM_BLOCKS, SOURCE, WINDOW, fill, make_memory, serve_groups
from splitserve.kvconnector.blocks.digest import digests_of
from splitserve.kvconnector.nixl.connector import NixlConnector
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.kvconnector.transfer.welcome_check import problem_with_memory
from splitserve.protocol.handover.reads import ReadCommand, ReadPath, ReadResult
from splitserve.protocol.messages.handover import PeerWelcome
from splitserve.protocol.request import Party
from waiting import PATIENCE_SECONDS, wait_until

ME = Party("decode-0", 22)


class Source:
    def __init__(self) -> None:
        context = fork_context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve_groups, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(2 * PATIENCE_SECONDS), "the source process doesn't answer"
        self.welcome = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=PeerWelcome)


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.pipe.send(None)
    source.process.join(PATIENCE_SECONDS)
    assert not source.process.is_alive()


class Reader:
    """One rank's connector, connected to the source."""

    def __init__(self, source: Source, rank: int, num_ranks: int) -> None:
        self.memory = make_memory(num_ranks)
        self.rank = rank
        self.events: list[object] = []
        digests = digests_of(self.memory)
        self.connector = NixlConnector(ME, self.memory, threading.Event().set, digests, rank=rank)
        self.connector.connect(SOURCE, source.welcome)
        connected = self.next(PeerConnected)
        assert connected.error is None, connected.error

    def next(self, kind: type) -> object:
        def is_there() -> bool:
            self.events += self.connector.events()
            return any(isinstance(event, kind) for event in self.events)

        wait_until(is_there)
        event = next(event for event in self.events if isinstance(event, kind))
        self.events.remove(event)
        return event

    def read(self, read_id: int, group: int, local: list[int], remote: list[int]) -> ReadResult:
        self.connector.read(ReadCommand(read_id, SOURCE, local, remote, group))
        result = self.next(ReadResult)
        assert isinstance(result, ReadResult) and result.read_id == read_id
        return result

    def expected(self, group: int, remote: int) -> np.ndarray:
        """The bytes of the source's block that belong to this rank, in the order of its own block."""
        whole = make_memory()
        fill(whole)
        block = whole.groups[group].bytes[remote].numpy()
        theirs, ours = whole.layout.cache.blocks(group), self.memory.layout.cache.blocks(group)
        mine = np.zeros(ours.block_bytes, dtype=np.uint8)
        for span in ours.spans(self.rank, theirs):
            rows = theirs.rows(span.source_head, span.num_heads, span.field)
            for place, piece in zip(ours.rows(span.local_head, span.num_heads, span.field), rows, strict=True):
                mine[place.start : place.stop] = block[piece.start : piece.stop]
        return mine


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (0, 2), (1, 2)])
def test_reads_of_both_groups(source: Source, rank: int, num_ranks: int) -> None:
    reader = Reader(source, rank, num_ranks)
    path = ReadPath.DIRECT if num_ranks == 1 else ReadPath.LAYERS
    for read_id, (group, local, remote) in enumerate([(1, [6, 0, 1], [2, 3, 6]), (0, [3, 4, 11], [2, 3, 6])]):
        result = reader.read(read_id, group, local, remote)
        assert result.error is None and result.path is path
        assert list(result.generations) == [FIRST_GENERATIONS[group] + block_id for block_id in remote]
        blocks = reader.memory.groups[group].bytes
        for mine, theirs in zip(local, remote, strict=True):
            assert np.array_equal(blocks[mine].numpy(), reader.expected(group, theirs))
        others = sorted(set(range(NUM_BLOCKS[group])) - set(local))
        assert not blocks[others].any(), "a block that wasn't asked for was written"
        assert len(result.digests) == (len(local) if num_ranks == 1 else 0)
        assert list(result.digests) in ([], digests_of(reader.memory)(local, group))
    reader.connector.close()


def test_a_generation_moves_in_one_group_alone(source: Source) -> None:
    reader = Reader(source, 0, 1)
    source.pipe.send((1, 5))
    assert source.pipe.recv() == "done"
    assert list(reader.read(1, 1, [5], [5]).generations) == [FIRST_GENERATIONS[1] + 6]
    assert list(reader.read(2, 0, [5], [5]).generations) == [FIRST_GENERATIONS[0] + 5]
    reader.connector.close()


def test_a_worker_whose_memory_lacks_a_group_is_refused(source: Source) -> None:
    welcome, (rank,) = source.welcome, source.welcome.ranks
    assert problem_with_memory(welcome) is None
    replace = msgspec.structs.replace
    cut = replace(welcome, ranks=[replace(rank, regions=rank.regions[:1])])
    assert "2 groups, but it declares the memory of [1, 2]" in str(problem_with_memory(cut))
    fewer = replace(welcome, generations_addresses=welcome.generations_addresses[:1])
    assert "2 groups, but" in str(problem_with_memory(fewer))
    swapped = replace(welcome, ranks=[replace(rank, regions=rank.regions[::-1])])
    assert "bytes, but its layout implies" in str(problem_with_memory(swapped))
    other = replace(welcome.layout, groups=(FULL, replace(WINDOW, window=41)))
    difference = welcome.layout.mismatch(other)
    assert difference is not None and "window=40" in difference and "window=41" in difference
