"""The core of every worker: messages in, steps planned, results committed, effects out.

It is composed of parts (:mod:`splitserve.engine.parts`); it doesn't depend on the role. No I/O, no clock, no torch:
the loop (:mod:`splitserve.engine.loop`) and the fault simulator drive the same object.
"""

from collections import deque
from collections.abc import Sequence as ListLike
from collections.abc import Set

from splitserve.engine.effects import Effect, StartCopy
from splitserve.engine.load_report import load_of
from splitserve.engine.operations import Operations
from splitserve.engine.parts import Handler, Part
from splitserve.engine.requests import Requests
from splitserve.engine.scheduling import Planned
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.kvconnector.tiers.commands import AnyResult
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.membership import PeerLink
from splitserve.protocol.messages.operators import ResetPrefixCache, SetFrozen
from splitserve.protocol.messages.requests import Abort, FailureCode
from splitserve.protocol.request import Party
from splitserve.protocol.step import MAX_STEPS_IN_FLIGHT, Draw, ScheduledChunk, StepOutput, StepPlan


class EngineCore:
    """Runs the requests of one worker together with its parts, which are called in their order."""

    def __init__(self, requests: Requests, parts: ListLike[Part]) -> None:
        self.state = requests.state
        self.scheduler = requests.scheduler
        self.parts = requests.parts = parts
        self._requests = requests
        self._steps: deque[list[Planned]] = deque()  # launched, oldest first
        self._outcomes: deque[StepOutput | str] = deque()  # of the first of them, which wait for a load's end
        self._with_features: dict[Sequence, None] = {}  # sequences whose sampling features have states on the runner
        self._drawn_once: list[int] = []  # states of features that only the step planned last uses
        self._operations = Operations(self.state)
        self._routers: frozenset[Party] = frozenset()  # that this worker is registered with
        self._handlers: dict[type, Handler] = {
            Abort: requests.on_abort,
            SetFrozen: self._operations.on_set_frozen,
            ResetPrefixCache: self._operations.on_reset,
        }
        for part in parts:
            handlers = part.handlers()
            assert not handlers.keys() & self._handlers.keys(), "two parts take the same message"
            self._handlers.update(handlers)

    # ---- messages and events ----

    def handle(self, envelope: Envelope, now: float) -> None:
        """Process one message. One for another incarnation, or not for a worker, is counted and dropped."""
        handler = self._handlers.get(type(envelope.body))
        if handler is None or (envelope.to is not None and envelope.to != self.state.me):
            self.state.counters.stale_messages += 1
            return
        handler(envelope.body, envelope.sender, now)

    def handle_connector_event(self, event: ReadResult | PeerConnected, now: float) -> None:
        """Take what the KV connector reports."""
        for part in self.parts:
            part.on_connector_event(event, now)
        self.state.flush_deltas()

    def handle_copy_result(self, result: AnyResult, now: float) -> None:
        """Handle a tier's result: a copy is over, or nearly, or the tier becomes available or unavailable."""
        load = self.state.blocks.tiers.on_result(result)
        if load is None:
            return
        sequence = load.owner
        self.state.blocks.finish_load(sequence)
        if sequence.has_ended:
            self._give_back_untouched(sequence)
        else:
            self._requests.owner(sequence).on_loaded(sequence, now)
        self._take_outcomes(now)

    def on_routers(self, routers: Set[Party], now: float) -> None:
        """Take note of the routers that this worker is registered with. Requests of those whose place others have taken
        end: nobody waits for their tokens."""
        if routers != self._routers:
            gone, self._routers = self._routers - routers, frozenset(routers)
            for sequence in [each for each in self.state.sequences.values() if each.reply_to in gone]:
                for key in (*sequence.siblings, sequence.key):
                    self._requests.on_abort(Abort(key), sequence.reply_to, now)
        self._operations.on_routers(routers, now)

    def drain(self) -> None:
        """Reject requests from now on. Those that are here go on, and their peers go on reading."""
        self.state.is_draining = True
        for part in self.parts:
            part.drain()

    # ---- steps ----

    def plan_step(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can run.

        The caller launches it and calls :meth:`commit_step` or :meth:`fail_step`, in the order of the plans. One step
        may be planned while another is in flight.
        """
        if len(self._steps) == MAX_STEPS_IN_FLIGHT:
            assert self._outcomes, "a third step before the first one is committed"
            return None
        if self.state.is_frozen:
            return None
        for part in self.parts:
            part.admit(now)
        for part in self.parts:
            part.before_plan(now)
        has_prompts = bool(self.scheduler.prompts.active or self.scheduler.prompts.waiting)
        step = self.scheduler.plan([each for part in self.parts for each in part.arriving] if has_prompts else ())
        self.state.blocks.tiers.start_clocks(now)
        if not step:
            return None
        for index, (sequence, chunk) in enumerate(step):
            sequence.on_launched(chunk, index)
            if sequence.marks is not None:
                sequence.marks.begin(now)
            if sequence.features is not None and chunk.sample is not None:
                self._with_features[sequence] = None
        self._steps.append(step)
        released = self._released_features() if self._with_features or self._drawn_once else ()
        for part in self.parts:
            part.after_plan(now)
        self._drawn_once = [spec.features.state_id for _, chunk in step for spec in chunk.others if spec.features]
        return StepPlan([chunk for _, chunk in step], released)

    @property
    def newest_step(self) -> ListLike[Planned]:
        """The step planned last that isn't committed yet: its sequences with their chunks."""
        return self._steps[-1]

    def _released_features(self) -> tuple[int, ...]:
        """Return the states of sampling features that neither this step nor a later one uses, once."""
        released = [sequence for sequence in self._with_features if sequence.draws_no_more]
        for sequence in released:
            del self._with_features[sequence]
        states = [sequence.features.release() for sequence in released if sequence.features is not None]
        return (*self._drawn_once, *states)

    def commit_step(self, output: StepOutput, now: float) -> None:
        """Take the results of the oldest step: its KV is written, its tokens are drawn."""
        self._outcomes.append(output)
        self._take_outcomes(now)

    def fail_step(self, error: str, now: float) -> None:
        """End the requests of the oldest step with its error. Nothing that it wrote was published."""
        self._outcomes.append(error)
        self._take_outcomes(now)

    def _take_outcomes(self, now: float) -> None:
        """Apply outcomes in the steps' order. Those of a step that waited for a load count when the load has ended."""
        while self._outcomes and not any(_awaits_load(*planned) for planned in self._steps[0]):
            step, outcome = self._steps.popleft(), self._outcomes.popleft()
            if isinstance(outcome, StepOutput):
                self._commit(step, outcome, now)
            else:
                self._fail(step, outcome, now)
        self.state.has_news |= self.state.is_frozen and not self._steps

    def _commit(self, step: list[Planned], output: StepOutput, now: float) -> None:
        self.state.counters.count_step(len(step), sum([len(planned.chunk.token_ids) for planned in step]))
        prefilling = Stage.PREFILLING
        for index, ((sequence, chunk), draw) in enumerate(zip(step, output.draws, strict=True)):
            sequence.on_completed(chunk)
            if sequence.has_ended:
                self._give_back_untouched(sequence)
                continue
            if chunk.copies:
                self.state.blocks.forget_copies(sequence)
            if _lacks_its_load(sequence, chunk):
                continue
            if chunk.start < sequence.num_prompt_tokens:
                self._count_prompt_tokens(sequence, chunk)
                if sequence.marks is not None:
                    sequence.marks.add_chunk(now, len(chunk.token_ids))
            sequence.num_computed += len(chunk.token_ids)
            self.state.blocks.publish_computed(sequence)
            if sequence.stage is prefilling:
                self._requests.owner(sequence).on_computed(sequence, now)
            if chunk.scored is not None:
                sequence.note_scored(chunk)
                self.state.send_prompt_logprobs(sequence, chunk, output.scores[index])
            if draw is not None and draw.error:
                self._requests.fail(sequence, FailureCode.INVALID, draw.error, now)
            elif draw is not None:
                self._on_token(sequence, draw, now)
        self.state.flush_deltas()

    def _fail(self, step: list[Planned], error: str, now: float) -> None:
        for sequence, chunk in step:
            sequence.on_completed(chunk)
            if sequence.has_ended:
                self._give_back_untouched(sequence)
            elif not _lacks_its_load(sequence, chunk):
                self._requests.fail(sequence, FailureCode.INTERNAL, error, now)

    def _give_back_untouched(self, sequence: Sequence) -> None:
        """Give back the blocks of an ended sequence, once no step, read or copy in flight touches them."""
        if sequence.stage is Stage.RELEASED and not sequence.is_touched:
            self.state.blocks.give_back(sequence)

    def _on_token(self, sequence: Sequence, draw: Draw, now: float) -> None:
        """Deliver a token, and end the request, hand it on, or let it draw the next one."""
        token_id = draw.token_id
        finish_reason = sequence.finish_reason(token_id)
        self.state.counters.output_tokens += 1 + len(draw.others)
        self._requests.deliver(sequence, draw, finish_reason, now)
        if sequence.siblings and sequence.decodes_here:
            self._requests.fork(sequence, draw, now)
        if sequence.was_aborted and not sequence.siblings:
            self._requests.end(sequence, "aborted", now)
        elif finish_reason is not None and not sequence.siblings:
            self._requests.end(sequence, f"finished: {finish_reason}", now)
        elif sequence.decodes_here:
            sequence.token_ids.append(token_id)
            self.scheduler.start_decoding(sequence)
        elif sequence.draws_second or not self._requests.owner(sequence).goes_on(sequence, draw, now):
            self.scheduler.remove(sequence)
            self._requests.owner(sequence).on_token(sequence, draw, now)

    def _count_prompt_tokens(self, sequence: Sequence, chunk: ScheduledChunk) -> None:
        counters = self.state.counters
        counters.prompt_tokens += len(chunk.token_ids)
        if chunk.start == sequence.num_cached_tokens:
            counters.prefix_hit_tokens += sequence.num_cached_tokens

    # ---- time ----

    def tick(self, now: float) -> None:
        """Do what is due by now."""
        self._requests.expire(now)
        for part in self.parts:
            part.poll(now)
        self._move_blocks(now)
        for part in self.parts:
            part.admit(now)
        self.state.blocks.tiers.start_clocks(now)
        self.state.flush_deltas()

    def _move_blocks(self, now: float) -> None:
        """Abandon loads that take too long; begin loads and stores."""
        tiers = self.state.blocks.tiers
        for load in tiers.overdue(now):
            sequence = load.owner
            self.state.blocks.abandon_load(sequence)
            if sequence.stage is Stage.PULLING:
                self._requests.owner(sequence).on_late_load(sequence)
            elif not sequence.has_ended:
                self.scheduler.requeue(sequence)
        self.scheduler.begin_loads()
        tiers.start_stores()

    def next_deadline(self) -> float:
        """Return the time at which :meth:`tick` has something to do, if nothing happens before."""
        parts = (part.next_deadline() for part in self.parts)
        return min(self._requests.next_deadline(), self.state.blocks.tiers.next_deadline(), *parts)

    def take_effects(self) -> list[Effect]:
        return [*self.state.outbox.take(), *map(StartCopy, self.state.blocks.tiers.take_commands())]

    # ---- looking at it ----

    @property
    def is_idle(self) -> bool:
        """Return whether no request, hand-over or step is in flight. Abandoned reads don't count."""
        return not (self.state.sequences or self._steps or any(part.num_live for part in self.parts))

    @property
    def is_landing(self) -> bool:
        """Return whether a sequence can draw in the next step if that is planned a moment later."""
        return any(part.is_landing for part in self.parts)

    def take_news(self) -> bool:
        """Return whether the next heartbeat is to be sent at once. The answer is given once."""
        has_news, self.state.has_news = self.state.has_news, False
        return has_news

    def links(self) -> list[PeerLink]:
        """Return how KV comes here, by peer."""
        return [link for part in self.parts for link in part.links()]

    def load(self) -> WorkerLoad:
        """Return load and counters for the heartbeat."""
        is_frozen = self.state.is_frozen and not self._steps
        return load_of(self.state, self.scheduler, self.parts, is_frozen=is_frozen)

    def check_invariants(self) -> None:
        """Raise AssertionError unless every sequence, part, block and slot is in a state that can be.

        Every reference to a block, or to a slot that peers read, is explained by a sequence that lives here, by a copy
        to a tier, or by a peer that reads it; see :meth:`BlockPool.check_invariants`.
        """
        blocks, tiers = self.state.blocks, self.state.blocks.tiers
        for pool in blocks.pools:
            pool.check_invariants()
        tiers.check_invariants()
        holders = {
            *self.state.sequences.values(),
            *(p.sequence for step in self._steps for p in step),
            *(load.owner for load in tiers.loads),
        }
        copies = [copy for s in holders for copy in s.copies]
        held = [*(b for s in holders for b in s.block_ids), *(copy.source for copy in copies if copy.group == 0)]
        explained = len(held) + tiers.num_references() + sum(part.num_references for part in self.parts)
        assert blocks.pool.total_references() == explained, "blocks have references without a holder"
        for index, group in enumerate(blocks.others):
            num_held = sum(len(s.other_tables[index].block_ids) for s in holders if s.other_tables)
            num_held += sum(copy.group == index + 1 for copy in copies)
            assert group.pool.total_references() == num_held, f"blocks of group {index + 1} have no holder"
        slots = sum(len(s.host_slots) for s in holders) + sum(part.num_slots for part in self.parts)
        assert tiers.num_held_slots == slots, "slots of the host tier are held without a holder"
        for part in self.parts:
            part.check_invariants()
        self.scheduler.check_invariants()
        self._requests.check_invariants()


def _awaits_load(sequence: Sequence, chunk: ScheduledChunk) -> bool:
    """Return whether the content that the chunk was computed from isn't known yet."""
    return bool(chunk.gates) and sequence.load is not None


def _lacks_its_load(sequence: Sequence, chunk: ScheduledChunk) -> bool:
    """Return whether the load that the chunk was computed from brought less: the rest is computed again."""
    return bool(chunk.gates) and sequence.num_computed < chunk.start
