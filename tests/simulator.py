"""A deterministic simulator of workers: production cores under a seeded scheduler with virtual time.

Only the outside is simulated: the network, the connector's copies, the device. KV is a number per position that depends
on all tokens up to it, and a drawn token depends on all the KV that the step reads; so a block with the wrong
content anywhere gives a wrong token, which the oracle sees. Replay a seed with ``python tests/simulator.py SEED``.
"""

import hashlib
import heapq
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from simulated_router import ROUTER, SimRouter
from splitserve.config import EngineConfig, ProtocolConfig, WorkerConfig
from splitserve.decode.build import build_core
from splitserve.handover import ReadCommand, ReadResult
from splitserve.kvconnector.block_pool import BlockState
from splitserve.kvconnector.connector import PeerConnected
from splitserve.kvconnector.layout import block_bytes
from splitserve.messages import (
    Body,
    Envelope,
    LayoutRecord,
    MemoryRegion,
    PeerWelcome,
)
from splitserve.prefill.effects import Connect, Dial, Disconnect, HangUp, Send, Serve, StartRead
from splitserve.request import Party, Role, SamplingParams
from splitserve.step import StepOutput, StepPlan

VOCAB = 50
BLOCK_SIZE = 4
LAYOUT = LayoutRecord("sim", "w", "float32", BLOCK_SIZE, 1, 1, 1)
PROTOCOL = ProtocolConfig(request_deadline_seconds=60.0, max_blocks_per_read=4, tombstone_seconds=60.0)


def mix(*values: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=7).digest(), "big")


def expected_output(prompt: list[int], sampling: SamplingParams) -> list[int]:
    """The tokens that a single undisturbed worker gives."""
    kv: list[int] = []
    tokens = list(prompt)
    output: list[int] = []
    while True:
        for token in tokens[len(kv) :]:
            kv.append(mix(kv[-1] if kv else 0, token))
        output.append(mix(*kv, sampling.seed, len(tokens)) % VOCAB)
        tokens.append(output[-1])
        if sampling.finish_reason(output[-1], len(output)):
            return output


