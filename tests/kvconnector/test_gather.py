"""Blocks that a source gathers for readers: slots, tickets, leases, and hostile requests."""

from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kvconnector.layout.memory import KVMemory
from splitserve.kvconnector.nixl import link as nixl_link
from splitserve.kvconnector.nixl.link import MAX_ROUNDS, LinkProbe
from splitserve.kvconnector.transfer import gather
from splitserve.kvconnector.transfer.device_copies import Done
from splitserve.kvconnector.transfer.gather import FREE, GatherDone, GatherRequest, GatherSource, encode
from splitserve.kvconnector.transfer.read_choice import ReadShape, choose_path, path_seconds
from splitserve.kvconnector.transfer.read_cost import CopyCost, LinkCost, ReadCost, fit, fit_copies
from splitserve.kvconnector.transfer.read_settings import ReadSettings
from splitserve.protocol.handover.reads import ReadPath
from splitserve.protocol.memory_records import LayoutRecord, MemoryKind

LAYOUT = LayoutRecord("m", "w", "float32", 4, 2, 4, 8)
HEAD_BYTES = LAYOUT.block_bytes // 4
NUM_BLOCKS, NUM_SLOTS = 8, 2


class Source:
    def __init__(self) -> None:
        self.memory = KVMemory(LAYOUT, NUM_BLOCKS)
        for block_id in range(NUM_BLOCKS):
            for head in range(4):
                self.memory.blocks[block_id, :, head] = 10 * block_id + head
        self.source = GatherSource(self.memory, NUM_SLOTS, 6 * HEAD_BYTES)
        self.tickets = self.source._tickets
        self.slots = self.source._flat.view(NUM_SLOTS, -1)

    def ask(self, ticket: int, block_ids: list[int], first_head: int = 0, num_heads: int = 2) -> None:
        self.source.hear(encode(GatherRequest(ticket, block_ids, first_head, num_heads)))
        self.source.poll()
        self.source.poll()

    def done(self, ticket: int) -> None:
        self.source.hear(encode(GatherDone(ticket)))
        self.source.poll()
        self.source.poll()

    def content(self, slot: int, count: int, num_heads: int) -> list[list[float]]:
        """Per block its heads' numbers."""
        size = count * num_heads * HEAD_BYTES
        pieces = self.slots[slot][:size].view(self.memory.blocks.dtype).view(count, 2, num_heads, -1)
        assert bool((pieces == pieces[:, :1, :, :1]).all()), "a head isn't of one block"
        found: list[list[float]] = pieces[:, 0, :, 0].tolist()
        return found


@pytest.fixture
def source() -> Source:
    return Source()


def test_heads_of_blocks_in_the_order_that_was_asked_for(source: Source) -> None:
    source.ask(7, [5, 1, 3], first_head=1)
    assert source.tickets.tolist() == [7, FREE]
    assert source.content(0, 3, 2) == [[51, 52], [11, 12], [31, 32]]


