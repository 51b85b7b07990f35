"""Blocks on offer that leave prefill's device: they are offered from its host tier, and read again where need be."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from both_sides import CONFIG, NUM_PEER_BLOCKS, PEER_BLOCKS, BothSides, blocks, make_sink, poll, verified
from core_driver import DECODE, KEY, PREFILL, SAMPLING, Worker, decode_request, sent
from splitserve.engine.effects import Effect
from splitserve.kvconnector.blocks.pool import GENERATION_MASK
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.handover.sink import SinkHandover, SinkState
from splitserve.protocol.handover.source import SourceHandover, SourceState
from splitserve.protocol.messages.handover import Grant, Offer, OfferAck, OfferedBlock, OfferedSpan, Release
from splitserve.protocol.messages.requests import Abort, PeerRef, PrefillRequest, StepTokens
from splitserve.protocol.request import RequestKey, Role
from splitserve.simulation.model import BLOCK_SIZE, LAYOUT, PROTOCOL, ROUTER

PATIENCE = PROTOCOL.host_offer_after_seconds
LONG = 22  # tokens: five full blocks and a half
OTHER = RequestKey("other", 0)


def prompt(start: int, num_tokens: int = LONG) -> list[int]:
    return [(start + position) % 50 for position in range(num_tokens)]


# ---- prefill ----


class Prefill:
    """A prefill worker with room for one long prompt and two blocks; what it stores is stored at once."""

    def __init__(self, num_slots: int = 16, **options: Any) -> None:
        self.worker = Worker(Role.PREFILL, PREFILL, num_blocks=8, num_slots=num_slots, **options)

    def begin(self, key: RequestKey, token_ids: list[int], *, reads_host_tier: bool = True, cached: int = 0) -> None:
        peer = PeerRef(DECODE, "")
        self.hear(PrefillRequest(key, token_ids, SAMPLING, peer, 60.0), ROUTER)
        self.hear(Grant(key, len(token_ids), cached, PROTOCOL.lease_seconds, reads_host_tier))

    def hear(self, body: Any, sender: Any = DECODE) -> list[Effect]:
        return self.worker.hear(sender, body) + self.worker.end_copies()

    def run(self) -> list[Effect]:
        """Steps until none can begin."""
        return self.worker.run()

    def offers(self, effects: list[Effect], key: RequestKey = KEY) -> list[Offer]:
        found = [body for body in sent(effects, Offer) if isinstance(body, Offer)]
        return [offer for offer in found if offer.key == key]

    def wait(self, seconds: float) -> list[Effect]:
        return self.worker.wait(seconds) + self.worker.end_copies()

    @property
    def num_moved(self) -> int:
        return self.worker.core.load().host_offered_blocks


def is_prefilled(effects: list[Effect], key: RequestKey) -> bool:
    deltas = [delta for body in sent(effects, StepTokens) if isinstance(body, StepTokens) for delta in body.deltas]
    return key in {delta.key for delta in deltas}


def test_blocks_on_offer_make_room_for_the_next_prompt() -> None:
    prefill = Prefill()
    prefill.begin(KEY, prompt(0))
    [*_, first] = prefill.offers(prefill.run())
    prefill.hear(OfferAck(KEY, [6], True))
    prefill.begin(OTHER, prompt(30))
    assert not is_prefilled(prefill.run(), OTHER), "decode has time to read them first"
    assert prefill.worker.core.next_deadline() <= prefill.worker.now + PATIENCE
    prefill.wait(PATIENCE + 0.01)
    effects = prefill.run()
    assert is_prefilled(effects, OTHER)
    assert prefill.num_moved == 4, "two blocks were free, and six are needed"
    revised = next(offer for offer in prefill.offers(effects) if offer.revision == 1)
    assert (revised.spans[0].first_block, revised.last, revised.num_tokens) == (1, True, LONG)
    assert all(block.block_id >= 8 and block.generation == 8 for block in revised.spans[0].blocks[:-1]), (
        "slots, stored into once"
    )
    assert revised.spans[0].blocks[-1] == first.spans[0].blocks[-1], "the one that isn't full has no copy"
    for key in (KEY, OTHER):
        prefill.hear(Release(key, True))
    prefill.worker.assert_idle()
    assert prefill.worker.core.state.blocks.tiers.num_held_slots == 0


@pytest.mark.parametrize(
    "end",
    [lambda p: p.hear(Release(KEY, False)), lambda p: p.hear(Abort(KEY), ROUTER), lambda p: p.wait(11.0)],
    ids=["release", "abort", "lease"],
)
def test_slots_on_offer_stay_until_the_end_and_no_longer(end: Callable[[Prefill], Any]) -> None:
    """Whatever the end is; meanwhile the tier has room for nothing else."""
    prefill = Prefill(num_slots=4)
    prefill.begin(KEY, prompt(0))
    prefill.run()
    tiers = prefill.worker.core.state.blocks.tiers
    prefill.wait(PATIENCE + 0.01)
    prefill.begin(OTHER, prompt(30, 14))  # four blocks: two are missing
    effects = prefill.run()
    assert is_prefilled(effects, OTHER) and tiers.num_held_slots == prefill.num_moved == 2
    [revised] = [offer for offer in prefill.offers(effects) if offer.revision == 1][:1]
    slots = [block for block in revised.spans[0].blocks if block.block_id >= 8]
    index = tiers.tiers[0].index
    for start in (1, 2, 3):  # more than the tier holds goes down
        prefill.begin(RequestKey(f"r{start}"), prompt(10 * start + 5, 14))
        prefill.hear(Release(OTHER, True))
        prefill.run()
    assert [index.generation(block.block_id - 8) for block in slots] == [block.generation for block in slots]
    end(prefill)
    prefill.hear(Release(KEY, False))  # an abort, too, ends what decode may be reading when decode knows of it
    for start in (1, 2, 3):
        prefill.hear(Release(RequestKey(f"r{start}"), True))
        prefill.run()
    prefill.wait(11.0)
    assert tiers.num_held_slots == 0
    prefill.worker.assert_idle()


@pytest.mark.parametrize(
    ("num_slots", "reads_host_tier", "digests"),
    [(0, True, False), (16, False, False), (2, True, False), (16, True, True)],
    ids=["no tier", "the reader can't", "too few copies", "digests"],
)
def test_without_copies_that_can_be_read_nothing_changes(num_slots: int, reads_host_tier: bool, digests: bool) -> None:
    options = {"leading_digests": lambda block_ids, group: [b"d" * 16 for _ in block_ids]} if digests else {}
    prefill = Prefill(num_slots, **options)
    prefill.begin(KEY, prompt(0), reads_host_tier=reads_host_tier)
    prefill.run()
    prefill.begin(OTHER, prompt(30))
    prefill.wait(2 * PATIENCE)
    assert not is_prefilled(prefill.run(), OTHER)
    assert prefill.num_moved == 0
    prefill.hear(Release(KEY, True))
    assert is_prefilled(prefill.run(), OTHER)


def test_what_the_next_prompt_shares_stays_on_the_device() -> None:
    prefill = Prefill()
    prefill.begin(KEY, prompt(0))
    prefill.run()
    prefill.wait(PATIENCE + 0.01)
    prefill.begin(OTHER, [*prompt(0, 16), *prompt(30, 14)])  # eight blocks, of which the first four are there
    effects = prefill.run()
    assert not is_prefilled(effects, OTHER), "without the four it would need as many more"
    assert prefill.num_moved == 0
    prefill.hear(Release(KEY, True))
    assert is_prefilled(prefill.run(), OTHER)


def test_blocks_that_decode_has_cached_are_not_moved() -> None:
    prefill = Prefill()
    prefill.begin(KEY, prompt(0), cached=16)
    prefill.run()
    prefill.wait(PATIENCE + 0.01)
    prefill.begin(OTHER, prompt(30, 10))  # one block is missing
    effects = prefill.run()
    assert is_prefilled(effects, OTHER) and prefill.num_moved == 1
    [revised] = [offer for offer in prefill.offers(effects) if offer.revision == 1][:1]
    assert revised.spans[0].first_block == 4 and revised.spans[0].blocks[0].block_id >= 8
    for key in (KEY, OTHER):
        prefill.hear(Release(key, True))
    prefill.worker.assert_idle()


def test_a_revised_offer_is_sent_until_it_is_acknowledged_itself() -> None:
    source = SourceHandover(Grant(KEY, 16, 0, 100.0, True), DECODE, BLOCK_SIZE, CONFIG, now=0.0)
    source.offer_last([blocks(1, 2, 3, 4)], 16, [7], 0.0)
    source.acknowledge(OfferAck(KEY, [4], True))
    source.move({2: OfferedBlock(70, 5)}, 1.0)
    source.move({1: OfferedBlock(71, 6)}, 1.0)
    for revision in (0, 1, 3):
        source.acknowledge(OfferAck(KEY, [4], True, revision))
    offer = source.poll(1.0)
    assert offer is not None
    assert (offer.spans[0].first_block, offer.revision, offer.last, offer.first_tokens) == (1, 2, True, [7])
    assert offer.spans[0].blocks == [OfferedBlock(71, 6), OfferedBlock(70, 5), *blocks(4)]
    source.acknowledge(OfferAck(KEY, [4], True, 2))
    assert source.next_deadline() == source.lease_expires_at


# ---- decode ----


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_decode_says_whether_it_can_read_slots(num_ranks: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, num_kv_heads=2, tensor_parallel_size=num_ranks)
    effects = Worker(Role.DECODE, DECODE, layout=layout).hear(ROUTER, decode_request())
    [granted] = sent(effects, Grant)
    assert isinstance(granted, Grant) and granted.reads_host_tier == (num_ranks == 1)


def sink_with_read(num_blocks: int = 3) -> tuple[SinkHandover, ReadCommand]:
    """All blocks are offered, and the read of all of them is in flight."""
    sink = make_sink(num_blocks * BLOCK_SIZE, reads_host_tier=True)
    first = Offer(KEY, [OfferedSpan(0, 0, blocks(*range(1, 1 + num_blocks)))], num_blocks * BLOCK_SIZE, True, [7])
    sink.on_offer(first, PEER_BLOCKS, 0.0, has_host_tier=True)
    [read] = poll(sink, 0.0)[1]
    return sink, read


def revised(*moved: int, num_blocks: int = 3, revision: int = 1, first: int = 0) -> Offer:
    """Block number n is in slot 90 + n now, if it has moved."""
    places = [OfferedBlock(90 + n, 5) if n in moved else OfferedBlock(1 + n, 1001 + n) for n in range(num_blocks)]
    return Offer(KEY, [OfferedSpan(0, first, places[first:])], num_blocks * BLOCK_SIZE, True, [7], revision)


def changed(read: ReadCommand, *positions: int) -> ReadResult:
    found = [1000 + block_id + (position in positions) for position, block_id in enumerate(read.remote_blocks)]
    return ReadResult(read.read_id, None, found)


@pytest.mark.parametrize("offer_comes_first", [True, False])
def test_a_read_of_blocks_that_moved_is_repeated_from_their_new_places(offer_comes_first: bool) -> None:
    sink, read = sink_with_read()
    if offer_comes_first:
        sink.on_offer(revised(1, 2), PEER_BLOCKS, 0.1, has_host_tier=True)
        messages, reads = poll(sink, 0.1)
        assert OfferAck(sink.key, [3], True, 1) in messages
        assert reads == [], "the first one may still write to the same blocks"
        sink.on_read_result(changed(read, 1), 0.2)
    else:
        sink.on_read_result(changed(read, 1), 0.1)
        messages, reads = poll(sink, 0.1)
        assert any(isinstance(message, Grant) for message in messages), "it asks for the current offer"
        assert reads == [] and sink.state is SinkState.READING
        sink.on_offer(revised(1, 2), PEER_BLOCKS, 0.2, has_host_tier=True)
    assert sink.num_verified_blocks == 0
    [again] = poll(sink, 0.2)[1]
    assert (list(again.local_blocks), list(again.remote_blocks)) == ([50, 51, 52], [1, 91, 92])
    sink.on_read_result(ReadResult(again.read_id, None, [1001, 5, 5]), 0.3)
    assert sink.state is SinkState.COMPLETE
    assert (sink.statistics.num_reads, sink.statistics.num_blocks) == (2, 3)


def test_a_read_that_was_faster_than_the_next_content_counts() -> None:
    sink, read = sink_with_read()
    sink.on_offer(revised(0, 1, 2), PEER_BLOCKS, 0.1, has_host_tier=True)
    sink.on_read_result(verified(read), 0.2)
    assert sink.state is SinkState.COMPLETE


def test_another_place_of_another_block_is_no_help() -> None:
    sink, read = sink_with_read()
    sink.on_offer(revised(1), PEER_BLOCKS, 0.1, has_host_tier=True)
    sink.on_read_result(changed(read, 1, 2), 0.2)
    assert poll(sink, 0.2)[1] == []
    sink.on_offer(revised(1, 2, revision=2, first=2), PEER_BLOCKS, 0.3, has_host_tier=True)
    [again] = poll(sink, 0.3)[1]
    assert list(again.remote_blocks) == [1, 91, 92]


def test_an_offer_that_was_overtaken_is_not_heard() -> None:
    sink, read = sink_with_read()
    sink.on_offer(revised(0, 1), PEER_BLOCKS, 0.1, has_host_tier=True)
    sink.on_offer(revised(revision=0), PEER_BLOCKS, 0.2, has_host_tier=True)
    sink.on_read_result(changed(read, 0), 0.3)
    [again] = poll(sink, 0.3)[1]
    assert list(again.remote_blocks) == [90, 91, 3]


@pytest.mark.parametrize("bad", [revised(1, revision=0), revised(1, num_blocks=2)], ids=["unnumbered", "shorter"])
def test_offers_that_contradict_each_other_fail_the_handover(bad: Offer) -> None:
    sink, _ = sink_with_read()
    sink.on_offer(bad, PEER_BLOCKS, 0.1, has_host_tier=True)
    assert sink.state is SinkState.FAILED


def test_a_moved_generation_fails_at_once_where_nothing_can_move() -> None:
    for reads_host_tier, has_host_tier in ((False, True), (True, False)):
        sink = make_sink(8, reads_host_tier=reads_host_tier)
        sink.on_offer(
            Offer(KEY, [OfferedSpan(0, 0, blocks(1, 2))], 8, True, [7]), PEER_BLOCKS, 0.0, has_host_tier=has_host_tier
        )
        [read] = poll(sink, 0.0)[1]
        sink.on_read_result(changed(read, 0), 0.1)
        assert sink.state is SinkState.FAILED and sink.may_be_elsewhere


def test_without_another_place_it_fails_in_bounded_time() -> None:
    sink, read = sink_with_read()
    sink.on_read_result(changed(read, 1), 1.0)
    now = 1.0
    while sink.state is SinkState.READING:
        poll(sink, now)
        sink.on_offer(revised(revision=0), PEER_BLOCKS, now, has_host_tier=True)
        assert sink.state is not SinkState.READING or sink.next_deadline() > now
        now += 0.5
    assert now <= 1.5 + CONFIG.dead_after_seconds
    assert "1 of 3 blocks changed" in sink.failure and sink.may_be_elsewhere


class MovingBothSides(BothSides):
    """Once all is offered, blocks move to slots, and their old places are taken at some time. A place's content is
    told by its generation, as real reads tell it: when the generations are read, data has been copied before."""

    def __init__(self, seed: int, num_prompt_tokens: int, loss: float) -> None:
        super().__init__(seed, num_prompt_tokens, 0, loss)
        patient = msgspec.structs.replace(CONFIG, dead_after_seconds=1000.0)
        self.sink = make_sink(num_prompt_tokens, config=patient, reads_host_tier=True)
        self.generations += [self.random.getrandbits(64) for _ in self.remote_ids]  # of slots
        self.contents = {place: number for number, place in enumerate(self.remote_ids)}
        self.landed: dict[int, int | None] = {}  # content of a local block
        self.num_moved = 0

    def deliver(self, message: Grant | OfferAck | Offer) -> None:
        if isinstance(message, Offer):
            self.sink.on_offer(message, [len(self.generations)], self.now, has_host_tier=True)
        else:
            super().deliver(message)

    def compute(self) -> None:
        super().compute()
        source = self.source
        if source is None or source.state is not SourceState.OFFERED:
            return
        on_device = [n for n in range(len(self.remote_ids)) if source.offered_block(n).block_id < NUM_PEER_BLOCKS]
        moving = [number for number in on_device if self.random.random() < 0.2]
        if moving:
            places = {number: NUM_PEER_BLOCKS + number for number in moving}
            self.contents |= {place: number for number, place in places.items()}
            source.move({n: OfferedBlock(p, self.generations[p]) for n, p in places.items()}, self.now)
            self.num_moved += len(moving)
            for number in moving:
                old = self.remote_ids[number]
                if self.random.random() < 0.8:
                    self.generations[old] = (self.generations[old] + 1) & GENERATION_MASK
                    del self.contents[old]

    def end_read(self, command: ReadCommand) -> None:
        for local, remote in zip(command.local_blocks, command.remote_blocks, strict=True):
            self.landed[local] = self.contents.get(remote)
        generations = [self.generations[block_id] for block_id in command.remote_blocks]
        self.sink.on_read_result(ReadResult(command.read_id, None, generations), self.now)


@given(seed=st.integers(0, 2**32), num_prompt_tokens=st.integers(1, 60), loss=st.sampled_from([0.0, 0.2, 0.4]))
@settings(deadline=None, max_examples=150)
def test_blocks_that_move_under_their_reader_cost_time_only(seed: int, num_prompt_tokens: int, loss: float) -> None:
    both = MovingBothSides(seed, num_prompt_tokens, loss)
    for _ in range(2000):
        both.step()
        if both.sink.state is SinkState.COMPLETE:
            break
    assert both.sink.state is SinkState.COMPLETE, both.sink.failure
    assert both.landed == {50 + number: number for number in range(len(both.remote_ids))}
