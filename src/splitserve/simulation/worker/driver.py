"""One worker of the simulator: its production core with simulated memory and device, driven as by the engine's loop."""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from splitserve.engine.drain import Drain
from splitserve.engine.effects import Connect, Dial, Disconnect, HangUp, Incident, Send, Serve, StartCopy, StartRead
from splitserve.kvconnector.blocks.digest import no_digests
from splitserve.kvconnector.blocks.pool import BlockState
from splitserve.kvconnector.tiers.shared import NO_SHARED_TIER
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.config import EngineConfig, WorkerConfig
from splitserve.protocol.handover.reads import ReadResult
from splitserve.protocol.handover.sink import SinkHandover
from splitserve.protocol.messages.envelope import Envelope
from splitserve.protocol.messages.handover import Grant, Withdrawn
from splitserve.protocol.messages.operators import BeginDrain, ResetPrefixCache
from splitserve.protocol.request import Party, RequestKey, Role
from splitserve.protocol.step import UNKNOWN_TOKEN, Draw, StepPlan
from splitserve.simulation.model import BLOCK_SIZE, NUM_HEADS, VOCAB, layout_of, mix, next_kv
from splitserve.simulation.worker.cache_checks import Generations, check_written
from splitserve.simulation.worker.connector import SimConnector
from splitserve.simulation.worker.drawn import Drawn
from splitserve.simulation.worker.forgotten import Forgotten
from splitserve.simulation.worker.frozen import Frozen
from splitserve.simulation.worker.memory import copy_blocks, touched_blocks
from splitserve.simulation.worker.parts import sink_of
from splitserve.simulation.worker.peer_checks import check_peers
from splitserve.simulation.worker.reader import SimReader
from splitserve.simulation.worker.tail import Tail
from splitserve.simulation.worker.tiers import SimTiers
from splitserve.simulation.worker.turns import Turns
from splitserve.worker.build import BlockMemory, ModelBounds, build_core

if TYPE_CHECKING:
    from splitserve.simulation.simulator import Simulator

TIMER_SLACK_SECONDS = 1e-9  # more than the rounding error of a clock's offset


