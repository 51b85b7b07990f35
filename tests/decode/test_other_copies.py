"""Hand-overs whose blocks the peer's device has lost: decode goes on with what it has verified, if that suffices."""

import msgspec
import pytest

from core_driver import DECODE, KEY, NUM_BLOCKS, PREFILL, PROMPT, Worker, decode_request, of, sent
from splitserve.engine.effects import Effect, StartRead
from splitserve.kvconnector.transfer.connector import Link, PeerConnected
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.messages.handover import Offer, OfferedBlock, OfferedSpan, PrefixGrant, Withdrawn
from splitserve.protocol.messages.requests import Introduce, PeerRef, StepTokens, TokenDelta
from splitserve.protocol.request import RequestKey, Role
from splitserve.simulation.model import BLOCK_SIZE, ROUTER
from splitserve.simulation.worker.connector import SimConnector

SIBLING = RequestKey("r0 choice 1")
FULL_BLOCKS = len(PROMPT) // BLOCK_SIZE
FIRST_TOKENS = [3, 5]  # of the request and of its sibling
GENERATION = 100
BLOCKS = [OfferedBlock(block_id, GENERATION) for block_id in range(FULL_BLOCKS + 1)]


def deltas(effects: list[Effect]) -> dict[RequestKey, list[TokenDelta]]:
    """Return the deltas of each request, in the order in which they were sent."""
    found: dict[RequestKey, list[TokenDelta]] = {}
    for body in sent(effects, StepTokens):
        assert isinstance(body, StepTokens)
        for delta in body.deltas:
            found.setdefault(delta.key, []).append(delta)
    return found


def read(decode: Worker, offer: Offer, *, moved: bool) -> list[Effect]:
    """Let prefill offer blocks, and read them; ``moved``: their content has changed by then."""
    (start,) = of(decode.hear(PREFILL, offer), StartRead)
    assert isinstance(start, StartRead)
    generations = [block.generation + moved for block in offer.spans[0].blocks]
    return decode.event(ReadResult(start.command.read_id, None, generations))


def make_decode() -> Worker:
    """A decode worker that is connected to a prefill worker with a host tier."""
    decode = Worker(Role.DECODE, DECODE, num_slots=8)
    decode.hear(ROUTER, Introduce(PeerRef(PREFILL, "tcp://prefill-0")))
    decode.hear(PREFILL, SimConnector(PREFILL, NUM_BLOCKS, num_slots=8).welcome())
    decode.event(PeerConnected(PREFILL, None, Link("sim", 1e9)))
    return decode


def lose_the_last_block(decode: Worker, last: Offer) -> dict[RequestKey, list[TokenDelta]]:
    """Offer the full blocks, then the last one, which is lost before it is read; return what the request gets."""
    full = Offer(KEY, [OfferedSpan(0, 0, BLOCKS[:FULL_BLOCKS])], FULL_BLOCKS * BLOCK_SIZE)
    read(decode, full, moved=False)
    effects = read(decode, last, moved=True)
    effects += decode.hear(PREFILL, Withdrawn(KEY, "the lease expired"))
    assert not sent(effects, PrefixGrant), "the peer has nothing to give"
    return deltas(effects + decode.run())


@pytest.mark.parametrize("siblings", [[], [SIBLING]], ids=["alone", "with a sibling"])
def test_only_the_partial_last_block_was_lost(siblings: list[RequestKey]) -> None:
    """No tier has it, and all others are verified: decode computes its tokens, and delivers the first token itself."""
    decode = make_decode()
    decode.hear(ROUTER, msgspec.structs.replace(decode_request(), siblings=siblings))
    spans = [OfferedSpan(0, FULL_BLOCKS, BLOCKS[FULL_BLOCKS:])]
    found = lose_the_last_block(decode, Offer(KEY, spans, len(PROMPT), True, FIRST_TOKENS[: 1 + len(siblings)]))
    assert list(found) == [KEY, *siblings]
    for key, first_token in zip(found, FIRST_TOKENS, strict=False):
        assert [delta.position for delta in found[key]] == list(range(5)), "each position once, from the first on"
        assert found[key][0].token_ids == [first_token], "as prefill offered it"
        report = found[key][0].handover
        assert report is not None and (report.blocks, report.cached_tokens) == (0, FULL_BLOCKS * BLOCK_SIZE)
    load = decode.core.load()
    assert (load.handovers, load.other_copies, load.handover_failures) == (1, 1, 0)
    decode.assert_idle()


def test_only_the_block_with_the_first_token_was_lost() -> None:
    """Prefill has drawn two tokens: decode computes the KV of the first one, too."""
    decode = make_decode()
    decode.hear(ROUTER, decode_request())
    spans = [OfferedSpan(0, FULL_BLOCKS, BLOCKS[FULL_BLOCKS:])]
    found = lose_the_last_block(decode, Offer(KEY, spans, len(PROMPT) + 1, True, [3], second_token=4))
    assert [(delta.position, delta.token_ids) for delta in found[KEY]][:2] == [(0, [3, 4]), (2, [3])]
    assert [delta.position for delta in found[KEY]] == [0, 2, 3, 4]
    assert decode.core.load().other_copies == 1
    decode.assert_idle()
