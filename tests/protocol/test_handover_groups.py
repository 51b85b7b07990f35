"""The two state machines of the hand-over with a cache of a full and a window group."""

import random

import pytest

from both_sides import BLOCK_SIZE, CONFIG, DECODE, KEY, PREFILL, blocks, poll, verified
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.handover.pull import Pull, PullSpan
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.handover.sink import SinkHandover, SinkState
from splitserve.protocol.handover.source import SourceHandover, SourceState
from splitserve.protocol.messages.handover import Grant, Offer, OfferAck, OfferedBlock, OfferedSpan

PEER_BLOCKS = (100, 60)
NUM_TOKENS, TAIL = 18, 3  # five blocks; the window needs the last two


def make_sink(num_tokens: int = NUM_TOKENS, tail: int = TAIL, config: ProtocolConfig = CONFIG) -> SinkHandover:
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    spans = [
        PullSpan(0, list(range(50, 50 + num_blocks)), 1000),
        PullSpan(tail, list(range(10, 10 + num_blocks - tail)), 300),
    ]
    return SinkHandover(KEY, PREFILL, Pull(num_tokens, 0, BLOCK_SIZE, spans), config, 0.0)


def make_source(num_tokens: int = NUM_TOKENS, tail: int = TAIL) -> SourceHandover:
    return SourceHandover(Grant(KEY, num_tokens, 0, 10.0), DECODE, BLOCK_SIZE, CONFIG, 0.0, tails=[tail])


def offer(full: list[int], tail: list[int], num_tokens: int, *, last: bool = False, starts: tuple[int, int]) -> Offer:
    spans = [OfferedSpan(0, starts[0], blocks(*full)), OfferedSpan(1, starts[1], blocks(*tail))]
    return Offer(KEY, spans, num_tokens, last, [7] if last else [])


WHOLE = offer([1, 2, 3, 4, 5], [8, 9], NUM_TOKENS, last=True, starts=(0, TAIL))


def test_the_source_offers_and_hears_of_each_group() -> None:
    source = make_source()
    assert source.poll(0.0) == offer([], [], 0, starts=(0, TAIL))
    source.offer([blocks(1, 2, 3, 4), blocks(8)], 16, 0.1)
    assert source.poll(0.1) == offer([1, 2, 3, 4], [8], 16, starts=(0, TAIL))
    for unfit in ([4], [5, 4], [4, 5], [4, 4, 4]):
        source.acknowledge(OfferAck(KEY, unfit, False))
    assert source.poll(1.0) == offer([1, 2, 3, 4], [8], 16, starts=(0, TAIL)), "acknowledgements of what wasn't offered"
    source.acknowledge(OfferAck(KEY, [4, 3], False))
    assert source.poll(2.0) == offer([], [8], 16, starts=(4, TAIL)), "one group alone is acknowledged"
    source.offer_last([blocks(5), blocks(9)], NUM_TOKENS, [7], 2.1)
    assert source.poll(2.1) == offer([5], [8, 9], NUM_TOKENS, last=True, starts=(4, TAIL))
    source.acknowledge(OfferAck(KEY, [5, 5], True))
    assert source.next_deadline() == source.lease_expires_at


@pytest.mark.parametrize("first_verified", [0, 1])
def test_complete_when_both_groups_are_verified(first_verified: int) -> None:
    sink = make_sink(config=ProtocolConfig(max_blocks_per_read=9, max_reads_in_flight_per_request=2))
    sink.on_offer(WHOLE, PEER_BLOCKS, 0.0)
    messages, reads = poll(sink, 0.0)
    assert OfferAck(KEY, [5, 5], True) in messages
    assert [(r.group, r.local_blocks, r.remote_blocks) for r in reads] == [
        (0, [50, 51, 52, 53, 54], [1, 2, 3, 4, 5]),
        (1, [10, 11], [8, 9]),
    ]
    sink.on_read_result(verified(reads[first_verified]), 0.1)
    assert sink.state is SinkState.READING, "the other group isn't verified"
    assert sink.verified_ends == ([5, 3] if first_verified == 0 else [0, 5])
    sink.on_read_result(verified(reads[1 - first_verified]), 0.2)
    assert sink.state is SinkState.COMPLETE
    assert (sink.statistics.num_blocks, sink.statistics.num_bytes) == (7, 5 * 1000 + 2 * 300)


@pytest.mark.parametrize("group", [0, 1])
def test_it_fails_as_a_whole(group: int) -> None:
    for kind in ("moved", "error"):
        sink = make_sink(config=ProtocolConfig(max_blocks_per_read=9))
        sink.on_offer(WHOLE, PEER_BLOCKS, 0.0)
        reads = poll(sink, 0.0)[1]
        good, bad = reads[1 - group], reads[group]
        sink.on_read_result(verified(good), 0.1)
        moved = [1000 + block_id + (index == 1) for index, block_id in enumerate(bad.remote_blocks)]
        sink.on_read_result(ReadResult(bad.read_id, "reset" if kind == "error" else None, moved), 0.2)
        assert sink.state is SinkState.FAILED
        assert sink.is_verified(0, 1 - group) and not sink.is_verified(0, group)