@dataclass(frozen=True)
class Faults:
    """Probabilities per message, read or request; delays in seconds.

    ``read_seconds`` is the longest time that one block's copy takes. In a partition, messages of one pair are lost
    while reads go on: that is how a lease runs out under a reader. ``partitions``, ``kills`` and ``freezes``
    count them.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    max_delay: float = 0.01
    read_error: float = 0.0
    read_stuck: float = 0.0
    abort: float = 0.0
    step_error: float = 0.0
    read_seconds: float = 0.01
    partitions: int = 0
    partition_seconds: float = 3.0
    kills: int = 0
    freezes: int = 0


@dataclass
class SimConnector:
    """Stands in for the connector while a core is built."""

    me: Party
    num_blocks: int
    name: str = "sim"

    def metadata(self) -> bytes:
        return str(self.me).encode()

    def region(self) -> MemoryRegion:
        return MemoryRegion(0, self.num_blocks, block_bytes(LAYOUT), 0)


class SimWorker:
    """One worker: its production core, its memory, its device."""

    def __init__(self, sim: "Simulator", name: str, role: Role, num_blocks: int, incarnation: int) -> None:
        self.sim = sim
        self.party = Party(name, incarnation)
        self.role = role
        self.num_blocks = num_blocks
        self.alive = True
        self.frozen_until = 0.0
        self.generations = np.zeros(num_blocks, dtype=np.uint64)
        self.memory = [[0] * BLOCK_SIZE for _ in range(num_blocks)]
        engine = EngineConfig(model="sim", max_num_batched_tokens=16, max_num_seqs=4, tail_chunk_tokens=4)
        config = WorkerConfig(engine_id=name, role=role, engine=engine, membership="", protocol=sim.protocol)
        self.core = build_core(
            config,
            self.party,
            LAYOUT,
            self.generations,
            SimConnector(self.party, num_blocks),  # type: ignore[arg-type]
            max_model_len=num_blocks * BLOCK_SIZE,
            vocab_size=VOCAB,
            first_generation=sim.random.getrandbits(63),
        )
        self.busy = False
        self.connected: dict[Party, SimWorker] = {}
        self.reads: dict[int, ReadCommand] = {}

    def thaws_first(self, action: Callable[[], None]) -> bool:
        """While frozen nothing happens here: ``action`` is put off until the end of it, and True is returned."""
        if self.sim.now < self.frozen_until:
            self.sim.at(self.frozen_until, action)
            return True
        return False

    def deliver(self, envelope: Envelope) -> None:
        if self.alive and not self.thaws_first(lambda: self.deliver(envelope)):
            self.core.handle(envelope, self.sim.now)
            self.settle()

    def settle(self) -> None:
        """What the engine loop does after every event."""
        self.core.tick(self.sim.now)
        self.perform()
        if not self.busy:
            plan = self.core.plan_step(self.sim.now)
            if plan is not None:
                self.busy = True
                taken = self.stamp([block_id for chunk in plan.chunks for block_id in chunk.block_ids])
                self.sim.after(self.sim.random.uniform(0.001, 0.02), lambda: self.finish_step(plan, taken))
            self.perform()
        self.core.check_invariants()
        due = self.core.next_deadline()
        assert due > self.sim.now, "something stays due although all that is due was done: the engine loop would spin"
        if due < float("inf"):
            self.sim.at(due, self.wake)

    def wake(self) -> None:
        if self.alive and not self.thaws_first(self.wake) and self.core.next_deadline() <= self.sim.now:
            self.settle()

    def perform(self) -> None:
        for effect in self.core.take_effects():
            match effect:
                case Send(to, body):
                    self.sim.send(self.party, to, body)
                case StartRead(command):
                    self.reads[command.read_id] = command
                    self.sim.start_read(self, command)
                case Connect(peer, welcome):
                    self.sim.after(0.01, lambda p=peer, w=welcome: self.connect(p, w))
                case Disconnect(peer):
                    self.connected.pop(peer, None)
                    for read_id in [i for i, c in self.reads.items() if c.peer == peer]:
                        self.sim.after(0.001, lambda i=read_id: self.finish_read(ReadResult(i, "disconnected")))
                case Dial() | HangUp() | Serve():
                    pass

    def connect(self, peer: Party, welcome: PeerWelcome) -> None:
        if not self.alive or self.thaws_first(lambda: self.connect(peer, welcome)):
            return
        other = self.sim.workers.get(welcome.metadata.decode())
        if other is not None and other.alive:
            self.connected[peer] = other
        self.core.handle_connector_event(PeerConnected(peer, None if peer in self.connected else "gone"), self.sim.now)
        self.settle()

    def finish_read(self, result: ReadResult) -> None:
        if not self.alive or self.thaws_first(lambda: self.finish_read(result)):
            return
        if self.reads.pop(result.read_id, None) is not None:
            self.core.handle_connector_event(result, self.sim.now)
            self.settle()

    def stamp(self, block_ids: Sequence[int]) -> dict[int, int]:
        """Blocks that something launched now will touch, with their generations."""
        return {block_id: int(self.generations[block_id]) for block_id in block_ids}

    def assert_kept(self, taken: dict[int, int], what: str) -> None:
        """Nothing may take a block while something launched touches it."""
        pool = self.core.state.blocks.pool
        for block_id, generation in taken.items():
            kept = pool.state(block_id) in (BlockState.REFERENCED, BlockState.QUARANTINED)
            assert kept and int(self.generations[block_id]) == generation, f"block {block_id} was freed under {what}"

    def finish_step(self, plan: StepPlan, taken: dict[int, int]) -> None:
        if not self.alive or self.thaws_first(lambda: self.finish_step(plan, taken)):
            return
        self.assert_kept(taken, "a step")
        self.busy = False
        if self.sim.random.random() < self.sim.faults.step_error:
            self.core.fail_step("planted step error", self.sim.now)
        else:
            self.core.commit_step(self.compute(plan), self.sim.now)
        self.settle()

    def compute(self, plan: StepPlan) -> StepOutput:
        drawn: list[int | None] = []
        for chunk in plan.chunks:
            kv = [self.memory[chunk.block_ids[p // BLOCK_SIZE]][p % BLOCK_SIZE] for p in range(chunk.start)]
            for position, token in enumerate(chunk.token_ids, start=chunk.start):
                kv.append(mix(kv[-1] if kv else 0, token))
                self.memory[chunk.block_ids[position // BLOCK_SIZE]][position % BLOCK_SIZE] = kv[-1]
            sample = chunk.sample
            drawn.append(None if sample is None else mix(*kv, sample.seed, sample.position) % VOCAB)
        return StepOutput(drawn)


class Simulator:
    def __init__(
        self,
        seed: int,
        faults: Faults,
        *,
        prefill: int = 1,
        decode: int = 1,
        mixed: int = 0,
        num_blocks: int = 24,
        protocol: ProtocolConfig = PROTOCOL,
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.protocol = protocol
        self.partitions: list[tuple[float, float, set[str]]] = []
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.counter = itertools.count()
        self.trace: list[str] = []
        self.workers: dict[str, SimWorker] = {}
        self.router = SimRouter(self)
        for role, number in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.MIXED, mixed)):
            for index in range(number):
                self.start_worker(f"{role}-{index}", role, num_blocks)
        self.plan_disasters()

    # ---- time and network ----

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (time, next(self.counter), action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def send(self, sender: Party, to: Party, body: Body) -> None:
        self.trace.append(f"{self.now:9.4f} {sender.engine_id} -> {to.engine_id}: {body}")
        reliable = ROUTER in (sender, to)
        copies = 1
        if not reliable and (self.is_cut(sender, to) or self.random.random() < self.faults.drop):
            copies = 0
        elif not reliable and self.random.random() < self.faults.duplicate:
            copies = 2
        for _ in range(copies):
            delay = 0.001 if reliable else self.random.uniform(0.0, self.faults.max_delay)
            self.after(delay, lambda: self.deliver(Envelope(sender, to, body)))

    def is_cut(self, one: Party, other: Party) -> bool:
        pair = {one.engine_id, other.engine_id}
        return any(start <= self.now < end and pair == cut for start, end, cut in self.partitions)

    def deliver(self, envelope: Envelope) -> None:
        assert envelope.to is not None
        if envelope.to == ROUTER:
            self.router.on_message(envelope.sender, envelope.body)
        elif str(envelope.to) in self.workers:
            self.workers[str(envelope.to)].deliver(envelope)

    def start_read(self, reader: SimWorker, command: ReadCommand) -> None:
        """Copy block by block at random moments, then read the generations; or fail, or never finish."""
        source = reader.connected.get(command.peer)
        taken = reader.stamp(command.local_blocks)
        fate = self.random.random()
        time = self.now
        for local, remote in zip(command.local_blocks, command.remote_blocks, strict=True):
            time += self.random.uniform(0.0, self.faults.read_seconds)
            destination = {local: taken[local]}
            self.at(time, lambda a=destination, b=remote: self.copy_block(reader, command, source, a, b))
        time += self.random.uniform(0.0, 0.005)
        if source is None or fate < self.faults.read_error:
            self.at(time, lambda: reader.finish_read(ReadResult(command.read_id, "planted read error")))
        elif fate >= self.faults.read_error + self.faults.read_stuck:
            self.at(time, lambda: self.read_generations(reader, command, source))

    def copy_block(
        self,
        reader: SimWorker,
        command: ReadCommand,
        source: SimWorker | None,
        destination: dict[int, int],
        remote: int,
    ) -> None:
        if command.read_id in reader.reads and source is not None and source.alive:
            reader.assert_kept(destination, "a read")
            (local,) = destination
            reader.memory[local] = list(source.memory[remote])

    def read_generations(self, reader: SimWorker, command: ReadCommand, source: SimWorker) -> None:
        if self.now < source.frozen_until and self.random.random() < 0.5:  # over TCP a frozen source stalls the read
            self.at(source.frozen_until, lambda: self.read_generations(reader, command, source))
            return
        if not source.alive:
            reader.finish_read(ReadResult(command.read_id, "the source died"))
            return
        generations = [int(source.generations[block_id]) for block_id in command.remote_blocks]
        reader.finish_read(ReadResult(command.read_id, None, generations))

    # ---- workers come, go and freeze ----

    def start_worker(self, name: str, role: Role, num_blocks: int) -> "SimWorker":
        worker = SimWorker(self, name, role, num_blocks, self.random.getrandbits(32))
        self.workers[str(worker.party)] = worker
        self.router.on_started(worker)
        return worker

    def kill(self, worker: "SimWorker", restart_after: float) -> None:
        """SIGKILL: its connections close, its reads end, a new incarnation takes its name later."""
        if worker.alive:
            self.trace.append(f"{self.now:9.4f} {worker.party} is killed")
            worker.alive = False
            self.after(0.005, lambda: self.router.on_connection_closed(worker.party))
            self.after(restart_after, lambda: self.start_worker(worker.party.engine_id, worker.role, worker.num_blocks))

    def freeze(self, worker: "SimWorker", seconds: float) -> None:
        """SIGSTOP, and SIGCONT later: nothing in it moves, nobody is told."""
        if worker.alive:
            self.trace.append(f"{self.now:9.4f} {worker.party} is frozen for {seconds:.1f} s")
            worker.frozen_until = max(worker.frozen_until, self.now + seconds)

    def plan_disasters(self) -> None:
        names = sorted(worker.party.engine_id for worker in self.workers.values())
        for _ in range(self.faults.partitions):
            start = self.random.uniform(0.0, 2.0)
            pair = {self.random.choice([n for n in names if n.startswith(role)] or names) for role in ("pre", "dec")}
            self.partitions.append((start, start + self.random.uniform(0.0, self.faults.partition_seconds), pair))
        for number, act in ((self.faults.kills, self.kill), (self.faults.freezes, self.freeze)):
            for _ in range(number):
                seconds = self.random.uniform(0.1, 2.0) if act == self.kill else self.random.uniform(1.0, 9.0)
                name = self.random.choice(sorted(worker.party.engine_id for worker in self.workers.values()))
                self.at(self.random.uniform(0.0, 2.0), lambda a=act, n=name, t=seconds: a(self.living(n), t))

    def living(self, name: str) -> "SimWorker":
        """The youngest incarnation of this name."""
        return [worker for worker in self.workers.values() if worker.party.engine_id == name][-1]

    @property
    def num_handovers(self) -> int:
        """Hand-overs that completed: a schedule without any proves nothing."""
        return sum(worker.core.state.counters.handovers for worker in self.workers.values())

    @property
    def num_handover_failures(self) -> int:
        """As decode saw them."""
        decode = (worker for worker in self.workers.values() if worker.party.engine_id.startswith(Role.DECODE))
        return sum(worker.core.state.counters.handover_failures for worker in decode)

    # ---- running ----

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self.queue)
            action()
        self.now = until

    def check_end(self) -> None:
        """Every request has ended as it should, and every count is back."""
        self.router.check_end(expected_output, may_fail=self.faults.step_error > 0)
        for worker in (worker for worker in self.workers.values() if worker.alive):
            pool = worker.core.state.blocks.pool
            assert pool.count(BlockState.REFERENCED) == 0, f"{worker.party}: blocks are still referenced"
            assert pool.count(BlockState.QUARANTINED) == 0, f"{worker.party}: blocks are still quarantined"
            assert worker.core.load().requests_tracked == 0, f"{worker.party}: requests are still tracked"


def run_schedule(
    seed: int, faults: Faults, *, num_requests: int = 8, protocol: ProtocolConfig = PROTOCOL, **shape: int
) -> Simulator:
    """One seeded schedule from start to quiet, with all checks."""
    sim = Simulator(seed, faults, protocol=protocol, **shape)
    shared = [sim.random.randrange(VOCAB) for _ in range(12)]
    for index in range(num_requests):
        prefix = shared[: sim.random.choice([0, 0, 4, 8, 12])]
        prompt = prefix + [sim.random.randrange(VOCAB) for _ in range(sim.random.choice([1, 3, 4, 5, 17, 30]))]
        max_tokens = sim.random.choice([1, 2, 6, 20])
        sim.at(sim.random.uniform(0.0, 0.5), lambda i=index, p=prompt, m=max_tokens: sim.router.submit(f"r{i}", p, m))
    sim.run(until=200.0)
    sim.check_end()
    return sim


if __name__ == "__main__":
    run_schedule(
        int(sys.argv[1]), Faults(drop=0.1, duplicate=0.1, max_delay=0.3, read_error=0.1, read_stuck=0.1, abort=0.3)
    )
    print("every invariant held")
