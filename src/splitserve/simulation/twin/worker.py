"""A worker of the twin: its production core, driven as by the engine's loop, with models of device and link."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from splitserve.engine.effects import Connect, Dial, Disconnect, HangUp, Incident, Send, Serve, StartCopy, StartRead
from splitserve.engine.steps.step_fit import work_of
from splitserve.kvconnector.transfer.connector import PeerConnected, ServedMemory
from splitserve.protocol.config import EngineConfig, WorkerConfig
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.memory_records import LayoutRecord, MemoryKind, MemoryRegion, RankMemory
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.placement.step_model import StepModel
from splitserve.protocol.request import Party, Role
from splitserve.protocol.step import StepOutput, StepPlan
from splitserve.worker.build import BlockMemory, ModelBounds, build_core

if TYPE_CHECKING:
    from splitserve.simulation.twin.cluster import TwinCluster

TIMER_SLACK_SECONDS = 1e-9
OUTPUT_TOKEN = 7
"""The token that every step draws: what it is changes no time."""


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


class _Memory:
    """The part of a KV connector that a core needs at its start."""

    name = "twin"

    def __init__(self, party: Party, setup: WorkerSetup) -> None:
        self._party = party
        self._setup = setup

    def served(self) -> ServedMemory:
        """Return the memory that peers may read."""
        layout = self._setup.layout
        regions = [
            MemoryRegion(MemoryKind.DRAM, 0, 0x1000, count, layout.cache.blocks(group).block_bytes)
            for group, count in enumerate(self._setup.num_blocks)
        ]
        rank = RankMemory(str(self._party).encode(), regions)
        return ServedMemory(self.name, [0x1000] * len(regions), [rank])


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
        memory = BlockMemory(setup.layout, first, first_generation=1 << 32, other_generations=others)
        connector = _Memory(self.party, setup)
        bounds = ModelBounds(setup.max_model_len, setup.vocab_size)
        self.core = build_core(config, self.party, memory, connector, bounds)  # type: ignore[arg-type]
        self._plan: StepPlan | None = None  # of the step that the device runs
        self._link_free_at = 0.0
        self._wakes_at = float("inf")
        self.num_steps = 0
        self.busy_seconds = 0.0

    def deliver(self, envelope: Envelope) -> None:
        """Handle a message."""
        self.core.handle(envelope, self._clock.now)
        self._settle()

    def _settle(self) -> None:
        """Do what a round of the engine's loop does after an event."""
        core, now = self.core, self._clock.now
        core.tick(now)
        self._perform()
        if self._plan is None:
            self._plan = core.plan_step(now)
            if self._plan is not None:
                self._run(self._plan)
            self._perform()
        due = core.next_deadline()
        if due < self._wakes_at:
            self._wakes_at = due
            self._clock.at(due + TIMER_SLACK_SECONDS, self._wake)

    def _wake(self) -> None:
        self._wakes_at = float("inf")
        self._settle()

    def _run(self, plan: StepPlan) -> None:
        seconds = self.setup.model.seconds(work_of(plan))
        self.num_steps += 1
        self.busy_seconds += seconds
        self._clock.after(seconds, self._end_step)

    def _end_step(self) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None
        drawn = [None if chunk.sample is None else OUTPUT_TOKEN for chunk in plan.chunks]
        self.core.commit_step(StepOutput.of(drawn), self._clock.now)
        self._settle()

    def _perform(self) -> None:
        for effect in self.core.take_effects():
            match effect:
                case Send(to, body):
                    self._twin.send(self.party, to, body)
                case StartRead(command):
                    self._read(command)
                case Connect(peer, _):
                    connected = partial(self._on_event, PeerConnected(peer, None))
                    self._clock.after(self._twin.host.connect_seconds, connected)
                case StartCopy() | Incident():
                    raise AssertionError(f"the twin's workers have no tiers and no incidents: {effect}")
                case Disconnect() | Dial() | HangUp() | Serve():
                    pass

    def _read(self, command: ReadCommand) -> None:
        """Start a read: those of one worker take turns on its link."""
        block_bytes = self.setup.layout.cache.blocks(command.group).block_bytes
        begins_at = max(self._clock.now, self._link_free_at)
        self._link_free_at = begins_at + self._twin.link.seconds(block_bytes * len(command.remote_blocks))
        self._clock.at(self._link_free_at, lambda: self._end_read(command))

    def _end_read(self, command: ReadCommand) -> None:
        source = self._twin.workers[command.peer]
        generations = [int(source.generations[command.group][block]) for block in command.remote_blocks]
        self._on_event(ReadResult(command.read_id, None, generations))

    def _on_event(self, event: ReadResult | PeerConnected) -> None:
        self.core.handle_connector_event(event, self._clock.now)
        self._settle()
