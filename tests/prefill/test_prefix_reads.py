"""A prefill worker that reads the prefix of a prompt from a peer, here from the decode worker that it computes for."""

from collections.abc import Callable

import msgspec
import pytest

from core_driver import DECODE, KEY, NUM_BLOCKS, PREFILL, Worker, decode_request, grant, of, prefill_request, sent
from splitserve.engine.effects import Connect, Dial, Effect, StartRead
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.kvconnector.transfer.connector import Link, PeerConnected
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.messages.handover import (
    Grant,
    Offer,
    OfferedBlock,
    OfferedSpan,
    PeerRefused,
    PrefixGrant,
    Release,
    Withdrawn,
)
from splitserve.protocol.messages.requests import Abort, Introduce, PeerRef, PrefillRequest, RequestFailed
from splitserve.protocol.request import Party, RequestKey, Role
from splitserve.simulation.model import BLOCK_SIZE, PROTOCOL, ROUTER
from splitserve.simulation.worker.connector import SimConnector

SOURCE = PeerRef(DECODE, "tcp://decode-0")
OTHER = RequestKey("r1")


def reading_request(key: RequestKey = KEY, source: PeerRef = SOURCE) -> PrefillRequest:
    return msgspec.structs.replace(prefill_request(key), prefix=source)


@pytest.fixture
def prefill() -> Worker:
    """A worker that is connected to its source."""
    worker = Worker(Role.PREFILL, PREFILL)
    worker.hear(ROUTER, Introduce(SOURCE))
    assert of(worker.hear(DECODE, SimConnector(DECODE, NUM_BLOCKS).welcome()), Connect)
    worker.event(PeerConnected(DECODE, None, Link("sim", 1e9)))
    return worker


def ask(prefill: Worker, key: RequestKey = KEY) -> list[Effect]:
    prefill.hear(DECODE, grant(key))
    return prefill.hear(ROUTER, reading_request(key))


def begin_read(prefill: Worker) -> ReadCommand:
    ask(prefill)
    blocks = [OfferedBlock(block_id, 100 + block_id) for block_id in range(2)]
    (start,) = of(prefill.hear(DECODE, Offer(KEY, [OfferedSpan(0, 0, blocks)], 8, True)), StartRead)
    assert isinstance(start, StartRead)
    return start.command


def verified(command: ReadCommand) -> ReadResult:
    return ReadResult(command.read_id, None, [100 + block_id for block_id in command.remote_blocks])


def first_position(prefill: Worker) -> int:
    plan = prefill.plan()
    assert plan is not None, "the prompt isn't computed"
    return plan.chunks[0].start


def test_it_reads_the_prefix_and_computes_the_rest(prefill: Worker) -> None:
    (asked,) = sent(ask(prefill), PrefixGrant)
    assert isinstance(asked, PrefixGrant) and (asked.first_block, len(asked.hashes)) == (0, 2)
    assert prefill.plan() is None, "its prefix comes first"
    blocks = [OfferedBlock(block_id, 100 + block_id) for block_id in range(2)]
    (start,) = of(prefill.hear(DECODE, Offer(KEY, [OfferedSpan(0, 0, blocks)], 8, True)), StartRead)
    assert isinstance(start, StartRead)
    effects = prefill.event(verified(start.command))
    assert sent(effects, Release) == [Release(KEY, True)]
    plan = prefill.plan()
    assert plan is not None and plan.chunks[0].start == 2 * BLOCK_SIZE
    (offer,) = sent(prefill.commit(plan), Offer)
    assert isinstance(offer, Offer) and offer.last and len(offer.spans[0].blocks) == 3
    load, (link,) = prefill.core.load(), prefill.core.links()
    assert (load.peer_prefixes, load.peer_prefix_blocks, link.prefix_blocks) == (1, 2, 2)
    assert load.prefix_hit_tokens == 2 * BLOCK_SIZE and load.prompt_tokens == 2
    prefill.hear(DECODE, Release(KEY, True))
    prefill.assert_idle()


def test_a_prompt_does_not_wait_for_a_connection() -> None:
    prefill = Worker(Role.PREFILL, PREFILL)
    prefill.hear(DECODE, grant())
    effects = prefill.hear(ROUTER, reading_request())
    assert of(effects, Dial), "it is made for those after it"
    assert first_position(prefill) == 0


def test_a_source_that_refuses_is_greeted_once_per_prompt() -> None:
    prefill = Worker(Role.PREFILL, PREFILL)
    ask(prefill)
    for _ in range(3):
        prefill.hear(DECODE, PeerRefused("it differs"))
        prefill.tick()
    assert first_position(prefill) == 0


def test_no_worker_reads_from_itself(prefill: Worker) -> None:
    prefill.hear(DECODE, grant())
    effects = prefill.hear(ROUTER, reading_request(source=PeerRef(PREFILL, "tcp://prefill-0")))
    assert not of(effects, Dial) and first_position(prefill) == 0


def lost(prefill: Worker, command: ReadCommand) -> list[Effect]:
    return prefill.event(ReadResult(command.read_id, "reset by peer"))


def overwritten(prefill: Worker, command: ReadCommand) -> list[Effect]:
    return prefill.event(ReadResult(command.read_id, None, [7] * len(command.remote_blocks)))


