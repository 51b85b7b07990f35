"""A worker of the twin: its production core, driven as by the engine's loop, with models of device and link."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from splitserve.engine.effects import (
    Connect,
    Dial,
    Disconnect,
    Effect,
    HangUp,
    Incident,
    Send,
    Serve,
    StartCopy,
    StartRead,
)
from splitserve.engine.steps.step_fit import work_of
from splitserve.kvconnector.tiers.commands import CancelCommand, CopyCommand, CopyResult
from splitserve.kvconnector.tiers.host import make_tier
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.kvconnector.transfer.connector import Link, PeerConnected, ServedMemory
from splitserve.protocol.config import EngineConfig, WorkerConfig
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.engine_config import DEVICE_DEFAULTS
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.memory_records import HostTierMemory, LayoutRecord, MemoryKind, MemoryRegion, RankMemory
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.requests import StepTokens, TokenDelta
from splitserve.protocol.placement.step_model import StepModel, StepWork
from splitserve.protocol.request import Party, RequestKey, Role
from splitserve.protocol.step import Draw, StepOutput, StepPlan
from splitserve.simulation.twin.kept_tokens import KeptTokens, is_news, join
from splitserve.simulation.twin.leap import Leap, is_quiet
from splitserve.simulation.twin.step_times import StepLaw, StepTimes
from splitserve.worker.build import BlockMemory, ModelBounds, build_core

if TYPE_CHECKING:
    from splitserve.simulation.twin.cluster import TwinCluster

TIMER_SLACK_SECONDS = 1e-9
OUTPUT_TOKEN = 7
"""The token that every step draws: what it is changes no time."""
GPU_BLOCK_TOKENS = DEVICE_DEFAULTS["cuda"].block_size
MAX_KEPT_STEPS = 256
"""Steps whose tokens are kept for one message at most."""
_DRAW = Draw((OUTPUT_TOKEN,))


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """A worker's settings, as a running one has them: ``engine`` is decided for its device."""

    name: str
    role: Role
    engine: EngineConfig
    layout: LayoutRecord
    num_blocks: tuple[int, ...]  # of each group of the cache
    max_model_len: int
    vocab_size: int
    model: StepModel
    host_slots: int = 0  # of its host tier; 0: it has none
    law: StepLaw | None = None  # of its steps, where they aren't as ``model`` says: it fits its own, from that on


class _Memory:
    """The part of a KV connector that a core needs at its start."""

    name = "twin"

    def __init__(self, party: Party, setup: WorkerSetup) -> None:
        self._party = party
        self._setup = setup

    @property
    def serves_host(self) -> bool:
        """Return whether peers may read the host tier."""
        return self._setup.host_slots > 0 and self._setup.layout.tensor_parallel_size == 1

    def served(self) -> ServedMemory:
        """Return the memory that peers may read."""
        layout = self._setup.layout
        regions = [
            MemoryRegion(MemoryKind.DRAM, 0, 0x1000, count, layout.cache.blocks(group).block_bytes)
            for group, count in enumerate(self._setup.num_blocks)
        ]
        host = None
        if self.serves_host:
            slots = MemoryRegion(MemoryKind.DRAM, 0, 0x1000, self._setup.host_slots, regions[0].block_bytes)
            host = HostTierMemory(slots, 0x1000)
        names = [f"{self._party} {rank}".encode() for rank in range(layout.tensor_parallel_size)]
        ranks = [RankMemory(name, regions, host=host) for name in names]
        return ServedMemory(self.name, [0x1000] * len(regions), ranks)


