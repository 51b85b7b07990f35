"""The two state machines of the hand-over, alone and against each other over a bad network."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from both_sides import (
    BLOCK_SIZE,
    CONFIG,
    DECODE,
    KEY,
    NUM_PEER_BLOCKS,
    PEER_BLOCKS,
    PREFILL,
    BothSides,
    blocks,
    make_sink,
    poll,
    verified,
)
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.handover.sink import SinkState
from splitserve.protocol.handover.source import SourceHandover, SourceState
from splitserve.protocol.messages.handover import Grant, Offer, OfferAck, OfferedBlock, OfferedSpan


def make_grant(num_prompt_tokens: int = 18, num_cached_tokens: int = 0, lease_seconds: float = 10.0) -> Grant:
    return Grant(KEY, num_prompt_tokens, num_cached_tokens, lease_seconds)


def make_source(grant: Grant | None = None) -> SourceHandover:
    return SourceHandover(grant or make_grant(), DECODE, BLOCK_SIZE, CONFIG, now=0.0)


def offer(first_block: int, block_ids: list[int], num_tokens: int, *, last: bool = False) -> Offer:
    return Offer(KEY, [OfferedSpan(0, first_block, blocks(*block_ids))], num_tokens, last, [7] if last else [])


class TestSource:
    def test_answers_its_grant_at_once_with_nothing(self) -> None:
        source = make_source()
        assert source.poll(0.0) == Offer(KEY, [OfferedSpan(0, 0, [])], 0)
        assert source.poll(0.1) is None
        assert source.next_deadline() == 10.0, "nothing is due before the lease's end"

    def test_offers_are_cumulative_above_what_was_acknowledged(self) -> None:
        source = make_source()
        source.offer([blocks(1, 2)], 8, now=1.0)
        assert source.poll(1.0) == offer(0, [1, 2], 8)
        source.offer([blocks(3)], 12, now=1.1)
        assert source.poll(1.1) == offer(0, [1, 2, 3], 12)
        source.acknowledge(OfferAck(KEY, [2], False))
        source.offer_last([blocks(4, 5)], 18, [7], now=1.2)
        assert source.poll(1.2) == offer(2, [3, 4, 5], 18, last=True)
        assert source.state is SourceState.OFFERED

    def test_sends_again_until_acknowledged(self) -> None:
        source = make_source()
        source.offer([blocks(1)], 4, now=0.0)
        due = 0.0
        for _ in range(3):
            assert source.poll(due) == offer(0, [1], 4)
            assert source.poll(due + 0.01) is None
            due = source.next_deadline()
        source.acknowledge(OfferAck(KEY, [1], False))
        assert source.next_deadline() == source.lease_expires_at

    def test_the_last_offer_is_sent_again_until_it_is_acknowledged_as_the_last(self) -> None:
        source = make_source(make_grant(num_prompt_tokens=8))
        source.offer([blocks(1, 2)], 8, now=0.0)
        source.acknowledge(OfferAck(KEY, [2], False))
        source.offer_last([[]], 8, [7], now=0.1)
        assert source.poll(0.1) == Offer(KEY, [OfferedSpan(0, 2, [])], 8, True, [7])
        source.acknowledge(OfferAck(KEY, [2], False))  # of the offer before
        due = source.next_deadline()
        assert due < 1.0
        assert source.poll(due) == Offer(KEY, [OfferedSpan(0, 2, [])], 8, True, [7])
        source.acknowledge(OfferAck(KEY, [2], True))
        assert source.next_deadline() == source.lease_expires_at

    def test_acknowledgements_out_of_order_or_of_what_was_never_offered_change_nothing(self) -> None:
        source = make_source()
        source.offer([blocks(1, 2, 3)], 12, now=0.0)
        source.acknowledge(OfferAck(KEY, [2], False))
        source.acknowledge(OfferAck(KEY, [1], False))
        source.acknowledge(OfferAck(KEY, [9], True))
        assert source.poll(0.0) == offer(2, [3], 12)

    def test_starts_behind_what_decode_has_cached(self) -> None:
        source = make_source(make_grant(num_cached_tokens=8))
        assert source.num_offered_blocks() == 2
        assert source.poll(0.0) == Offer(KEY, [OfferedSpan(0, 2, [])], 8)
        source.offer_last([blocks(1, 2, 3)], 18, [7], now=0.1)
        assert source.poll(0.1) == offer(2, [1, 2, 3], 18, last=True)

    def test_a_repeated_grant_renews_the_lease_and_is_answered(self) -> None:
        source = make_source()
        source.poll(0.0)
        source.renew(now=8.0)
        assert source.poll(8.0) == Offer(KEY, [OfferedSpan(0, 0, [])], 0)
        assert source.poll(17.9) is None and source.state is SourceState.GRANTED
        assert source.poll(18.0) is None
        assert source.state is SourceState.RELEASED and source.release_reason == "lease expired"
        assert source.next_deadline() == float("inf")

    def test_withdrawn_it_offers_nothing_but_keeps_its_lease(self) -> None:
        source = make_source()
        source.offer([blocks(1)], 4, now=0.0)
        source.withdraw("aborted", attempt_over=True)
        assert source.poll(0.0) is None
        assert source.next_deadline() == 10.0
        source.poll(10.0)
        assert source.state is SourceState.RELEASED

    def test_released_it_is_quiet(self) -> None:
        source = make_source()
        source.release("complete")
        assert source.poll(0.0) is None and source.next_deadline() == float("inf")

    def test_only_the_last_offer_may_end_inside_a_block(self) -> None:
        with pytest.raises(AssertionError, match="only the last"):
            make_source().offer([blocks(1)], 3, now=0.0)


class TestSink:
    def test_ordinary_flow_with_a_partial_last_block(self) -> None:
        sink = make_sink(18)
        assert poll(sink, 0.0) == ([Grant(KEY, 18, 0, CONFIG.lease_seconds)], [])
        sink.on_offer(offer(0, [1, 2], 8), PEER_BLOCKS, 0.1)
        messages, (first,) = poll(sink, 0.1)
        assert messages == [OfferAck(KEY, [2], False)]
        assert (first.local_blocks, first.remote_blocks, first.peer) == ([50, 51], [1, 2], PREFILL)
        sink.on_read_result(verified(first), 0.2)
        assert sink.num_verified_blocks == 2
        sink.on_offer(offer(2, [3, 4, 5], 18, last=True), PEER_BLOCKS, 0.3)
        messages, (second,) = poll(sink, 0.3)
        assert messages == [OfferAck(KEY, [5], True)]
        assert (second.local_blocks, second.remote_blocks) == ([52, 53, 54], [3, 4, 5])
        assert sink.state is SinkState.READING
        sink.on_read_result(verified(second), 0.5)
        assert sink.state is SinkState.COMPLETE and sink.first_tokens == [7]
        assert (sink.statistics.num_reads, sink.statistics.num_blocks) == (2, 5)
        assert (sink.statistics.first_read_at, sink.statistics.last_offer_at, sink.statistics.complete_at) == (
            0.1,
            0.3,
            0.5,
        )
        assert poll(sink, 100.0) == ([], []) and sink.next_deadline() == float("inf")

    def test_all_blocks_can_be_verified_before_the_last_offer(self) -> None:
        sink = make_sink(8)
        sink.on_offer(offer(0, [1, 2], 8), PEER_BLOCKS, 0.0)
        _, (read,) = poll(sink, 0.0)
        sink.on_read_result(verified(read), 0.1)
        assert sink.state is SinkState.READING, "the first token isn't here"
        sink.on_offer(offer(2, [], 8, last=True), PEER_BLOCKS, 0.2)
        assert sink.state is SinkState.COMPLETE

    def test_offers_repeated_reordered_or_after_a_gap(self) -> None:
        sink = make_sink(18)
        sink.on_offer(offer(2, [3], 12), PEER_BLOCKS, 0.0)  # the first one was lost
        assert sink.state is SinkState.REQUESTED
        sink.on_offer(offer(0, [1, 2, 3], 12), PEER_BLOCKS, 0.1)
        sink.on_offer(offer(0, [1, 2], 8), PEER_BLOCKS, 0.2)  # late
        sink.on_offer(offer(1, [2, 3], 12), PEER_BLOCKS, 0.2)
        messages, reads = poll(sink, 0.2)
        assert OfferAck(KEY, [3], False) in messages
        assert [read.remote_blocks for read in reads] == [[1, 2, 3]], "each block is read once"
        sink.on_offer(offer(0, [1, 2, 3], 12), PEER_BLOCKS, 0.3)
        messages, reads = poll(sink, 0.3)
        assert (messages, reads) == ([OfferAck(KEY, [3], False)], []), "a repeated offer is acknowledged again"

    def test_reads_are_bounded_in_size_and_number_and_wait_for_the_peer(self) -> None:
        sink = make_sink(32)
        sink.on_offer(offer(0, list(range(8)), 32, last=True), PEER_BLOCKS, 0.0)
        assert poll(sink, 0.0, can_read=False)[1] == []
        _, reads = poll(sink, 0.1)
        assert [list(read.remote_blocks) for read in reads] == [[0, 1, 2], [3, 4, 5]]
        assert len({read.read_id for read in reads}) == 2
        assert poll(sink, 0.2)[1] == []
        sink.on_read_result(verified(reads[1]), 0.3)  # the later one ends first
        assert sink.num_verified_blocks == 0, "there's a gap before it"
        (third,) = poll(sink, 0.3)[1]
        assert list(third.remote_blocks) == [6, 7]
        sink.on_read_result(verified(reads[0]), 0.4)
        assert sink.num_verified_blocks == 6
        sink.on_read_result(verified(third), 0.5)
        assert sink.state is SinkState.COMPLETE

    @pytest.mark.parametrize(
        ("bad", "problem"),
        [
            (offer(1, [2], 8), "before the granted one"),
            (offer(2, [NUM_PEER_BLOCKS], 12), "outside the 100"),
            (offer(2, [-1], 12), "outside the 100"),
            (offer(2, [3], 11), "hold 12 tokens"),
            (offer(2, [3], 16), "hold 12 tokens"),
            (offer(2, [3, 4, 5], 20), "hold 20 tokens, but"),
            (offer(2, [3, 4, 5, 6, 7], 28), "names 7 blocks"),
            (offer(2, [3, 4, 5, 6], 18, last=True), "names 6 blocks"),
            (offer(2, [3], 12, last=True), "covers 12 of 18"),
            (offer(2, [3, 4], 18, last=True), "hold 16 tokens"),
            (Offer(KEY, [OfferedSpan(0, 2, blocks(3, 4, 5))], 18, True, []), "lacks the first token"),
        ],
    )
    def test_an_offer_that_cannot_be_right_fails_the_handover(self, bad: Offer, problem: str) -> None:
        sink = make_sink(18, num_cached_tokens=8)
        sink.on_offer(bad, PEER_BLOCKS, 0.0)
        assert sink.state is SinkState.FAILED and problem in sink.failure
        assert poll(sink, 0.1) == ([], [])

    def test_a_contradicted_offer_fails_the_handover(self) -> None:
        for changed in (OfferedBlock(2, 5), OfferedBlock(9, 1002)):
            sink = make_sink(18)
            sink.on_offer(offer(0, [1, 2], 8), PEER_BLOCKS, 0.0)
            sink.on_offer(Offer(KEY, [OfferedSpan(0, 1, [changed, OfferedBlock(3, 1003)])], 12), PEER_BLOCKS, 0.1)
            assert sink.state is SinkState.FAILED and "contradicts" in sink.failure

    def test_a_generation_that_moved_fails_the_handover(self) -> None:
        sink = make_sink(8)
        sink.on_offer(offer(0, [1, 2], 8, last=True), PEER_BLOCKS, 0.0)
        (read,) = poll(sink, 0.0)[1]
        sink.on_read_result(ReadResult(read.read_id, None, [1001, 1003]), 0.1)
        assert sink.state is SinkState.FAILED and "1 of 2 blocks changed" in sink.failure
        assert sink.num_verified_blocks == 0

    def test_too_few_generations_fail_the_handover(self) -> None:
        sink = make_sink(8)
        sink.on_offer(offer(0, [1, 2], 8, last=True), PEER_BLOCKS, 0.0)
        (read,) = poll(sink, 0.0)[1]
        sink.on_read_result(ReadResult(read.read_id, None, [1001]), 0.1)
        assert sink.state is SinkState.FAILED

    def test_a_read_error_fails_the_handover_and_other_reads_stay_in_flight(self) -> None:
        sink = make_sink(24)
        sink.on_offer(offer(0, [1, 2, 3, 4, 5, 6], 24, last=True), PEER_BLOCKS, 0.0)
        one, two = poll(sink, 0.0)[1]
        sink.on_read_result(ReadResult(one.read_id, "remote disconnected"), 0.1)
        assert sink.state is SinkState.FAILED and "remote disconnected" in sink.failure
        assert list(sink.reads_in_flight) == [two.read_id]
        assert list(sink.reads_in_flight[two.read_id].local_blocks) == [53, 54, 55]
        sink.on_read_result(verified(two), 0.2)
        assert sink.reads_in_flight == {} and sink.state is SinkState.FAILED

    def test_a_read_misses_its_deadline(self) -> None:
        sink = make_sink(8)
        sink.on_offer(offer(0, [1, 2], 8, last=True), PEER_BLOCKS, 0.0)
        (read,) = poll(sink, 0.0)[1]
        deadline = sink.reads_in_flight[read.read_id].deadline
        assert deadline == CONFIG.read_deadline_seconds + 2000 / CONFIG.min_read_bytes_per_second
        poll(sink, deadline - 0.001)
        assert sink.state is SinkState.READING
        poll(sink, deadline)
        assert sink.state is SinkState.FAILED and sink.read_was_overdue
        assert list(sink.reads_in_flight) == [read.read_id], "it may still write"

    def test_silence_fails_the_handover(self) -> None:
        sink = make_sink()
        poll(sink, CONFIG.dead_after_seconds - 0.01)
        assert sink.state is SinkState.REQUESTED
        poll(sink, CONFIG.dead_after_seconds)
        assert sink.state is SinkState.FAILED and "silent" in sink.failure

    def test_whoever_answers_renewals_is_not_silent(self) -> None:
        sink = make_sink()
        for second in range(30):
            poll(sink, float(second))
            sink.on_offer(Offer(KEY, [OfferedSpan(0, 0, [])], 0), PEER_BLOCKS, float(second))
        assert sink.state is SinkState.READING

    def test_the_lease_is_renewed_until_the_end(self) -> None:
        sink = make_sink(8)
        sink.on_offer(offer(0, [1, 2], 8, last=True), PEER_BLOCKS, 0.0)
        grants = [m for tick in range(20) for m in poll(sink, tick * 0.25)[0] if isinstance(m, Grant)]
        assert len(grants) == 3, "at 0, 2 and 4 s"

    def test_nothing_is_due_in_the_past(self) -> None:
        """A deadline that stays in the past would make the engine loop spin."""
        sink = make_sink(8, config=ProtocolConfig(read_deadline_seconds=60.0))
        sink.on_offer(offer(0, [1, 2], 8, last=True), PEER_BLOCKS, 0.0)
        now = 0.0
        while now < 50.0:
            poll(sink, now)
            assert sink.next_deadline() > now
            now = sink.next_deadline()
        assert sink.state is SinkState.READING

    def test_closed_it_is_quiet_but_knows_its_reads(self) -> None:
        sink = make_sink(8)
        sink.on_offer(offer(0, [1, 2], 8, last=True), PEER_BLOCKS, 0.0)
        (read,) = poll(sink, 0.0)[1]
        sink.close()
        sink.fail("too late")
        assert sink.state is SinkState.CLOSED and list(sink.reads_in_flight) == [read.read_id]
        assert poll(sink, 100.0) == ([], []) and sink.next_deadline() == float("inf")


@given(
    seed=st.integers(0, 2**32),
    num_prompt_tokens=st.integers(1, 60),
    cached_share=st.floats(0, 1),
    loss=st.sampled_from([0.0, 0.2, 0.4]),
)
@settings(max_examples=150)
def test_lost_repeated_and_reordered_messages_cost_time_only(
    seed: int, num_prompt_tokens: int, cached_share: float, loss: float
) -> None:
    num_cached = int(cached_share * (num_prompt_tokens - 1)) // BLOCK_SIZE * BLOCK_SIZE
    both = BothSides(seed, num_prompt_tokens, num_cached, loss)
    both.sink._config = ProtocolConfig(**{**_as_dict(CONFIG), "dead_after_seconds": 1000.0})
    for _ in range(2000):
        both.step()
        if both.sink.state is SinkState.COMPLETE:
            break
    assert both.sink.state is SinkState.COMPLETE, both.sink.failure
    assert both.sink.first_tokens == [7]
    first_block = num_cached // BLOCK_SIZE
    expected = dict(zip(range(50, 200), both.remote_ids[first_block:], strict=False))
    assert both.read_blocks == expected, "each block lands where it belongs"


def _as_dict(config: ProtocolConfig) -> dict[str, float]:
    return {name: getattr(config, name) for name in config.__struct_fields__}