def other_bytes(prefill: Worker, command: ReadCommand) -> list[Effect]:
    """Digests that the source doesn't have: only one side was started with --verify-kv."""
    generations = [100 + block_id for block_id in command.remote_blocks]
    return prefill.event(ReadResult(command.read_id, None, generations, digests=[b"?" * 16] * len(generations)))


def withdrawn(prefill: Worker, command: ReadCommand) -> list[Effect]:
    return prefill.hear(DECODE, Withdrawn(KEY, "the lease expired")) + prefill.event(verified(command))


@pytest.mark.parametrize("fate", [lost, overwritten, other_bytes, withdrawn])
def test_a_read_that_fails_is_computed(prefill: Worker, fate: Callable[[Worker, ReadCommand], list[Effect]]) -> None:
    effects = fate(prefill, begin_read(prefill))
    assert sent(effects, Release) == [Release(KEY, False)]
    assert sent(effects, RequestFailed) == []
    assert first_position(prefill) == 0
    assert prefill.core.load().peer_prefix_failures == 1
    assert prefill.core.load().handover_failures == 0


def test_a_source_that_has_nothing_counts_as_a_miss(prefill: Worker) -> None:
    ask(prefill)
    prefill.hear(DECODE, Withdrawn(KEY, "nothing of the prefix is here"))
    assert first_position(prefill) == 0
    assert (prefill.core.load().peer_prefix_misses, prefill.core.load().peer_prefix_failures) == (1, 0)


def test_a_source_that_is_silent_costs_time_only(prefill: Worker) -> None:
    ask(prefill)
    for _ in range(4):  # decode lives, and renews the hand-over's lease
        prefill.wait(PROTOCOL.dead_after_seconds / 4)
        prefill.hear(DECODE, grant())
    prefill.tick(0.01)
    assert first_position(prefill) == 0


@pytest.mark.parametrize("end", ["released", "aborted", "lease"])
def test_an_end_during_the_read_keeps_its_blocks_until_that_is_over(prefill: Worker, end: str) -> None:
    command = begin_read(prefill)
    if end == "released":
        effects = prefill.hear(DECODE, Release(KEY, False))
    elif end == "aborted":
        effects = prefill.hear(ROUTER, Abort(KEY))
    else:
        effects = prefill.wait(PROTOCOL.lease_seconds + 0.2)
    assert Release(KEY, False) in sent(effects, Release)
    pool = prefill.core.state.blocks.pool
    is_cut = end == "lease"  # the read missed its deadline before: the connection to the source was given up
    assert pool.count(BlockState.QUARANTINED) == (0 if is_cut and not prefill.core.links() else 2)
    assert pool.count(BlockState.REFERENCED) == 0 or is_cut
    prefill.event(verified(command))
    if is_cut:
        return
    prefill.assert_idle()
    prefill.hear(DECODE, grant(OTHER))
    prefill.hear(ROUTER, prefill_request(OTHER))
    assert first_position(prefill) == 0, "what an unfinished read left isn't trusted"


def test_prompts_that_read_leave_room_for_those_before_them() -> None:
    prefill = Worker(Role.PREFILL, PREFILL, num_blocks=5)
    prefill.hear(ROUTER, Introduce(SOURCE))
    prefill.hear(DECODE, SimConnector(DECODE, NUM_BLOCKS).welcome())
    prefill.event(PeerConnected(DECODE, None))
    prefill.hear(DECODE, grant(OTHER))
    prefill.hear(ROUTER, prefill_request(OTHER))
    assert sent(ask(prefill), PrefixGrant) == [], "there is room for the first one alone"
    plan = prefill.plan()
    assert plan is not None
    prefill.commit(plan)


def test_a_decode_worker_is_source_and_sink_of_the_same_request() -> None:
    """It lends the prefix that prefill reads, pulls the rest, and each ends alone."""
    decode, reader = Worker(Role.DECODE, DECODE), Party("prefill-0", 11)
    decode.hear(ROUTER, Introduce(PeerRef(PREFILL, "tcp://prefill-0")))
    decode.hear(PREFILL, SimConnector(PREFILL, NUM_BLOCKS).welcome())
    decode.event(PeerConnected(PREFILL, None))
    decode.hear(ROUTER, decode_request(OTHER))
    blocks = [OfferedBlock(block_id, 100 + block_id) for block_id in range(3)]
    (start,) = of(decode.hear(PREFILL, Offer(OTHER, [OfferedSpan(0, 0, blocks)], 10, True, [3])), StartRead)
    assert isinstance(start, StartRead)
    decode.event(verified(start.command))
    decode.run()
    hashes = decode.core.state.blocks.pool.hashes()
    (granted,) = sent(decode.hear(ROUTER, decode_request()), Grant)
    assert isinstance(granted, Grant) and granted.num_cached_tokens == 2 * BLOCK_SIZE
    chain = [block_hash for block_hash in hashes if decode.core.state.blocks.pool.find(block_hash) is not None]
    offers = sent(decode.hear(reader, PrefixGrant(KEY, 0, chain[:1], PROTOCOL.lease_seconds)), Offer)
    assert offers and not sent(decode.hear(reader, Release(KEY, True)), Withdrawn)
    tail = [OfferedBlock(9, 109)]
    (start,) = of(decode.hear(PREFILL, Offer(KEY, [OfferedSpan(0, 2, tail)], 10, True, [3])), StartRead)
    assert isinstance(start, StartRead)
    assert sent(decode.event(verified(start.command)), Release) == [Release(KEY, True)]
