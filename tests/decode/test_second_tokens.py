"""Hand-overs with two tokens, as decode takes them: the second one was drawn at prefill."""

import numpy as np
import pytest

from core_driver import DECODE, KEY, NUM_BLOCKS, PREFILL, Worker, of, sent
from splitserve.engine.effects import Effect, StartRead
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.messages.handover import Offer, OfferedBlock, OfferedSpan, Release, Withdrawn
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.messages.requests import DecodeRequest, Introduce, PeerRef, RequestFailed, StepTokens
from splitserve.protocol.request import RequestKey, Role, SamplingParams
from splitserve.simulation.model import BLOCK_SIZE, ROUTER, VOCAB
from splitserve.simulation.worker.connector import SimConnector

PEER = PeerRef(PREFILL, f"tcp://{PREFILL.engine_id}")


@pytest.fixture
def decode() -> Worker:
    worker = Worker(Role.DECODE, DECODE)
    worker.hear(ROUTER, Introduce(PEER))
    worker.hear(PREFILL, SimConnector(PREFILL, NUM_BLOCKS).welcome())
    worker.event(PeerConnected(PREFILL, None))
    return worker


def offer(num_tokens: int, *, num_blocks: int | None = None, second: int | None = 4, last: bool = True) -> Offer:
    """The offer of a prompt's KV, with that of its first token if there is a second one."""
    count = -(-num_tokens // BLOCK_SIZE) if num_blocks is None else num_blocks
    blocks = [OfferedBlock(block_id, 100 + block_id) for block_id in range(count)]
    return Offer(KEY, [OfferedSpan(0, 0, blocks)], num_tokens, last, [3] if last else [], second_token=second)


def ask(decode: Worker, num_tokens: int, *, max_tokens: int = 5, siblings: int = 0) -> None:
    sampling, keys = SamplingParams(max_tokens=max_tokens), [RequestKey(f"s{number}", 0) for number in range(siblings)]
    decode.hear(ROUTER, DecodeRequest(KEY, list(range(num_tokens)), sampling, PEER, 60.0, siblings=keys))


def end_reads(decode: Worker, effects: list[Effect]) -> list[Effect]:
    """Verify what the reads among these effects, and those that follow, have read."""
    seen = []
    while starts := of(effects, StartRead):
        effects = []
        for start in starts:
            assert isinstance(start, StartRead)
            generations = [100 + block_id for block_id in start.command.remote_blocks]
            effects += decode.event(ReadResult(start.command.read_id, None, generations))
        seen += effects
    return seen


def tokens(effects: list[Effect]) -> list[tuple[int, list[int]]]:
    bodies = [body for body in sent(effects, StepTokens) if isinstance(body, StepTokens)]
    return [(delta.position, delta.token_ids) for body in bodies for delta in body.deltas]


@pytest.mark.parametrize("num_tokens", range(2 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE))
def test_decode_goes_on_after_the_second_token_and_computes_none_again(decode: Worker, num_tokens: int) -> None:
    ask(decode, num_tokens)
    effects = end_reads(decode, decode.hear(PREFILL, offer(num_tokens + 1)))
    assert tokens(effects) == [(0, [3, 4])]
    assert [body.complete for body in sent(effects, Release) if isinstance(body, Release)] == [True]
    plan = decode.plan()
    assert plan is not None
    assert [(chunk.start, chunk.token_ids) for chunk in plan.chunks] == [(num_tokens + 1, [4])]
    assert tokens(decode.commit(plan, token=5)) == [(2, [5])]
    assert [position for position, _ in tokens(decode.run())] == [3, 4]
    decode.assert_idle()


def test_the_reads_begin_before_the_last_offer(decode: Worker) -> None:
    ask(decode, 2 * BLOCK_SIZE)
    early = decode.hear(PREFILL, offer(2 * BLOCK_SIZE, last=False, second=None))
    assert len(of(early, StartRead)) == 1 and end_reads(decode, early) == []
    effects = end_reads(decode, decode.hear(PREFILL, offer(2 * BLOCK_SIZE + 1)))
    assert tokens(effects) == [(0, [3, 4])]


def test_the_log_probabilities_of_both_are_told(decode: Worker) -> None:
    ask(decode, 10)
    both = Logprobs.of(np.array([[-1.0], [-2.0]], dtype=np.float32), np.zeros((2, 0), dtype=np.int32))
    full = offer(11)
    named = Offer(KEY, full.spans, 11, True, [3], first_logprobs=[both], second_token=4)
    effects = end_reads(decode, decode.hear(PREFILL, named))
    [told] = [delta for body in sent(effects, StepTokens) for delta in body.deltas]  # type: ignore[attr-defined]
    assert told.logprobs == both


def test_an_attempt_that_ended_with_the_second_token_ends_here(decode: Worker) -> None:
    ask(decode, 10, max_tokens=2)
    decode.hear(PREFILL, offer(8, last=False, second=None))
    assert sent(decode.hear(PREFILL, Withdrawn(KEY, "finished: length", attempt_over=True)), RequestFailed) == []
    assert decode.core.load().requests_tracked == 0


ONE_ROW = Logprobs.of(np.zeros((1, 1), dtype=np.float32), np.zeros((1, 0), dtype=np.int32))


@pytest.mark.parametrize(
    ("wrong", "options", "reason"),
    [
        (offer(11, second=VOCAB), {}, "a token outside the vocabulary"),
        (offer(10), {}, "covers 10 of 11 tokens"),
        (offer(11, second=None), {}, "covers 11 of 10 tokens"),
        (offer(11, num_blocks=4), {}, "names 4 blocks"),
        (offer(8, last=False), {}, "isn't the last one"),
        (offer(11), {"siblings": 1}, "a second token"),
        (offer(11), {"max_tokens": 2}, "a second token"),
        (Offer(KEY, offer(11).spans, 11, True, [3, 5], second_token=4), {}, "a prompt with one choice"),
        (Offer(KEY, offer(11).spans, 11, True, [3], 0, [ONE_ROW], 4), {}, "aren't those of two tokens"),
    ],
)
def test_an_offer_that_can_not_be_right_fails_its_request_alone(
    decode: Worker, wrong: Offer, options: dict[str, int], reason: str
) -> None:
    ask(decode, 10, **options)
    failures = [body for body in sent(decode.hear(PREFILL, wrong), RequestFailed) if isinstance(body, RequestFailed)]
    assert failures and reason in failures[0].message
    decode.assert_idle()
