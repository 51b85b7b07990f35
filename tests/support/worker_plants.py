"""Bugs planted one at a time in the code of workers and of the router's requests. Not a test module."""

from typing import Any

import msgspec
import pytest

from splitserve.common.bounded import ExpiringMap
from splitserve.decode.incoming import Incoming
from splitserve.decode.reads import ReadsInFlight
from splitserve.decode.sink import SinkSide
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.core import EngineCore
from splitserve.engine.sequence import LaunchedChunks, Sequence
from splitserve.engine.stage import Stage
from splitserve.engine.state import Tombstone
from splitserve.kvconnector.blocks.pool import BlockPool
from splitserve.kvconnector.transfer.joining import ReadJoin
from splitserve.prefill.source import SourcePart
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.handover.sink import SinkActions, SinkHandover
from splitserve.protocol.handover.source import SourceHandover
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.handover import Grant, Offer, OfferAck
from splitserve.protocol.request import Party, RequestKey
from splitserve.protocol.step import StepPlan
from splitserve.router.placement.policies import Placed
from splitserve.router.requests.state import RequestState
from splitserve.router.requests.token_sequence import NewTokens, TokenSequence
from splitserve.simulation.simulator import Simulator
from splitserve.simulation.worker.driver import SimWorker
from splitserve.simulation.worker.parts import source_of

# ---- reading, verifying, publishing ----


def generations_unchecked(patch: pytest.MonkeyPatch) -> None:
    original = SinkHandover.on_read_result

    def believe(self: SinkHandover, result: ReadResult, now: float) -> None:
        read = self.reads_in_flight.get(result.read_id)
        if read is not None and result.error is None:
            result = msgspec.structs.replace(result, generations=[block.generation for block in read.remote])
        original(self, result, now)

    patch.setattr(SinkHandover, "on_read_result", believe)


def published_before_verified(patch: pytest.MonkeyPatch) -> None:
    original = SinkSide._keep_verified

    def publish_early(self: SinkSide, sequence: Sequence, handover: SinkHandover) -> None:
        original(self, sequence, handover)
        num_computed = sequence.num_computed
        posted = handover.first_block + handover.statistics.num_blocks
        sequence.num_computed = min(posted * self._state.blocks.block_size, len(sequence.token_ids))
        self._state.blocks.publish_computed(sequence)
        sequence.num_computed = num_computed

    patch.setattr(SinkSide, "_keep_verified", publish_early)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "quarantine", BlockPool.release)
    patch.setattr(BlockPool, "lift_quarantine", lambda self, block_ids: None)


def offered_before_the_step_completed(patch: pytest.MonkeyPatch) -> None:
    original = EngineCore.plan_step

    def offer_at_launch(self: EngineCore, now: float) -> StepPlan | None:
        plan = original(self, now)
        for planned in self._steps[-1] if plan else ():
            if planned.chunk.sample is None:
                planned.sequence.num_computed += len(planned.chunk.token_ids)
                source_of(self).on_computed(planned.sequence, now)
                planned.sequence.num_computed -= len(planned.chunk.token_ids)
        source_of(self).poll(now)
        return plan

    patch.setattr(EngineCore, "plan_step", offer_at_launch)


def offers_sent_once(patch: pytest.MonkeyPatch) -> None:
    original = SourceHandover.poll

    def send_once(self: SourceHandover, now: float) -> Offer | None:
        offer = original(self, now)
        self._offer_due_at = float("inf")
        return offer

    def renew_only(self: SourceHandover, now: float) -> None:
        self.lease_expires_at = now + self._lease_seconds

    patch.setattr(SourceHandover, "poll", send_once)
    patch.setattr(SourceHandover, "renew", renew_only)


