"""Drives one worker's core by hand: messages in, effects out, every invariant checked after each event."""

from typing import Any

import numpy as np

from splitserve.engine.core import EngineCore
from splitserve.engine.effects import Effect, Send, StartCopy
from splitserve.kvconnector.blocks.digest import LeadingDigests, no_digests
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.kvconnector.tiers.commands import CopyCommand, CopyNearsEnd, CopyResult
from splitserve.kvconnector.tiers.index import TierIndex
from splitserve.kvconnector.tiers.tier import Tier
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.config import EngineConfig, WorkerConfig
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.envelope import Body, Envelope
from splitserve.protocol.messages.handover import Grant
from splitserve.protocol.messages.requests import DecodeRequest, PeerRef, PrefillRequest
from splitserve.protocol.request import Party, RequestKey, Role, SamplingParams
from splitserve.protocol.step import StepOutput, StepPlan
from splitserve.simulation.model import LAYOUT, PROTOCOL, VOCAB
from splitserve.simulation.worker.connector import SimConnector
from splitserve.worker.build import BlockMemory, ModelBounds, build_core

PREFILL, DECODE = Party("prefill-0", 11), Party("decode-0", 22)
KEY = RequestKey("r0", 0)
PROMPT = list(range(10))  # two full blocks and a half
SAMPLING = SamplingParams(max_tokens=5)
NUM_BLOCKS = 32


class Worker:
    """One core, with what came out of it since the last look."""

    def __init__(
        self,
        role: Role,
        me: Party,
        leading_digests: LeadingDigests = no_digests,
        num_blocks: int = NUM_BLOCKS,
        num_slots: int = 0,
        layout: LayoutRecord = LAYOUT,
        **options: Any,
    ) -> None:
        """``options``: further settings of the engine."""
        self.me = me
        slots = np.full(num_slots, 7, dtype=np.uint64)
        sizes = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "tail_chunk_tokens": 4}
        engine = EngineConfig(model="m", **{**sizes, **options}).on("cpu")
        config = WorkerConfig(engine_id=me.engine_id, role=role, engine=engine, membership="", protocol=PROTOCOL)
        self.core: EngineCore = build_core(
            config,
            me,
            BlockMemory(
                layout,
                np.zeros(num_blocks, dtype=np.uint64),
                other_generations=[np.zeros(num_blocks, dtype=np.uint64) for _ in layout.cache.groups[1:]],
                first_generation=1,
                leading_digests=leading_digests,
                tiers=[Tier("host", TierIndex(num_slots, slots))] if num_slots else [],
            ),
            SimConnector(me, num_blocks, num_slots=num_slots),  # type: ignore[arg-type]
            ModelBounds(max_model_len=64, vocab_size=VOCAB),
        )
        self.now = 0.0
        self.copies: list[CopyCommand] = []  # between device and host tier; in flight

    def hear(self, sender: Party, body: Body) -> list[Effect]:
        self.core.handle(Envelope(sender, self.me, body), self.now)
        return self.tick()

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        self.now += seconds
        self.core.tick(self.now)
        self.core.check_invariants()
        assert self.core.next_deadline() > self.now
        effects = self.core.take_effects()
        commands = [effect.command for effect in effects if isinstance(effect, StartCopy)]
        self.copies += [command for command in commands if isinstance(command, CopyCommand)]
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        effects: list[Effect] = []
        end = self.now + seconds
        while self.now < end:
            effects += self.tick(min(0.1, end - self.now))
        return effects

    def plan(self) -> StepPlan | None:
        plan = self.core.plan_step(self.now)
        self.core.check_invariants()
        return plan

    def commit(self, plan: StepPlan, token: int = 3) -> list[Effect]:
        drawn = [None if chunk.sample is None else token for chunk in plan.chunks]
        self.core.commit_step(StepOutput.of(drawn), self.now)
        return self.tick()

    def event(self, event: ReadResult | PeerConnected) -> list[Effect]:
        self.core.handle_connector_event(event, self.now)
        return self.tick()

    def near_end(self, index: int = 0) -> list[Effect]:
        """A step may wait for the rest of that copy."""
        self.core.handle_copy_result(CopyNearsEnd(self.copies[index].copy_id), self.now)
        return self.tick()

    def end_copy(self, index: int = 0, *, is_good: bool = True) -> list[Effect]:
        copy = self.copies.pop(index)
        self.core.handle_copy_result(CopyResult(copy.copy_id, len(copy.block_ids) if is_good else 0), self.now)
        return self.tick()

    def end_copies(self) -> list[Effect]:
        """End the copies in flight, and those that start because of it."""
        effects: list[Effect] = []
        while self.copies:
            effects += self.end_copy()
        return effects

    def run(self) -> list[Effect]:
        """Steps, and copies between device and host tier, until none can begin."""
        effects: list[Effect] = []
        while True:
            effects += self.tick() + self.end_copies()
            plan = self.plan()
            effects += self.tick() if plan is None else self.commit(plan)
            if plan is None and not self.copies:
                return effects

    def assert_idle(self) -> None:
        pool = self.core.state.blocks.pool
        assert self.core.load().requests_tracked == 0
        assert (pool.count(BlockState.REFERENCED), pool.count(BlockState.QUARANTINED)) == (0, 0)
        assert self.plan() is None


def sent(effects: list[Effect], kind: type) -> list[Body]:
    return [effect.body for effect in effects if isinstance(effect, Send) and isinstance(effect.body, kind)]


def of(effects: list[Effect], kind: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def prefill_request(key: RequestKey = KEY, max_tokens: int = 5) -> PrefillRequest:
    return PrefillRequest(key, PROMPT, SamplingParams(max_tokens=max_tokens), PeerRef(DECODE, ""), 60.0)


def decode_request(key: RequestKey = KEY, prefill: Party = PREFILL) -> DecodeRequest:
    return DecodeRequest(key, PROMPT, SAMPLING, PeerRef(prefill, f"tcp://{prefill.engine_id}"), 60.0)


def grant(key: RequestKey = KEY) -> Grant:
    return Grant(key, len(PROMPT), 0, PROTOCOL.lease_seconds)
