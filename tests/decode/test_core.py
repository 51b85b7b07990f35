"""Races in a decode worker: broken reads, lost peers, new incarnations, withdrawn and ended attempts."""

from collections.abc import Iterator

import msgspec
import pytest

from core_driver import DECODE, KEY, NUM_BLOCKS, PREFILL, SAMPLING, Worker, decode_request, of, sent
from splitserve.engine.effects import Connect, Dial, Disconnect, Effect, HangUp, Incident, StartRead
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.handover import (
    Grant,
    Offer,
    OfferedBlock,
    OfferedSpan,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    Release,
    Withdrawn,
)
from splitserve.protocol.messages.requests import (
    Abort,
    FailureCode,
    Introduce,
    LocalRequest,
    PeerRef,
    RequestFailed,
    StepTokens,
)
from splitserve.protocol.placement.chunk_bounds import ChunkBounds
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, RequestKey, Role
from splitserve.simulation.model import LAYOUT, PROTOCOL, ROUTER
from splitserve.simulation.worker.connector import SimConnector
from splitserve.simulation.worker.parts import sink_of


@pytest.fixture
def decode() -> Iterator[Worker]:
    yield Worker(Role.DECODE, DECODE)


class TestDecode:
    def welcome(self, party: Party = PREFILL, num_blocks: int = NUM_BLOCKS) -> PeerWelcome:
        return SimConnector(party, num_blocks).welcome()

    def connect(self, decode: Worker) -> None:
        decode.hear(ROUTER, Introduce(PeerRef(PREFILL, "tcp://prefill-0")))
        assert len(of(decode.hear(PREFILL, self.welcome()), Connect)) == 1
        decode.event(PeerConnected(PREFILL, None))

    def offer(self, key: RequestKey = KEY, *, last: bool = True) -> Offer:
        blocks = [OfferedBlock(block_id, 100 + block_id) for block_id in range(3 if last else 2)]
        return Offer(key, [OfferedSpan(0, 0, blocks)], 10 if last else 8, last, [3] if last else [])

    def begin_read(self, decode: Worker, key: RequestKey = KEY, *, last: bool = True) -> ReadCommand:
        decode.hear(ROUTER, decode_request(key))
        (start,) = of(decode.hear(PREFILL, self.offer(key, last=last)), StartRead)
        assert isinstance(start, StartRead)
        return start.command

    def verified(self, command: ReadCommand) -> ReadResult:
        return ReadResult(command.read_id, None, [100 + block_id for block_id in command.remote_blocks])

    def run_to_end(self, decode: Worker, first_position: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(20):
            plan = decode.plan()
            if plan is None:
                break
            for body in sent(decode.commit(plan), StepTokens):
                assert isinstance(body, StepTokens)
                for delta in body.deltas:
                    assert delta.position == first_position + len(tokens)
                    tokens += delta.token_ids
        return tokens

    def assert_handover_failed(self, effects: list[Effect]) -> str:
        """The router is told once, so that it can go on elsewhere; returns the reason in words."""
        (failure,) = sent(effects, RequestFailed)
        assert isinstance(failure, RequestFailed)
        assert (failure.key, failure.code) == (KEY, FailureCode.HANDOVER)
        return failure.message

    def test_an_ordinary_handover(self, decode: Worker) -> None:
        self.connect(decode)
        assert not decode.core.is_landing
        command = self.begin_read(decode)
        assert decode.core.is_landing, "a step that is planned a moment later has it"
        effects = decode.event(self.verified(command))
        assert not decode.core.is_landing
        assert sent(effects, Release) == [Release(KEY, True)]
        (tokens,) = sent(effects, StepTokens)
        assert isinstance(tokens, StepTokens)
        (delta,) = tokens.deltas
        assert (delta.position, delta.token_ids) == (0, [3]) and delta.handover is not None
        plan = decode.plan()
        assert plan is not None and plan.num_tokens == 1, "it starts with a decode step"
        decode.commit(plan)
        assert len(self.run_to_end(decode, 2)) == 3
        decode.assert_idle()

    @pytest.mark.parametrize(("itl_seconds", "num_tokens"), [(0.0, 4), (4.0, 1)])
    def test_a_prompt_does_not_keep_waiting_what_arrives(
        self, decode: Worker, itl_seconds: float, num_tokens: int
    ) -> None:
        """A step of 8 tokens would take 10 seconds, and so long the sequence whose KV is being read would wait."""
        decode.core.scheduler.budget.beside_decode = ChunkBounds(4, 8)
        decode.core.scheduler.step_model = StepModel(base=2.0, per_token=1.0)
        self.connect(decode)
        decode.hear(ROUTER, msgspec.structs.replace(decode_request(), itl_seconds=itl_seconds))
        decode.hear(PREFILL, self.offer())
        prompt = LocalRequest(RequestKey("local"), list(range(20, 32)), SAMPLING, 60.0)
        decode.hear(ROUTER, prompt)
        plan = decode.plan()
        assert plan is not None and [len(chunk.token_ids) for chunk in plan.chunks] == [num_tokens]

    def test_a_read_error_breaks_the_connection_and_is_reported(self, decode: Worker) -> None:
        self.connect(decode)
        command = self.begin_read(decode, last=False)
        assert not decode.core.is_landing, "its last block isn't even offered"
        effects = decode.event(ReadResult(command.read_id, "reset by peer"))
        assert of(effects, Disconnect) == [Disconnect(PREFILL)]
        assert sent(effects, Release) == [Release(KEY, False)]
        self.assert_handover_failed(effects)
        decode.assert_idle()

    def test_bytes_that_differ_from_those_offered_are_an_incident(self, decode: Worker) -> None:
        self.connect(decode)
        decode.hear(ROUTER, decode_request())
        digests = [bytes([block_id] * 16) for block_id in range(3)]
        blocks = [OfferedBlock(block_id, 100, digest) for block_id, digest in enumerate(digests)]
        (start,) = of(decode.hear(PREFILL, Offer(KEY, [OfferedSpan(0, 0, blocks)], 10, True, [3])), StartRead)
        assert isinstance(start, StartRead)
        landed = [digests[0], b"?" * 16, digests[2]]
        effects = decode.event(ReadResult(start.command.read_id, None, [100] * 3, 0.0, landed))
        (incident,) = of(effects, Incident)
        assert isinstance(incident, Incident)
        for named in (KEY, PREFILL, DECODE, f"1 -> {start.command.local_blocks[1]}"):
            assert str(named) in incident.description
        assert sent(effects, Release) == [Release(KEY, False, mismatch=True)]
        assert "other bytes" in self.assert_handover_failed(effects)
        assert decode.core.load().kv_mismatches == 1
        assert decode.core.load().blocks_cached == 0, "nothing of it is published"
        decode.assert_idle()

    def test_after_a_read_error_the_next_request_makes_a_new_connection(self, decode: Worker) -> None:
        self.connect(decode)
        one = self.begin_read(decode)
        two = self.begin_read(decode, RequestKey("r1"))
        decode.event(ReadResult(one.read_id, "reset by peer"))
        for key in (KEY, RequestKey("r1")):  # else they go before newcomers
            decode.hear(ROUTER, Abort(key))
        effects = decode.hear(ROUTER, decode_request(RequestKey("r2")))
        assert len(of(effects, Dial)) == 1 and len(sent(effects, PeerHello)) == 1
        decode.hear(PREFILL, self.welcome())
        effects = decode.event(ReadResult(two.read_id, "disconnected"))  # of the old connection
        assert of(effects, Disconnect) == []
        decode.event(PeerConnected(PREFILL, None))
        (start,) = of(decode.hear(PREFILL, self.offer(RequestKey("r2"))), StartRead)
        assert isinstance(start, StartRead)
        assert sent(decode.event(self.verified(start.command)), Release) == [Release(RequestKey("r2"), True)]

    def test_content_that_moved_is_reported_and_not_kept(self, decode: Worker) -> None:
        self.connect(decode)
        command = self.begin_read(decode)
        effects = decode.event(ReadResult(command.read_id, None, [1, 2, 3]))
        assert sent(effects, StepTokens) == []
        assert "changed while they were read" in self.assert_handover_failed(effects)
        assert decode.core.state.blocks.pool.count(BlockState.CACHED) == 0
        decode.assert_idle()

    def test_a_stuck_read_keeps_its_blocks_until_it_is_terminal(self, decode: Worker) -> None:
        self.connect(decode)
        command = self.begin_read(decode)
        decode.hear(ROUTER, Abort(KEY))
        pool = decode.core.state.blocks.pool
        assert [pool.state(b) for b in command.local_blocks] == [BlockState.QUARANTINED] * 3
        effects = decode.wait(PROTOCOL.read_deadline_seconds + 1.0)
        assert of(effects, Disconnect) == [Disconnect(PREFILL)]
        assert pool.count(BlockState.QUARANTINED) == 3, "the connector hasn't said that it's over"
        effects = decode.hear(ROUTER, decode_request(RequestKey("r1")))
        assert len(sent(effects, PeerHello)) == 1
        decode.hear(PREFILL, self.welcome())
        assert of(decode.wait(1.0), Disconnect) == [], "an old read's deadline doesn't break the new connection"
        decode.event(ReadResult(command.read_id, "disconnected"))
        assert pool.count(BlockState.QUARANTINED) == 0

    def test_an_attempt_that_prefill_ended_is_not_computed(self, decode: Worker) -> None:
        self.connect(decode)
        command = self.begin_read(decode, last=False)
        effects = decode.hear(PREFILL, Withdrawn(KEY, "finished: length", attempt_over=True))
        assert sent(effects, Release) == [Release(KEY, False)]
        decode.event(self.verified(command))
        assert decode.core.load().handover_failures == 0
        decode.assert_idle()

    def test_only_its_own_prefill_worker_can_withdraw(self, decode: Worker) -> None:
        self.connect(decode)
        self.begin_read(decode, last=False)
        decode.hear(Party("prefill-1", 9), Withdrawn(KEY, "?", attempt_over=True))
        decode.hear(Party("prefill-1", 9), Withdrawn(KEY, "?"))
        assert decode.core.load().requests_tracked == 1 and decode.plan() is None

    def test_any_other_withdrawal_is_reported(self, decode: Worker) -> None:
        self.connect(decode)
        decode.hear(ROUTER, decode_request())
        assert "a step failed" in self.assert_handover_failed(decode.hear(PREFILL, Withdrawn(KEY, "a step failed")))
        decode.assert_idle()

    def test_a_refused_peer(self, decode: Worker) -> None:
        decode.hear(ROUTER, decode_request())
        effects = decode.hear(PREFILL, PeerRefused("dtype differs"))
        assert sent(effects, Release) == [Release(KEY, False)]
        self.assert_handover_failed(effects)
        decode.assert_idle()

    @pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"weights_version": "other"}])
    def test_a_welcome_with_another_layout(self, decode: Worker, change: dict[str, str]) -> None:
        decode.hear(ROUTER, decode_request())
        fields = {name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | change
        welcome = msgspec.structs.replace(self.welcome(), layout=LayoutRecord(**fields))
        effects = decode.hear(PREFILL, welcome)
        assert of(effects, Connect) == []
        assert next(iter(change)) in self.assert_handover_failed(effects)

    def test_a_lost_welcome_is_asked_for_again_for_a_while(self, decode: Worker) -> None:
        decode.hear(ROUTER, Introduce(PeerRef(PREFILL, "tcp://prefill-0")))
        hellos = sent(decode.wait(PROTOCOL.dead_after_seconds + 1.0), PeerHello)
        assert 5 < len(hellos) < 15
        assert sent(decode.wait(20.0), PeerHello) == [], "nobody greets the dead for ever"
        assert decode.core.next_deadline() == float("inf")
        decode.hear(ROUTER, decode_request())
        decode.hear(PREFILL, self.welcome())
        decode.event(PeerConnected(PREFILL, None))
        assert len(of(decode.hear(PREFILL, self.offer()), StartRead)) == 1

    def test_a_new_incarnation_replaces_the_old_one(self, decode: Worker) -> None:
        self.connect(decode)
        command = self.begin_read(decode)
        reborn = Party(PREFILL.engine_id, PREFILL.incarnation + 1)
        effects = decode.hear(ROUTER, decode_request(RequestKey("r1"), reborn))
        assert of(effects, HangUp) == [HangUp(PREFILL)] and of(effects, Disconnect) == [Disconnect(PREFILL)]
        assert sink_of(decode.core).peers.get(PREFILL) is None
        stale_before = decode.core.load().stale_messages
        decode.hear(PREFILL, self.offer(RequestKey("r1")))
        assert decode.core.load().stale_messages == stale_before + 1, "an offer of the old incarnation"
        assert decode.core.state.blocks.pool.count(BlockState.QUARANTINED) == 3
        decode.event(ReadResult(command.read_id, "disconnected"))
        assert decode.core.state.blocks.pool.count(BlockState.QUARANTINED) == 0

    def test_silence_ends_the_handover(self, decode: Worker) -> None:
        self.connect(decode)
        decode.hear(ROUTER, decode_request())
        assert decode.plan() is None
        assert "silent" in self.assert_handover_failed(decode.wait(PROTOCOL.dead_after_seconds + 0.2))
        decode.assert_idle()

    def test_an_offer_after_the_end_is_dropped(self, decode: Worker) -> None:
        self.connect(decode)
        command = self.begin_read(decode)
        decode.event(self.verified(command))
        decode.hear(ROUTER, Abort(KEY))
        effects = decode.hear(PREFILL, self.offer())
        assert of(effects, StartRead) == []
        decode.assert_idle()

    def test_a_prompt_that_waits_for_room_is_granted_later_and_can_be_aborted_before(self, decode: Worker) -> None:
        self.connect(decode)
        taken = decode.core.state.blocks.pool.allocate(NUM_BLOCKS - 3)
        assert taken is not None
        decode.core.check_invariants = lambda: None  # type: ignore[method-assign]  # the test itself holds blocks
        assert len(sent(decode.hear(ROUTER, decode_request()), Grant)) == 1
        assert sent(decode.hear(ROUTER, decode_request(RequestKey("r1"))), Grant) == []
        assert sent(decode.hear(ROUTER, decode_request(RequestKey("r2"))), Grant) == []
        decode.hear(ROUTER, Abort(RequestKey("r1")))
        decode.core.state.blocks.pool.release(taken)
        (granted,) = [g for g in sent(decode.tick(), Grant) if isinstance(g, Grant) and g.key != KEY]
        assert isinstance(granted, Grant) and granted.key == RequestKey("r2")

    def test_a_request_past_its_deadline_fails_and_gives_everything_back(self, decode: Worker) -> None:
        self.connect(decode)
        command = self.begin_read(decode, last=False)
        decode.event(self.verified(command))
        renewed: list[Effect] = []
        while decode.now < 60.5:
            renewed += decode.wait(1.0)
            renewed += decode.hear(PREFILL, Offer(KEY, [OfferedSpan(0, 2, [])], 8))
        assert len(sent(renewed, RequestFailed)) == 1
        assert Release(KEY, False) in sent(renewed, Release)
        decode.assert_idle()