def generation_kept_when_taken(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.allocate

    def take(self: BlockPool, num_blocks: int, *, after: int | None = None) -> list[int] | None:
        taken = original(self, num_blocks, after=after)
        for block_id in taken or ():
            self._generations[block_id] -= 1
        return taken

    patch.setattr(BlockPool, "allocate", take)


def blocks_given_back_during_a_step(patch: pytest.MonkeyPatch) -> None:
    def drop_now(self: object, sequence: Sequence) -> None:
        sequence.enter(Stage.RELEASED)
        launched, sequence.launched = sequence.launched, LaunchedChunks()
        self.blocks.give_back(sequence)  # type: ignore[attr-defined]
        sequence.launched = launched

    patch.setattr("splitserve.engine.state.EngineState.drop_blocks", drop_now)


def blocks_given_back_between_two_steps(patch: pytest.MonkeyPatch) -> None:
    """When the first of two steps in flight is over: the second one still writes."""

    def give_back(self: EngineCore, sequence: Sequence) -> None:
        if sequence.stage is Stage.RELEASED and sequence.block_ids:
            launched, sequence.launched = sequence.launched, LaunchedChunks()
            self.state.blocks.give_back(sequence)
            sequence.launched = launched

    patch.setattr(EngineCore, "_give_back_untouched", give_back)


def offered_with_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """When a step is over, what the next one computes is offered too."""
    original = SourcePart.on_computed

    def on_computed(self: SourcePart, sequence: Sequence, now: float) -> None:
        sequence.num_computed += sequence.launched.num_tokens
        original(self, sequence, now)
        sequence.num_computed -= sequence.launched.num_tokens

    patch.setattr(SourcePart, "on_computed", on_computed)


def completed_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    """A step that draws nothing is over when the first rank has written its KV: nobody waits for the others."""

    def first_rank(self: SimWorker, plan: StepPlan, seconds: float, written_at: list[float]) -> float:
        return seconds if any(chunk.sample for chunk in plan.chunks) else written_at[0]

    patch.setattr(SimWorker, "seconds_to_completion", first_rank)


def read_over_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadJoin, "add", lambda self, part, result: [result])


def generations_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("splitserve.simulation.worker.reader.side_by_side", lambda results: results[0])


def published_before_computed(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.reserve

    def reserve(self: BlockManager, sequence: Sequence, headroom: int = 0, *, pulls: bool = False) -> bool:
        if not original(self, sequence, headroom, pulls=pulls):
            return False
        computed, sequence.num_computed = sequence.num_computed, len(sequence.token_ids)
        self.publish_computed(sequence)
        sequence.num_computed = computed
        return True

    patch.setattr(BlockManager, "reserve", reserve)


def blocks_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    original = Simulator.send

    def send(self: Simulator, sender: object, to: object, body: object) -> None:
        if type(body).__name__ != "Release":
            original(self, sender, to, body)  # type: ignore[arg-type]

    def never(self: SourceHandover, now: float) -> Offer | None:
        self.lease_expires_at = float("inf")
        return poll(self, now)

    poll = SourceHandover.poll
    patch.setattr(Simulator, "send", send)
    patch.setattr(SourceHandover, "poll", never)


def digests_unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SinkHandover, "_digests_agree", lambda self, read, digests: True)


