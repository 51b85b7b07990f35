"""What every worker's core does, whatever its role: messages in, steps planned, results committed, effects out.

No I/O, no clock, no torch: the loop (:mod:`splitserve.prefill.loop`) and the fault simulator drive the same object.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from splitserve.counters import WorkerLoad
from splitserve.handover import ReadResult
from splitserve.kvconnector.block_pool import BlockState
from splitserve.kvconnector.connector import PeerConnected
from splitserve.kvconnector.tiers import AnyResult
from splitserve.messages import (
    Abort,
    Envelope,
    FailureCode,
    Grant,
    OfferAck,
    PeerHello,
    PeerLink,
    PrefillRequest,
    PrefixGrant,
    Release,
    TokenDelta,
)
from splitserve.prefill.effects import Effect, StartCopy
from splitserve.prefill.engine_state import EngineState
from splitserve.prefill.scheduler import Planned, PrefillScheduler
from splitserve.prefill.sequence import Sequence, Shortage
from splitserve.prefill.source import DRAINING_REASON, SourceSide
from splitserve.request import FinishReason, Party
from splitserve.step import MAX_STEPS_UNDER_WAY, ScheduledChunk, StepOutput, StepPlan

Handler = Callable[[Any, Party, float], None]


class StepScheduler(Protocol):
    """What the core needs of a scheduler."""

    def plan(self, budget: int) -> list[Planned]: ...

    def shortage(self, budget: int) -> Shortage: ...

    def begin_loads(self) -> None: ...

    def add(self, sequence: Sequence, *, first: bool = False) -> None: ...

    def remove(self, sequence: Sequence) -> None: ...


class PrefillCore:
    """A prefill worker. :class:`splitserve.decode.core.DecodeCore` adds the other side."""

    def __init__(
        self, state: EngineState, scheduler: StepScheduler, source: SourceSide, *, max_num_batched_tokens: int
    ) -> None:
        self.state = state
        self.source = source
        self._scheduler = scheduler
        self._max_num_batched_tokens = max_num_batched_tokens
        self._steps: deque[list[Planned]] = deque()  # launched, oldest first
        self._outcomes: deque[StepOutput | str] = deque()  # of the first of them, which wait for a load's end
        self.has_news = False  # membership should hear of it before the next heartbeat is due
        self._handlers: dict[type, Handler] = {
            PrefillRequest: self._on_prefill_request,
            Abort: self._on_abort,
            PeerHello: source.on_hello,
            Grant: source.on_grant,
            PrefixGrant: source.on_prefix_grant,
            OfferAck: source.on_ack,
            Release: source.on_release,
        }

    # ---- messages ----

    def handle(self, envelope: Envelope, now: float) -> None:
        """Process one message. One that isn't meant for this incarnation, or for this role, is counted and dropped."""
        handler = self._handlers.get(type(envelope.body))
        if handler is None or (envelope.to is not None and envelope.to != self.state.me):
            self.state.counters.stale_messages += 1
            return
        handler(envelope.body, envelope.sender, now)

    def _on_prefill_request(self, request: PrefillRequest, sender: Party, now: float) -> None:
        sequence = self._accept(request, sender, now)
        if sequence is not None:
            self.source.on_request(request, sequence, now)

    def _on_abort(self, abort: Abort, sender: Party, now: float) -> None:
        del sender
        sequence = self.state.sequences.get(abort.key)
        if sequence is None:
            self.state.bury(abort.key, "aborted", now, attempt_over=True)
        elif not sequence.ended:
            self._end(sequence, "aborted", now)

    def _accept(self, request: Any, sender: Party, now: float) -> Sequence | None:
        """The sequence of a new request; None if it's a late one, a repeated one, or can never run here."""
        if request.key in self.state.tombstones or request.key in self.state.sequences:
            self.state.counters.stale_messages += 1
            return None
        token_ids = request.token_ids[:]
        token_ids.extend(request.output_ids)
        sequence = Sequence(
            key=request.key,
            reply_to=sender,
            token_ids=token_ids,
            num_prompt_tokens=len(request.token_ids),
            sampling=request.sampling,
            deadline=now + min(request.deadline_seconds, self.state.protocol.request_deadline_seconds),
            max_length=self.state.max_model_len,
        )
        if self.state.is_draining:
            self.state.fail(sequence, FailureCode.OVERLOADED, DRAINING_REASON)
            self.state.bury(request.key, DRAINING_REASON, now)
            return None
        if len(self.state.sequences) >= self.state.protocol.max_requests:
            crowded = f"{len(self.state.sequences)} requests are here already"
            self.state.fail(sequence, FailureCode.OVERLOADED, crowded)
            self.state.bury(request.key, crowded, now)
            return None
        problem = self.state.why_impossible(sequence)
        if problem:
            self.state.fail(sequence, FailureCode.INVALID, problem)
            self.state.bury(request.key, problem, now)
            return None
        return sequence

    def drain(self) -> None:
        """Refuse requests from now on. Those that are here go on, and their peers go on reading."""
        self.state.is_draining = True
        self.source.drain()

    @property
    def is_idle(self) -> bool:
        """Nothing is under way: no request, no hand-over, no step. Reads that were given up don't count."""
        return not (self.state.sequences or self.source.num_live or self._steps)

    # ---- steps ----

    def plan_step(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run. The caller launches it and calls :meth:`commit_step` or
        :meth:`fail_step`, in the order of the plans. One step may be planned while another is under way."""
        if len(self._steps) == MAX_STEPS_UNDER_WAY:
            assert self._outcomes, "a third step before the first one is committed"
            return None
        self._before_plan(now)
        if self.source.can_make_room:
            self.source.make_room(self._scheduler.shortage(self._max_num_batched_tokens), now)
        step = self._scheduler.plan(self._max_num_batched_tokens)
        self.state.blocks.tiers.start_clocks(now)
        if not step:
            return None
        for index, (sequence, chunk) in enumerate(step):
            sequence.on_launched(chunk, index)
        self._steps.append(step)
        return StepPlan([chunk for _, chunk in step])

    def commit_step(self, output: StepOutput, now: float) -> None:
        """The step has completed on the device: its KV is written, its tokens are drawn."""
        self._outcomes.append(output)
        self._take_outcomes(now)

    def fail_step(self, error: str, now: float) -> None:
        """The step failed: its requests end with its error. Nothing it wrote was published."""
        self._outcomes.append(error)
        self._take_outcomes(now)

    def _take_outcomes(self, now: float) -> None:
        """In the steps' order. What comes of a step that waited for a load counts when the load has ended."""
        while self._outcomes and not any(_awaits_load(*planned) for planned in self._steps[0]):
            step, outcome = self._steps.popleft(), self._outcomes.popleft()
            if isinstance(outcome, StepOutput):
                self._commit(step, outcome, now)
            else:
                self._fail(step, outcome, now)

    def _commit(self, step: list[Planned], output: StepOutput, now: float) -> None:
        self.state.counters.steps += 1
        for (sequence, chunk), token_id in zip(step, output.token_ids, strict=True):
            self._complete(sequence, chunk)
            if sequence.ended or _lacks_its_load(sequence, chunk):
                continue
            if chunk.start < sequence.num_prompt_tokens:
                self._count_prompt_tokens(sequence, chunk)
            sequence.num_computed += len(chunk.token_ids)
            self.state.blocks.publish_computed(sequence)
            if not sequence.decodes_here:
                self.source.on_computed(sequence, now)
            if token_id is not None:
                self._on_token(sequence, token_id, now)
        self.state.flush_deltas()

    def _fail(self, step: list[Planned], error: str, now: float) -> None:
        for sequence, chunk in step:
            self._complete(sequence, chunk)
            if not sequence.ended and not _lacks_its_load(sequence, chunk):
                self.state.fail(sequence, FailureCode.INTERNAL, error)
                self._end(sequence, error, now, attempt_over=False)

    def _complete(self, sequence: Sequence, chunk: ScheduledChunk) -> None:
        """The step no longer touches the sequence's blocks."""
        sequence.on_completed(chunk)
        if sequence.dropped and not sequence.is_touched:
            self.state.blocks.give_back(sequence)

    def _on_token(self, sequence: Sequence, token_id: int, now: float) -> None:
        """A token was drawn: deliver it, and end the request or hand it on."""
        position = sequence.num_output_tokens
        finish_reason = sequence.sampling.finish_reason(token_id, position + 1)
        if finish_reason is None and not sequence.may_go_on:
            finish_reason = FinishReason.LENGTH
        self.state.counters.output_tokens += 1
        delta = TokenDelta(
            sequence.key, position, [token_id], sequence.choice, finish_reason, sequence.num_cached_tokens
        )
        self.state.add_delta(sequence, delta)
        if finish_reason is not None:
            self._end(sequence, f"finished: {finish_reason}", now)
        else:
            self._continue(sequence, token_id, now)

    def _continue(self, sequence: Sequence, token_id: int, now: float) -> None:
        """Prefill's part is done."""
        self._scheduler.remove(sequence)
        self.source.on_prefilled(sequence, token_id, now)

    def _end(self, sequence: Sequence, reason: str, now: float, *, attempt_over: bool = True) -> None:
        """The request is over on this worker; ``attempt_over``: on every worker."""
        sequence.ended = True
        self._scheduler.remove(sequence)
        if self.source.owns(sequence):
            self.source.withdraw(sequence, reason, now, attempt_over=attempt_over)
        else:
            self.state.bury(sequence.key, reason, now, attempt_over=attempt_over)
            self.state.drop_blocks(sequence)

    def _count_prompt_tokens(self, sequence: Sequence, chunk: ScheduledChunk) -> None:
        counters = self.state.counters
        counters.prompt_tokens += len(chunk.token_ids)
        if chunk.start == sequence.num_cached_tokens:
            counters.prefix_hit_tokens += sequence.num_cached_tokens

    # ---- the connector, time ----

    def handle_connector_event(self, event: ReadResult | PeerConnected, now: float) -> None:
        raise AssertionError(f"a prefill worker reads from nobody, but was told of {event} at {now}")

    def handle_copy_result(self, result: AnyResult, now: float) -> None:
        """A copy between the device and a tier is over, or nearly, or a tier comes or goes."""
        load = self.state.blocks.tiers.on_result(result)
        if load is None:
            return
        sequence = load.owner
        self.state.blocks.finish_load(sequence)
        if sequence.dropped and not sequence.is_touched:
            self.state.blocks.give_back(sequence)
        elif not sequence.ended:
            self._on_loaded(sequence, now)
        self._take_outcomes(now)

    def _on_loaded(self, sequence: Sequence, now: float) -> None:
        """The scheduler goes on with it by itself."""

    def _on_late_load(self, sequence: Sequence) -> None:
        """Its blocks were given back: it starts anew, before all others, and computes them."""
        self._scheduler.remove(sequence)
        self._scheduler.add(sequence, first=True)

    def _move_blocks(self, now: float) -> None:
        """What tiers have to do by now."""
        tiers = self.state.blocks.tiers
        for load in tiers.overdue(now):
            self.state.blocks.abandon_load(load.owner)
            if not load.owner.ended:
                self._on_late_load(load.owner)
        self._scheduler.begin_loads()
        tiers.start_stores()
        tiers.start_clocks(now)

    def tick(self, now: float) -> None:
        """Do what is due by now."""
        for sequence in [s for s in self.state.sequences.values() if now >= s.deadline and not s.ended]:
            self.state.fail(sequence, FailureCode.DEADLINE, "the request's deadline passed")
            self._end(sequence, "deadline", now)
        self.source.poll(now)
        self._move_blocks(now)

    def next_deadline(self) -> float:
        """When :meth:`tick` has something to do, if nothing happens before."""
        deadlines = [s.deadline for s in self.state.sequences.values() if not s.ended]
        return min(self.source.next_deadline(), self.state.blocks.tiers.next_deadline(), *deadlines)

    def take_effects(self) -> list[Effect]:
        return [*self.state.outbox.take(), *map(StartCopy, self.state.blocks.tiers.take_commands())]

    def _before_plan(self, now: float) -> None:
        """Room for what a role does before each step."""

    # ---- looking at it ----

    def links(self) -> list[PeerLink]:
        """How KV comes here, by peer."""
        return []

    def load(self) -> WorkerLoad:
        """Load and counters for the heartbeat."""
        pool, tiers = self.state.blocks.pool, self.state.blocks.tiers
        waiting, running = self._queues()
        return WorkerLoad(
            **msgspec.structs.asdict(self.state.counters),
            num_waiting=len(waiting),
            num_running=len(running),
            waiting_tokens=sum(sequence.num_remaining for sequence in waiting),
            blocks_free=pool.count(BlockState.FREE),
            blocks_cached=pool.count(BlockState.CACHED),
            blocks_referenced=pool.count(BlockState.REFERENCED),
            blocks_quarantined=pool.count(BlockState.QUARANTINED),
            tier_blocks=tiers.num_blocks,
            tiers=tiers.report(self.state.block_bytes),
            requests_tracked=len(self.state.sequences) + self.source.num_live,
        )

    def _queues(self) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences that wait for prefill, and those that decode."""
        assert isinstance(self._scheduler, PrefillScheduler)
        return [*self._scheduler.waiting, *self._scheduler.active], []

    def check_invariants(self) -> None:
        """Every reference to a block, or to a slot that peers read, is explained by a sequence that lives here, by a
        copy to a tier, or by a peer that reads it; see :meth:`BlockPool.check_invariants`."""
        pool, tiers = self.state.blocks.pool, self.state.blocks.tiers
        pool.check_invariants()
        tiers.check_invariants()
        holders = {
            *self.state.sequences.values(),
            *(p.sequence for step in self._steps for p in step),
            *(load.owner for load in tiers.loads),
        }
        held = [b for s in holders for b in s.block_ids]
        explained = len(held) + tiers.num_references() + self.source.prefixes.num_references
        assert pool.total_references() == explained, "references that nobody explains"
        slots = sum(len(s.host_slots) for s in holders) + self.source.prefixes.num_slots
        assert tiers.num_held_slots == slots, "slots are held that nobody explains"


def _awaits_load(sequence: Sequence, chunk: ScheduledChunk) -> bool:
    """Whether it isn't known yet what the chunk was computed from."""
    return bool(chunk.gates) and sequence.load is not None


def _lacks_its_load(sequence: Sequence, chunk: ScheduledChunk) -> bool:
    """Whether what the chunk was computed from didn't come: it is computed again, from what did."""
    return bool(chunk.gates) and sequence.num_computed < chunk.start