class TwinWorker:
    """One worker. :meth:`deliver` takes a message; everything else follows by itself."""

    def __init__(self, twin: "TwinCluster", setup: WorkerSetup) -> None:
        self._twin = twin
        self._clock = twin.clock
        self.setup = setup
        self.party = Party(setup.name, 1)
        self.generations = [np.zeros(count, dtype=np.uint64) for count in setup.num_blocks]
        first, *others = self.generations
        config = WorkerConfig(
            engine_id=setup.name, role=setup.role, engine=setup.engine, membership="", protocol=twin.protocol
        )
        connector = _Memory(self.party, setup)
        self.slot_generations = np.zeros(setup.host_slots, dtype=np.uint64)
        memory = BlockMemory(
            setup.layout,
            first,
            first_generation=1 << 32,
            other_generations=others,
            tiers=self._tiers(connector),
        )
        bounds = ModelBounds(setup.max_model_len, setup.vocab_size)
        self.core = build_core(config, self.party, memory, connector, bounds)  # type: ignore[arg-type]
        self.times = StepTimes(setup.model, setup.law)
        self.core.scheduler.step_model = self.times.model
        self._plan: StepPlan | None = None  # of the step that the device runs
        self._step_ends_at = 0.0  # of the step in flight
        self._epoch = 0  # of the last time to return that was set; those of earlier ones are void
        self._is_awaited = False  # that time is still to come
        self._kept: dict[RequestKey, KeptTokens] = {}  # that the router hasn't got
        self._due: dict[Party, list[TokenDelta]] = {}  # to be sent now, by recipient
        self._link_free_at = 0.0
        self._copies_free_at = {True: 0.0, False: 0.0}  # loads, stores
        self._wakes_at = float("inf")
        self.num_steps = 0
        self.busy_seconds = 0.0

    def deliver(self, envelope: Envelope) -> None:
        """Handle a message."""
        self._catch_up()
        self.core.handle(envelope, self._clock.now)
        self._settle()

    def busy_seconds_until(self, time: float) -> float:
        """Return the seconds in which a step ran, without those of the step in flight after ``time``."""
        later = self._step_ends_at - time if self._plan is not None else 0.0
        return max(0.0, self.busy_seconds - max(0.0, later))

    def load(self) -> WorkerLoad:
        """Return the load for a heartbeat."""
        self._catch_up()
        return self.core.load()

    # ---- rounds of the loop ----

    def _settle(self) -> None:
        """Do what a round of the engine's loop does after an event."""
        core, now = self.core, self._clock.now
        core.tick(now)
        self._perform()
        if self._plan is None:
            self._begin_step(now)
            self._perform()
        elif not self._goes_on_alike():  # what has just happened may change the step after this one
            self._return_at(self._step_ends_at)
        elif not self._is_awaited:
            self._return_at(self._last_step_end(work_of(self._plan)))
        self._wake_at(core.next_deadline())

    def _wake_at(self, due: float) -> None:
        """Return to the worker at its next deadline, unless it returns before."""
        if due < self._wakes_at:
            self._wakes_at = due
            self._clock.at(due + TIMER_SLACK_SECONDS, lambda: self._wake(due))

    def _wake(self, due: float) -> None:
        if due != self._wakes_at:
            return  # an earlier deadline has come up since
        self._wakes_at = float("inf")
        next_due = self.core.next_deadline()
        if next_due > self._clock.now:
            self._wake_at(next_due)
            return
        self._catch_up()
        self._settle()

    # ---- steps ----

    def _begin_step(self, now: float) -> None:
        """Plan a step that begins at ``now``, and return to the worker when something can depend on its steps: at the
        end of this one, or, if it only decodes, when the first of its sequences ends."""
        self._plan = self.core.plan_step(now)
        if self._plan is None:
            return
        work = work_of(self._plan)
        self._step_ends_at = now + self._count(work)
        leaps = self._twin.leaps and not work.prefill_tokens
        if leaps and any(sequence.draws_second for sequence, _ in self.core.newest_step):
            leaps = False  # after this step comes the last offer
        self._return_at(self._last_step_end(work) if leaps else self._step_ends_at)

    def _goes_on_alike(self) -> bool:
        """Return whether the step in flight only decodes, and the next one has the same sequences, whatever happens
        until then without a message."""
        scheduler = self.core.scheduler
        running, step = scheduler.decodes.running, self.core.newest_step
        return (
            self._twin.leaps
            and len(step) == len(running)
            and is_quiet(self.core)
            and all(sequence in running for sequence, _ in step)
        )

    def _return_at(self, time: float) -> None:
        """Return to the worker at ``time``, and not at the time that was set before."""
        self._is_awaited = True
        self._epoch += 1
        epoch = self._epoch
        self._clock.at(time, lambda: self._end_leap(epoch))

    def _count(self, work: StepWork) -> float:
        """Count a step, and return its seconds with those of the loop before it."""
        seconds = self.times.seconds(work)
        self._learn([work])
        self.num_steps += 1
        self.busy_seconds += seconds
        return seconds + self._twin.host.loop_seconds(work)

    def _learn(self, works: Iterable[StepWork]) -> None:
        self.times.note(works, self._clock.now)
        self.core.scheduler.step_model = self.times.model

    def _last_step_end(self, work: StepWork) -> float:
        """Return the end of the step at which the first sequence of a decode step ends, if the batch stays as it is."""
        num_more = min(sequence.end_length - chunk.start - 2 for sequence, chunk in self.core.newest_step)
        times, num = self.times, work.num_decodes
        growing = work._replace(decode_context=work.decode_context + num * (num_more + 1) / 2)  # on average
        return self._step_ends_at + num_more * (times.seconds(growing) + self._twin.host.loop_seconds(work))

    def _end_leap(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._is_awaited = False
            self._catch_up()
            self._settle()

    def _catch_up(self) -> None:
        """Commit the steps that have ended by now, and plan those that have begun before, each at its own time."""
        core, now = self.core, self._clock.now
        while self._plan is not None and self._step_ends_at <= now + TIMER_SLACK_SECONDS:
            at, drawn = self._step_ends_at, [None if c.sample is None else _DRAW for c in self._plan.chunks]
            core.commit_step(StepOutput(drawn), at)
            self._keep_tokens(at)
            if at >= now - TIMER_SLACK_SECONDS:
                self._plan = None
                break
            at = self._leap(at, now - TIMER_SLACK_SECONDS)
            self._plan = core.plan_step(at)
            if self._plan is not None:
                self._step_ends_at = at + self._count(work_of(self._plan))
        self._flush()

    def _leap(self, begin: float, until: float) -> float:
        """Take the steps from ``begin`` on that end before ``until`` in one go, as far as nothing can happen in them.
        Return the end of the last one, ``begin`` if there was none."""
        if not self._twin.leaps:
            return begin
        between = self._twin.host.loop_seconds(StepWork(len(self.core.scheduler.decodes.running)))
        leap = Leap(self.core, self.times, begin, between)
        ends = leap.ends_before(until)
        if not ends:
            return begin
        self._learn(leap.works(len(ends)))
        leap.take(ends, OUTPUT_TOKEN, self._keep)
        self.num_steps += len(ends)
        self.busy_seconds += ends[-1] - begin - len(ends) * between
        return ends[-1]

    def _keep_tokens(self, at: float) -> None:
        """Keep the tokens of a step, which count as sent ``at`` its end. The router gets those of a request with the
        first one, prefill's second one, the report of its hand-over or the last one: in between it decides nothing by
        them."""
        kept = []
        for effect in self.core.take_effects():
            if not (isinstance(effect, Send) and isinstance(effect.body, StepTokens)):
                kept.append(effect)
                continue
            for delta in effect.body.deltas:
                self._keep(delta, effect.to, [at] * len(delta.token_ids))
        self._carry_out(kept)

    def _keep(self, delta: TokenDelta, to: Party, times: Sequence[float]) -> None:
        """Keep a request's tokens, drawn at ``times``, until the router is to get them."""
        found = self._kept.get(delta.key)
        if found is None:
            found = self._kept[delta.key] = KeptTokens()
        found.deltas.append(delta)
        found.times.extend(times)
        if is_news(delta) or len(found.times) >= MAX_KEPT_STEPS:
            joined = join(found.deltas)
            self._due.setdefault(to, []).append(joined)
            self._twin.note_drawn(joined, found.times)
            del self._kept[delta.key]

    def _flush(self) -> None:
        """Send what is due."""
        for to, deltas in self._due.items():
            self._twin.send(self.party, to, StepTokens(deltas))
        self._due.clear()

    # ---- effects ----

    def _perform(self) -> None:
        self._keep_tokens(self._clock.now)
        self._flush()

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, body):
                    self._twin.send(self.party, to, body)
                case StartRead(command):
                    self._read(command)
                case Connect(peer, _):
                    link = Link("twin", self._twin.link.bytes_per_second)
                    connected = partial(self._on_event, PeerConnected(peer, None, link))
                    self._clock.after(self._twin.host.connect_seconds, connected)
                case StartCopy(CopyCommand() as copy):
                    self._copy(copy)
                case StartCopy(CancelCommand()):
                    pass  # it ends when it would have ended
                case StartCopy() | Incident():
                    raise AssertionError(f"the twin's workers have no shared tier and no incidents: {effect}")
                case Disconnect() | Dial() | HangUp() | Serve():
                    pass

    def _read(self, command: ReadCommand) -> None:
        """Start a read: those of one worker take turns on its link."""
        block_bytes = self.setup.layout.cache.blocks(command.group).block_bytes
        begins_at = max(self._clock.now, self._link_free_at)
        self._link_free_at = begins_at + self._twin.link.seconds(block_bytes * len(command.remote_blocks))
        seconds = self._link_free_at - self._clock.now
        verified_at = self._link_free_at + self._twin.host.verify_seconds
        self._clock.at(verified_at, lambda: self._end_read(command, seconds))

    def _end_read(self, command: ReadCommand, seconds: float) -> None:
        source = self._twin.workers[command.peer]
        generations = [source.generation(command.group, block) for block in command.remote_blocks]
        self._on_event(ReadResult(command.read_id, None, generations, seconds))

    def generation(self, group: int, block: int) -> int:
        """Return the generation of a block, or of a slot of the host tier, which are numbered after the blocks."""
        own = self.generations[group]
        return int(own[block] if block < len(own) else self.slot_generations[block - len(own)])

    def _copy(self, copy: CopyCommand) -> None:
        """Start a copy to or from the host tier: those of one direction take turns."""
        num_bytes = self.setup.layout.block_bytes * len(copy.block_ids)
        begins_at = max(self._clock.now, self._copies_free_at[copy.is_load])
        ends_at = self._copies_free_at[copy.is_load] = begins_at + self._twin.copies.seconds(num_bytes)
        result = CopyResult(copy.copy_id, len(copy.block_ids), None, ends_at - self._clock.now)
        self._clock.at(ends_at, lambda: self._end_copy(result))

    def _end_copy(self, result: CopyResult) -> None:
        self._catch_up()
        self.core.handle_copy_result(result, self._clock.now)
        self._settle()

    def _tiers(self, memory: _Memory) -> list[Tier]:
        setup = self.setup
        if not setup.host_slots:
            return []
        on_gpu = setup.engine.block_size >= GPU_BLOCK_TOKENS  # which only bounds the size of a load
        generations = self.slot_generations if memory.serves_host else None
        return [make_tier(setup.host_slots, setup.layout.block_bytes, on_gpu=on_gpu, generations=generations)]

    def _on_event(self, event: ReadResult | PeerConnected) -> None:
        self._catch_up()
        self.core.handle_connector_event(event, self._clock.now)
        self._settle()