def test_a_ticket_is_gone_before_its_slot_is_written_again(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    source.ask(1, [0])
    source.ask(2, [1])
    source.ask(3, [2])  # waits
    assert source.tickets.tolist() == [1, 2]
    copies = source.source._copies
    original, seen = copies.gather, []
    monkeypatch.setattr(copies, "gather", lambda *a: seen.append(source.tickets.tolist()) or original(*a))
    source.done(1)
    assert seen == [[FREE, 2]], "the ticket was there while the slot was written"
    assert source.tickets.tolist() == [3, 2]
    assert source.content(0, 1, 2) == [[20, 21]]


def test_a_slot_that_nobody_frees_is_free_after_its_lease(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "LEASE_SECONDS", 0.0)
    source.ask(1, [0])
    source.source.poll()
    assert source.tickets.tolist() == [FREE, FREE]


def test_what_cannot_be_is_refused_and_counted(source: Source) -> None:
    for ticket, block_ids, first_head, num_heads in (
        (0, [0], 0, 1),
        (2**64, [0], 0, 1),
        (1, [], 0, 1),
        (1, [NUM_BLOCKS], 0, 1),
        (1, [-1], 0, 1),
        (1, [0], -1, 1),
        (1, [0], 0, 0),
        (1, [0], 3, 2),
        (1, [0, 1, 2, 3], 0, 2),  # more than a slot holds
    ):
        try:
            message = encode(GatherRequest(ticket, block_ids, first_head, num_heads))
        except OverflowError:
            continue
        before = source.source.num_refused
        source.source.hear(message)
        source.source.poll()
        assert source.source.num_refused == before + 1, (ticket, block_ids, first_head, num_heads)
    assert not source.tickets.any()


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_bytes_of_any_kind_do_no_harm(messages: list[bytes]) -> None:
    source = Source()
    for message in messages:
        source.source.hear(message)
        source.source.poll()
    source.ask(9, [4])
    assert 9 in source.tickets.tolist()


def test_waiting_requests_are_bounded(source: Source) -> None:
    for ticket in range(1, 3 * gather.MAX_WAITING):
        source.source.hear(encode(GatherRequest(ticket, [0], 0, 1)))
    assert len(source.source._waiting) == gather.MAX_WAITING


# ---- the choice ----

COPY, GATHER = CopyCost(2e-5, 1e12), CopyCost(2e-4, 1e12)
NVLINK = ReadCost(LinkCost(2e-5, 5e-6, 270e9), COPY, GATHER)
MIB = 1 << 20


def shape(block_bytes: int, *, source_bytes: int = 0, spans: int = 1, per_gather: int = 64) -> ReadShape:
    return ReadShape(not source_bytes, spans, 32, block_bytes, source_bytes or block_bytes, 8, per_gather)


@pytest.mark.parametrize(
    ("read", "num_blocks", "expected"),
    [
        (shape(8 * MIB), 64, ReadPath.DIRECT),
        (shape(MIB // 4, per_gather=256), 256, ReadPath.GATHERED),
        (shape(MIB // 4, per_gather=256), 2, ReadPath.DIRECT),
        (shape(MIB // 4, per_gather=0), 256, ReadPath.DIRECT),
        (shape(4 * MIB, source_bytes=8 * MIB, per_gather=16), 64, ReadPath.GATHERED),
        (shape(4 * MIB, source_bytes=8 * MIB, per_gather=0), 64, ReadPath.STAGED),
        (shape(4 * MIB, source_bytes=2 * MIB, spans=2, per_gather=0), 64, ReadPath.STAGED),
    ],
)
def test_what_costs_least_is_chosen(read: ReadShape, num_blocks: int, expected: ReadPath) -> None:
    assert choose_path(read, NVLINK, num_blocks) is expected


def test_descriptors_that_cost_nothing_go_straight_into_place() -> None:
    cost = ReadCost(LinkCost(2e-5, 1e-9, 5e9), CopyCost(1e-5, 5e9), CopyCost(5e-4, 5e9))
    assert choose_path(shape(4 * MIB, source_bytes=8 * MIB), cost, 64) is ReadPath.LAYERS
    seconds = path_seconds(shape(4 * MIB, source_bytes=8 * MIB), cost, 64)
    assert set(seconds) == {ReadPath.LAYERS, ReadPath.STAGED, ReadPath.GATHERED}


def test_the_model_is_fitted_to_what_was_measured() -> None:
    link = fit(small=25e-6, many=25e-6 + 31 * 5e-6, num_many=32, large=1e-3, large_bytes=10**6)
    assert (link.seconds_fixed, link.seconds_per_descriptor) == (pytest.approx(20e-6), pytest.approx(5e-6))
    assert link.bytes_per_second == pytest.approx(1e6 / 975e-6)
    copy = fit_copies(1.1e-4, 10**5, 2e-3, 2 * 10**6)
    assert copy.seconds(1, 10**5) == pytest.approx(1.1e-4) and copy.seconds(1, 2 * 10**6) == pytest.approx(2e-3)
    assert np.isfinite(astuple(fit(1e-5, 1e-5, 1, 1e-5, 1))).all()


@pytest.mark.parametrize(("rounds_held_up", "rounds"), [(0, 3), (5, 6), (100, MAX_ROUNDS)])
def test_a_probe_whose_small_reads_are_held_up_is_repeated(
    rounds_held_up: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(nixl_link.time, "perf_counter", lambda: clock.now)
    large_reads: list[int] = []

    def read(count: int, size: int) -> Done:
        if size == 64 * MIB:
            large_reads.append(count)
            clock.now += 1.7e-4
        else:
            clock.now += 2e-4 if len(large_reads) <= rounds_held_up else 2e-5
        return Done()

    probe = LinkProbe(SimpleNamespace(), ReadSettings.of(MemoryKind.VRAM), measures=False)
    steps = probe._measure_reads(read, 64 * MIB)
    with pytest.raises(StopIteration) as over:
        while True:
            next(steps)
    assert len(large_reads) == rounds
    seconds = 1.5e-4 if rounds < MAX_ROUNDS else 0.85e-4
    assert over.value.value.bytes_per_second == pytest.approx(64 * MIB / seconds)


def test_a_probe_whose_large_reads_become_faster_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copies of a GPU that was idle are slow."""
    clock, large = SimpleNamespace(now=100.0), iter([9e-4, 8.9e-4, 4.2e-4, *[1.7e-4] * MAX_ROUNDS])
    monkeypatch.setattr(nixl_link.time, "perf_counter", lambda: clock.now)

    def read(_count: int, size: int) -> Done:
        clock.now += next(large) if size == 64 * MIB else 2e-5
        return Done()

    probe = LinkProbe(SimpleNamespace(), ReadSettings.of(MemoryKind.VRAM), measures=False)
    steps = probe._measure_reads(read, 64 * MIB)
    with pytest.raises(StopIteration) as over:
        while True:
            next(steps)
    assert over.value.value.bytes_per_second == pytest.approx(64 * MIB / 1.5e-4)


def test_a_probe_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a read of another peer's waits for one measurement, not for all."""
    clock = SimpleNamespace(now=100.0)
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(nixl_link.time, name, lambda: clock.now)

    def read(_count: int, _size: int) -> Done:
        clock.now += 6e-4
        return Done()

    probe = LinkProbe(SimpleNamespace(), ReadSettings.of(MemoryKind.VRAM), measures=False)
    steps = probe._measure_reads(read, 64 * MIB)
    probe._steps = steps  # type: ignore[assignment]
    turns = []
    while True:
        before = clock.now
        if probe.poll():
            break
        turns.append(clock.now - before)
    assert len(turns) == 3 * MAX_ROUNDS // 2 and max(turns) < 2e-3


def test_a_small_read_that_was_held_up_makes_no_link_endlessly_fast() -> None:
    link = fit(small=2e-4, many=3e-4, num_many=32, large=1.7e-4, large_bytes=64 * MIB)
    assert link.bytes_per_second == pytest.approx(64 * MIB / 0.85e-4)


def test_paths_are_those_of_the_specification() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "handover.md").read_text(encoding="utf-8")
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and line.split("`")[1] in
            set(ReadPath)] == list(ReadPath)  # fmt: skip