def test_an_offer_with_a_gap_in_one_group_waits_for_the_one_before() -> None:
    sink = make_sink()
    sink.on_offer(offer([5], [9], NUM_TOKENS, last=True, starts=(4, 4)), PEER_BLOCKS, 0.0)
    sink.on_offer(offer([1, 2, 3, 4, 5], [9], NUM_TOKENS, last=True, starts=(0, 4)), PEER_BLOCKS, 0.1)
    assert sink.state is SinkState.REQUESTED and poll(sink, 0.1)[1] == []
    sink.on_offer(offer([1, 2, 3, 4], [8], 16, starts=(0, TAIL)), PEER_BLOCKS, 0.2)
    sink.on_offer(offer([5], [9], NUM_TOKENS, last=True, starts=(4, 4)), PEER_BLOCKS, 0.3)
    assert sink.last_offer_seen


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (Offer(KEY, WHOLE.spans[:1], NUM_TOKENS, True, [7]), r"groups \[0\]; the cache has 2"),
        (Offer(KEY, WHOLE.spans[::-1], NUM_TOKENS, True, [7]), r"groups \[1, 0\]"),
        (offer([1, 2, 3, 4, 5], [8], NUM_TOKENS, last=True, starts=(0, TAIL)), "at block 4 of group 1, not at 5"),
        (offer([1, 2, 3, 4, 5], [8, 9, 7], NUM_TOKENS, last=True, starts=(0, TAIL)), "names 6 blocks"),
        (offer([1, 2, 3, 4, 5], [8, 60], NUM_TOKENS, last=True, starts=(0, TAIL)), "outside the 60"),
        (offer([1, 2, 3], [8], 12, starts=(0, TAIL)), "4 blocks of group 1, but 3 of the first"),
        (offer([1, 2, 3, 4], [7, 8], 16, starts=(0, TAIL - 1)), "before the granted one, 3"),
    ],
)
def test_an_offer_that_cannot_be_right_fails_the_hand_over(bad: Offer, problem: str) -> None:
    sink = make_sink()
    sink.on_offer(bad, PEER_BLOCKS, 0.0)
    assert sink.state is SinkState.FAILED
    with pytest.raises(ValueError, match=problem):
        raise ValueError(sink.failure)


@pytest.mark.parametrize("loss", [0.0, 0.4])
def test_lost_repeated_and_reordered_messages_cost_time_only(loss: float) -> None:
    for seed in range(40):
        _run(random.Random(seed), loss)


def _run(chosen: random.Random, loss: float) -> None:
    """Drive both sides until decode has everything, and check where each block landed."""
    num_tokens = chosen.randint(1, 60)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    tail = chosen.randint(0, num_blocks - 1)
    remote = [chosen.sample(range(limit), num_blocks) for limit in PEER_BLOCKS]
    source = make_source(num_tokens, tail)
    sink = make_sink(num_tokens, tail, ProtocolConfig(max_blocks_per_read=3, dead_after_seconds=1000.0))
    in_flight: list[tuple[float, Offer | OfferAck]] = []
    landed: list[dict[int, int]] = [{}, {}]
    reads: list[ReadCommand] = []
    for step in range(2000):
        now = step * 0.05
        _compute(chosen, source, remote, num_tokens, now)
        sent: list[object] = [source.poll(now)]
        actions = sink.poll(now, can_read=True, next_read_id=1000 * step)
        reads += actions.reads
        for message in (*sent, *actions.messages):
            if isinstance(message, Offer | OfferAck):
                copies = 0 if chosen.random() < loss else chosen.choice([1, 1, 2])
                in_flight += [(now + chosen.uniform(0, 0.4), message) for _ in range(copies)]
        due = [message for time, message in in_flight if time <= now]
        in_flight = [entry for entry in in_flight if entry[0] > now]
        chosen.shuffle(due)
        for message in due:
            sink.on_offer(message, PEER_BLOCKS, now) if isinstance(message, Offer) else source.acknowledge(message)
        if reads and chosen.random() < 0.5:
            command = reads.pop(chosen.randrange(len(reads)))
            landed[command.group] |= zip(command.local_blocks, command.remote_blocks, strict=True)
            sink.on_read_result(verified(command), now)
        source.renew(now) if step % 100 == 99 else None
        if sink.state is SinkState.COMPLETE:
            break
    assert sink.state is SinkState.COMPLETE, sink.failure
    assert landed[0] == dict(zip(range(50, 200), remote[0], strict=False))
    assert landed[1] == dict(zip(range(10, 200), remote[1][tail:], strict=False))


def _compute(
    chosen: random.Random, source: SourceHandover, remote: list[list[int]], num_tokens: int, now: float
) -> None:
    """Complete a chunk of a random length."""
    if source.state not in (SourceState.GRANTED, SourceState.OFFERING) or chosen.random() < 0.7:
        return
    end = min(source.num_offered_blocks() + chosen.randint(1, 4), len(remote[0]))
    new: list[list[OfferedBlock]] = [
        blocks(*ids[source.num_offered_blocks(group) : end]) for group, ids in enumerate(remote)
    ]
    if end * BLOCK_SIZE < num_tokens:
        source.offer(new, end * BLOCK_SIZE, now)
    else:
        source.offer_last(new, num_tokens, [7], now)