def partial_block_published(patch: pytest.MonkeyPatch) -> None:
    original = BlockManager.publish_computed

    def publish(self: BlockManager, sequence: Sequence) -> None:
        computed = sequence.num_computed
        sequence.num_computed = min(-(-computed // self.block_size) * self.block_size, len(sequence.token_ids))
        original(self, sequence)
        sequence.num_computed = computed

    patch.setattr(BlockManager, "publish_computed", publish)


def quarantine_ends_with_the_deadline(patch: pytest.MonkeyPatch) -> None:
    original = SinkSide._fail

    def fail(self: SinkSide, incoming: Incoming, handover: SinkHandover, now: float) -> None:
        overdue = {read_id: read for read_id, read in handover.reads_in_flight.items() if now >= read.deadline}
        for read_id in overdue:
            del handover.reads_in_flight[read_id]
        original(self, incoming, handover, now)

    def end_known(self: ReadsInFlight, result: ReadResult) -> Incoming | None:
        waits = self.owner(result.read_id)
        is_known = waits is None or waits.handover is None or bool(waits.handover.reads_in_flight)
        return end(self, result) if is_known else None

    end = ReadsInFlight.end
    patch.setattr(SinkSide, "_fail", fail)
    patch.setattr(ReadsInFlight, "end", end_known)


# ---- leases, grants, releases ----


def freed_when_acknowledged(patch: pytest.MonkeyPatch) -> None:
    original = SourcePart.on_ack

    def on_ack(self: SourcePart, ack: OfferAck, sender: Party, now: float) -> None:
        original(self, ack, sender, now)
        handover = self._handovers.get(ack.key)
        if handover is not None and ack.last:
            handover.release("acknowledged")
            self._finish(handover, now)

    patch.setattr(SourcePart, "on_ack", on_ack)


def lease_by_the_other_clock(patch: pytest.MonkeyPatch) -> None:
    granted_until: dict[RequestKey, float] = {}
    poll, start, renew = SinkHandover.poll, SourceHandover.__init__, SourceHandover.renew

    def grant(self: SinkHandover, now: float, **options: Any) -> SinkActions:
        actions = poll(self, now, **options)
        if any(isinstance(message, Grant) for message in actions.messages):
            granted_until[self.key] = now + self._config.lease_seconds
        return actions

    def begin(self: SourceHandover, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        self.lease_expires_at = granted_until[self.key]

    def extend(self: SourceHandover, now: float) -> None:
        renew(self, now)
        self.lease_expires_at = granted_until[self.key]

    patch.setattr(SinkHandover, "poll", grant)
    patch.setattr(SourceHandover, "__init__", begin)
    patch.setattr(SourceHandover, "renew", extend)


def grant_not_all_or_nothing(patch: pytest.MonkeyPatch) -> None:
    """A request that waits for room keeps the blocks that are free meanwhile."""
    original = BlockManager.reserve

    def reserve(self: BlockManager, sequence: Sequence, headroom: int = 0, *, pulls: bool = False) -> bool:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        if original(self, sequence, headroom, pulls=pulls):
            return True
        missing = -(-len(sequence.token_ids) // self.block_size) - 1
        sequence.block_ids = self.pool.allocate(min(missing, self.pool.num_available)) or []
        return False

    patch.setattr(BlockManager, "reserve", reserve)


# ---- attempts, incarnations, what is over ----


def attempts_unnumbered(patch: pytest.MonkeyPatch) -> None:
    original = RequestState.begin

    def begin(self: RequestState, placement: Placed) -> tuple[Party, ...]:
        abandoned = original(self, placement)
        self.key = RequestKey(self.request_id)
        return abandoned

    patch.setattr(RequestState, "begin", begin)


def old_attempts_heard(patch: pytest.MonkeyPatch) -> None:
    def is_current(self: RequestState, sender: Party, key: RequestKey) -> bool:
        return not self.ended and self.placement is not None and sender in self.placement.parties

    patch.setattr(RequestState, "_is_current", is_current)


def other_incarnations_served(patch: pytest.MonkeyPatch) -> None:
    original = EngineCore.handle

    def handle(self: EngineCore, envelope: Envelope, now: float) -> None:
        original(self, Envelope(envelope.sender, None, envelope.body), now)

    patch.setattr(EngineCore, "handle", handle)


def tombstones_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = ExpiringMap.put

    def put(self: ExpiringMap[Any, Any], key: Any, value: Any, now: float) -> None:
        if not isinstance(value, Tombstone):
            original(self, key, value, now)

    patch.setattr(ExpiringMap, "put", put)


# ---- the router's part ----


def delivered_without_deduplication(patch: pytest.MonkeyPatch) -> None:
    def accept(
        self: TokenSequence, position: int, token_ids: list[int], finish_reason: Any, logprobs: Any = None
    ) -> NewTokens:
        self.output_ids.extend(token_ids)
        if finish_reason is not None:
            self.end, self.finish_reason = len(self.output_ids), finish_reason
        return NewTokens(list(token_ids), logprobs)

    patch.setattr(TokenSequence, "accept", accept)


def retried_from_the_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestState, "delivered_ids", property(lambda self: []))


def heard_between_attempts(patch: pytest.MonkeyPatch) -> None:
    def is_current(self: RequestState, sender: Party, key: RequestKey) -> bool:
        return key == self.key

    patch.setattr(RequestState, "_is_current", is_current)