class SimWorker:
    """One incarnation of a simulated worker."""

    def __init__(self, sim: "Simulator", name: str, role: Role, num_blocks: int, incarnation: int) -> None:
        self.sim = sim
        self.party = Party(name, incarnation)
        self.role = role
        self.num_blocks = num_blocks
        self.alive = True
        self.frozen_until = 0.0
        self.held: list[Callable[[], None]] = []  # actions that wait for the end of a freeze
        self.clock_offset = sim.random.uniform(-sim.faults.clocks, sim.faults.clocks)
        self.window = sim.window
        layout = layout_of(sim.window)
        self.all_generations = [np.zeros(num_blocks, dtype=np.uint64) for _ in layout.cache.groups]
        self.generations = self.all_generations[0]
        self.num_ranks = 1 + self.party.incarnation // 2 % 2
        # By group and block: KV head by head.
        self.memories = [[[0] * (NUM_HEADS * BLOCK_SIZE) for _ in range(num_blocks)] for _ in layout.cache.groups]
        self.memory = self.memories[0]
        engine = EngineConfig(
            model="sim",
            max_num_batched_tokens=16,
            max_num_seqs=4,
            tail_chunk_tokens=4,
            kv_load_seconds=0.5,
            kv_events=True,
            second_token_at_prefill=bool(self.party.incarnation // 4 % 4),
        ).on("cpu")
        self.below = SimTiers(self, sim.tier_slots)
        config = WorkerConfig(engine_id=name, role=role, engine=engine, membership="", protocol=sim.protocol)
        self.core = build_core(
            config,
            self.party,
            BlockMemory(
                layout,
                self.generations,
                other_generations=self.all_generations[1:],
                first_generation=sim.random.getrandbits(63),
                leading_digests=self.leading_digests if sim.faults.damage else no_digests,
                tiers=self.below.tiers,
                shared_tier=NO_SHARED_TIER if sim.window else self.below.shared,
            ),
            SimConnector(self.party, num_blocks, layout=layout, num_slots=sim.tier_slots),  # type: ignore[arg-type]
            ModelBounds(max_model_len=num_blocks * BLOCK_SIZE, vocab_size=VOCAB),
        )
        self.seen_generations = Generations(self.core.state.blocks.pools)
        self.below.begin()
        self.digests: dict[tuple[int, int, int], bytes | None] = {}  # by group, block, generation; None: not yet
        self.drain_clock = Drain(sim.protocol.drain_seconds)
        self.reader = SimReader(sim, self, self.on_connector_event)
        # Steps in flight, oldest first: touched blocks, drawn tokens, whether the step fails.
        self.steps: deque[tuple[list[dict[int, int]], Drawn, bool]] = deque()
        self.max_steps = 1 + self.party.incarnation % 2  # every other worker overlaps two steps, as on a GPU
        self.device_free_at = 0.0
        self.last_drawn: list[Draw | None] = []  # of the step launched last, once drawn
        self.head = sim.model.new_head()
        self.known: set[RequestKey] = set()  # requests that this worker has ever had
        self.num_effects: Counter[type] = Counter()  # by kind
        self.forgotten = Forgotten(self)
        self.frozen = Frozen(self)
        self.tail = Tail(self)
        self.turns = Turns(self)

    @property
    def clock(self) -> float:
        """The time on this worker's monotonic clock."""
        return self.sim.now + self.clock_offset

    def can_run(self, action: Callable[[], None]) -> bool:
        """Return whether the worker is alive and not frozen; a frozen one runs ``action`` when it thaws, in order."""
        if self.alive and self.sim.now < self.frozen_until:
            if not self.held:
                self.sim.at(self.frozen_until, self.thaw)
            self.held.append(action)
            return False
        return self.alive

    def thaw(self) -> None:
        """Run what was held, unless the worker was frozen again meanwhile."""
        if self.alive and self.sim.now < self.frozen_until:
            self.sim.at(self.frozen_until, self.thaw)
            return
        held, self.held = self.held, []
        for action in held:
            action()

    # ---- invariants ----

    def changed_blocks(self, result: ReadResult) -> tuple[SinkHandover, int, list[int]] | None:
        """Return a read's hand-over and the indices of its blocks whose generations differ from the offered ones."""
        incoming = sink_of(self.core).sink.reads.owner(result.read_id)
        if incoming is None or incoming.handover is None:
            return None
        read = incoming.handover.reads_in_flight[result.read_id]
        pairs = enumerate(zip(read.remote, result.generations, strict=False), start=read.first_index)
        return incoming.handover, read.group, [i for i, (block, found) in pairs if block.generation != found]

    # ---- the engine loop ----

    def deliver(self, envelope: Envelope) -> None:
        """Handle a message."""
        if not self.can_run(lambda: self.deliver(envelope)):
            return
        is_stale = envelope.to not in (None, self.party)
        if isinstance(envelope.body, BeginDrain) and not is_stale:
            self.sim.drain(self, 0.0)
            return
        num_stale = self.core.state.counters.stale_messages
        if not is_stale:
            self.turns.on_message(envelope)
        self.core.handle(envelope, self.clock)
        if is_stale:
            assert self.core.state.counters.stale_messages == num_stale + 1, f"took in a stale {envelope}"
        elif isinstance(envelope.body, Grant):
            self.check_answer(envelope.body)
        elif isinstance(envelope.body, ResetPrefixCache):
            self.forgotten.note_reset()
        self.settle()

    def check_answer(self, grant: Grant) -> None:
        """Check that a grant for a request that has ended here is answered at once."""
        if grant.key in self.known and grant.key not in self.core.state.sequences:
            answers = [effect.body for effect in self.core.state.outbox.effects if isinstance(effect, Send)]
            assert any(isinstance(body, Withdrawn) for body in answers), f"{grant.key} is over, but was granted anew"

    def on_connector_event(self, event: ReadResult | PeerConnected) -> None:
        """Handle the end of a read or of a connection attempt, and check which blocks count as verified."""
        if not self.can_run(lambda: self.on_connector_event(event)):
            return
        changed = self.changed_blocks(event) if isinstance(event, ReadResult) else None
        self.core.handle_connector_event(event, self.clock)
        if changed is not None:
            handover, group, indices = changed
            used = [index for index in indices if handover.is_verified(index, group)]
            assert not used, f"blocks {used} of {handover.key} count as verified, but their generations changed"
        self.settle()

    def settle(self) -> None:
        """Do what the engine loop does after each event: timers, effects, steps; then check all invariants."""
        self.core.tick(self.clock)
        self.perform()
        while len(self.steps) < self.max_steps:
            plan = self.core.plan_step(self.clock)
            if plan is not None:
                self.launch(plan)
            self.perform()
            if plan is None:
                break
        self.core.check_invariants()
        self.seen_generations.check()
        check_peers(self)
        self.forgotten.check()
        self.frozen.check()
        self.turns.check()
        self.below.follow_events()
        self.known |= self.core.state.sequences.keys()
        if self.drain_clock.is_over(self.core.is_idle, self.clock):
            self.sim.leave(self)
            return
        due = min(self.core.next_deadline(), self.drain_clock.next_deadline())
        assert due > self.clock, "something stays due although all that is due was done: the engine loop would spin"
        if due < float("inf"):
            self.sim.at(due - self.clock_offset + TIMER_SLACK_SECONDS, self.wake)

    def wake(self) -> None:
        """Settle if a deadline has passed."""
        due = min(self.core.next_deadline(), self.drain_clock.next_deadline())
        if self.can_run(self.wake) and due <= self.clock:
            self.settle()

    def drain(self) -> None:
        """Begin to drain."""
        if self.can_run(self.drain) and not self.drain_clock.has_begun:
            self.drain_clock.begin(self.clock)
            self.sim.routers.each(lambda router: router.on_draining(self.party))
            self.core.drain()
            self.settle()

    def perform(self) -> None:
        """Perform the core's effects."""
        for effect in self.core.take_effects():
            self.num_effects[type(effect)] += 1
            match effect:
                case Send(to, body):
                    self.turns.on_sent(effect)
                    self.sim.send(self.party, to, body)
                case StartRead(command):
                    self.reader.start(command)
                case StartCopy(copy):
                    self.below.start(copy)
                case Connect(peer, welcome):
                    self.reader.connect(peer, welcome)
                case Disconnect(peer):
                    self.reader.disconnect(peer)
                case Incident(description):
                    self.sim.note(description)
                case Dial() | HangUp() | Serve():
                    pass

    # ---- the device ----

    def digest_blocks(self, block_ids: Sequence[int], group: int = 0) -> list[bytes]:
        """Return digests of the blocks' content; none where no faults damage it."""
        if not self.sim.faults.damage:
            return no_digests(block_ids)
        return [mix(*self.memories[group][block_id]).to_bytes(16, "big") for block_id in block_ids]

    def leading_digests(self, block_ids: Sequence[int], group: int = 0) -> list[bytes]:
        """Return the digests of the leading blocks that are computed by now; each takes a while, in any order."""
        contents = [(group, block_id, int(self.all_generations[group][block_id])) for block_id in block_ids]
        for content in contents:
            if content not in self.digests:
                self.digests[content] = None
                self.sim.after(self.sim.random.uniform(0.0, 0.05), partial(self.digest, *content))
        known = itertools.takewhile(lambda digest: digest is not None, map(self.digests.get, contents))
        return [digest for digest in known if digest is not None]

    def digest(self, group: int, block_id: int, generation: int) -> None:
        """Compute the digest of a block."""
        if self.can_run(lambda: self.digest(group, block_id, generation)):
            [self.digests[group, block_id, generation]] = self.digest_blocks([block_id], group)
            self.settle()

    @property
    def num_readable(self) -> int:
        """Number of blocks that a peer may read: those of the device, then the slots of the host tier."""
        return self.num_blocks + len(self.below.generations)

    def readable(self, block_id: int, group: int = 0) -> list[int]:
        """Return the content of a block; slots of the host tier are numbered after the device's blocks."""
        if block_id < self.num_blocks:
            return self.memories[group][block_id]
        return self.below.content(block_id - self.num_blocks)

    def generation(self, block_id: int, group: int = 0) -> int:
        """Return the generation that a peer reads after a block or slot."""
        if block_id < self.num_blocks:
            return int(self.all_generations[group][block_id])
        return int(self.below.generations[block_id - self.num_blocks])

    def stamp(self, block_ids: Sequence[int], group: int = 0) -> dict[int, int]:
        """Return the current generations of blocks that a step, a read or a copy will touch."""
        return {block_id: int(self.all_generations[group][block_id]) for block_id in block_ids}

    def assert_kept(self, taken: dict[int, int], what: str, group: int = 0) -> None:
        """Check that blocks were not freed while a step, a read or a copy touches them."""
        pool = self.core.state.blocks.pools[group]
        generations = self.all_generations[group]
        for block_id, generation in taken.items():
            kept = pool.state(block_id) in (BlockState.REFERENCED, BlockState.QUARANTINED)
            assert kept and int(generations[block_id]) == generation, f"block {block_id} was freed under {what}"

    def assert_all_kept(self, taken: list[dict[int, int]]) -> None:
        """Check that no block of any group was freed under a step."""
        for group, of_group in enumerate(taken):
            self.assert_kept(of_group, "a step", group)

    def launch(self, plan: StepPlan) -> None:
        """Start a step: its KV is written at some moment before its end; a step that fails may write anything."""
        random = self.sim.random
        for chunk in plan.chunks:
            end, room = chunk.start + len(chunk.token_ids), len(chunk.block_ids) * BLOCK_SIZE
            assert end <= room, f"a step writes {end} tokens to blocks for {room}"
            self.tail.check_table(chunk)
        taken = [self.stamp(touched_blocks(plan, group), group) for group in range(len(self.memories))]
        garbage = random.getrandbits(50) if random.random() < self.sim.faults.step_error else 0
        seconds = random.uniform(0.001, self.sim.faults.step_seconds)
        drawn = Drawn(plan)
        self.forgotten.on_launch()
        self.frozen.on_launch()
        self.steps.append((taken, drawn, bool(garbage)))
        previous, self.last_drawn = self.last_drawn, drawn
        wait = max(0.0, self.device_free_at - self.sim.now, self.below.seconds_until_moved(plan.gates))
        self.device_free_at = self.sim.now + wait + seconds
        written_at = [seconds * random.random() for _ in range(self.num_ranks)]
        for rank, time in enumerate(written_at):
            self.sim.after(wait + time, partial(self.write, plan, taken, rank, garbage, previous))
        self.sim.after(wait + max(written_at), lambda: self.draw(plan, drawn))
        self.sim.after(wait + self.seconds_to_completion(plan, seconds, written_at), self.finish_step)

    def seconds_to_completion(self, plan: StepPlan, seconds: float, written_at: Sequence[float]) -> float:  # noqa: ARG002
        """Return the time until all ranks have finished the step."""
        assert max(written_at) <= seconds
        return seconds

    def heads_of(self, rank: int) -> range:
        """Return the heads of a rank."""
        per_rank = NUM_HEADS // self.num_ranks
        return range(rank * per_rank, (rank + 1) * per_rank)

    def write(
        self, plan: StepPlan, taken: list[dict[int, int]], rank: int, garbage: int, previous: list[Draw | None]
    ) -> None:
        """Write the KV of a rank's heads."""
        if not self.alive:
            return
        self.assert_all_kept(taken)
        check_written(plan, self.core.state.blocks.pools)
        copy_blocks(plan, self.memories, self.heads_of(rank))
        for chunk in plan.chunks:
            tokens = chunk.token_ids
            if chunk.previous_chunk is not None:
                assert list(tokens) == [UNKNOWN_TOKEN]
                draw = previous[chunk.previous_chunk]
                assert draw is not None, "a step follows a chunk that draws nothing"
                tokens = [draw.token_id]
            for head in self.heads_of(rank):
                kv = self.kv(chunk.block_ids, head, chunk.start)
                for position, token in enumerate(tokens, start=chunk.start):
                    kv.append(next_kv(kv, token, head) ^ garbage)
                    block_id, offset = chunk.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE
                    self.memory[block_id][head * BLOCK_SIZE + offset] = kv[-1]
                if self.window:
                    self.tail.write(chunk, head, kv)

    def draw(self, plan: StepPlan, drawn: Drawn) -> None:
        """Draw tokens from all KV that the step reads."""
        if not self.alive:
            return
        rounding = [self.party.incarnation] if self.sim.faults.rounding else []
        read: dict[int, list[int]] = {}
        for index, chunk in enumerate(plan.chunks):
            if chunk.sample is not None:
                end = chunk.start + len(chunk.token_ids)
                heads = [self.kv(chunk.block_ids, head, end) for head in range(NUM_HEADS)]
                read[index] = [number for head in heads for number in head] + rounding
                for head, numbers in enumerate(heads if self.window else []):
                    self.tail.check_content(chunk, head, numbers)
        drawn[:] = self.head.draw(plan, read)
        drawn.score(self.kv)

    def kv(self, block_ids: Sequence[int], head: int, end: int) -> list[int]:
        """Return one head's KV of the positions before ``end``."""
        return [
            self.memory[block_ids[position // BLOCK_SIZE]][head * BLOCK_SIZE + position % BLOCK_SIZE]
            for position in range(end)
        ]

    def finish_step(self) -> None:
        """Commit the oldest step: after a freeze, finished steps are committed in their order."""
        if not self.can_run(self.finish_step):
            return
        taken, drawn, fails = self.steps.popleft()
        self.assert_all_kept(taken)
        if fails:
            self.core.fail_step("planted step error", self.clock)
        else:
            self.core.commit_step(drawn.output(), self.clock)
        self.settle()
