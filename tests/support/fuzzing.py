"""Messages that no correct sender would send, and a worker's core under them. Everything follows from one seed."""

import random
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from core_driver import DECODE, LAYOUT, NUM_BLOCKS, PREFILL, Worker
from splitserve.common.errors import WireError
from splitserve.engine.effects import Connect, Disconnect, Effect, Send, StartRead
from splitserve.kvconnector.transfer.connector import PeerConnected
from splitserve.protocol.block_hash import extend_hashes, root_hash
from splitserve.protocol.counters import WorkerLoad
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.memory_records import HostTierMemory, MemoryKind, MemoryRegion, RankMemory
from splitserve.protocol.messages.envelope import SCHEMA_VERSION, Body
from splitserve.protocol.messages.handover import (
    Grant,
    GrantDelayed,
    GrantRequest,
    Offer,
    OfferAck,
    OfferedBlock,
    OfferedSpan,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    PrefixGrant,
    Release,
    Withdrawn,
)
from splitserve.protocol.messages.membership import (
    Draining,
    Heartbeat,
    Leave,
    Register,
    Registered,
    RegisterRefused,
    WorkerInfo,
)
from splitserve.protocol.messages.requests import (
    Abort,
    ClockReading,
    DecodeRequest,
    FailureCode,
    Introduce,
    LocalRequest,
    PeerGone,
    PeerRef,
    PrefillRequest,
    Profile,
    Profiled,
    ReadClock,
    RequestFailed,
    StepTokens,
    TokenDelta,
)
from splitserve.protocol.request import Party, RequestKey, Role, SamplingParams
from splitserve.protocol.step import StepPlan
from splitserve.protocol.wire import decode, plain
from splitserve.simulation.model import PROTOCOL, VOCAB
from splitserve.simulation.worker.parts import sink_of, source_of

ROUTER = Party("router", 1)
PARTIES = [ROUTER, PREFILL, DECODE, Party("prefill-0", 12), Party("prefill-1", 5), Party("mixed-0", 7), Party("", 0)]
HOSTILE_NUMBERS = [0, 1, -1, 2, 4, 255, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1, -(2**63), 0.5, -0.0]
HOSTILE_NUMBERS += [float("nan"), float("inf"), float("-inf"), 1e308, 5e-324]
HOSTILE_VALUES: list[Any] = [None, True, "", "x" * 5000, "\x00", b"", b"\xff" * 100, [], {}, [[]], [None], {"": 0}]
REGION = MemoryRegion(MemoryKind.DRAM, 0, 4096, NUM_BLOCKS, LAYOUT.block_bytes)
HOST = HostTierMemory(MemoryRegion(MemoryKind.DRAM, 0, 4096, 4 * NUM_BLOCKS, LAYOUT.block_bytes), 4096)


SAID_BY_DECODE = (PeerHello, Grant, GrantDelayed, PrefixGrant, OfferAck, Release)
SAID_BY_PREFILL = (PeerWelcome, PeerRefused, GrantRequest, Offer, Withdrawn)


class MessageFuzzer:
    """Envelopes as bytes: sound ones, sound ones with wrong values in them, and broken bytes.

    Requests, keys and peers come from small pools, so that much of it hits something that lives.
    """

    def __init__(
        self, rng: random.Random, me: Party, endpoint: str = "tcp://127.0.0.1:9", deadline_seconds: float = 60.0
    ) -> None:
        self.rng = rng
        self.me = me
        self._endpoint = endpoint
        self._deadline_seconds = deadline_seconds
        self._num_messages = 0
        self.grants: deque[Grant] = deque(maxlen=4)  # the last ones that the worker sent

    def message(self) -> bytes:
        rng = self.rng
        self._num_messages += 1
        body = self.body()
        to = self.me if rng.random() < 0.95 else rng.choice([None, *PARTIES])
        usual = DECODE if isinstance(body, SAID_BY_DECODE) else PREFILL if isinstance(body, SAID_BY_PREFILL) else ROUTER
        sender = usual if rng.random() < 0.9 else rng.choice([*PARTIES, self.me])
        envelope: Any = [self._plain(sender), self._plain(to), self._plain(body)]
        for _ in range(rng.choice([0] * 8 + [1, 1, 2, 5])):
            envelope = self._mutated(envelope)
        data = b"SP" + SCHEMA_VERSION.to_bytes(2, "big") + msgspec.msgpack.encode(envelope)
        return self._broken(data) if rng.random() < 0.05 else data

    def body(self) -> Body:
        """A message that is sound by itself, whatever it means to its receiver."""
        rng, key = self.rng, self.key()
        tokens = array("i", [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 4, 10, 10, 10, 30, 63]))])
        prompt = array("i", [rng.randrange(4), *range(1, 10)])
        output = list(tokens[: rng.choice([0, 0, 0, 1, 3])])
        if rng.random() < 0.1:
            tokens[-1] = rng.choice([VOCAB, 2**31 - 1])
        sampling = SamplingParams(max_tokens=rng.choice([1, 2, 5, 40]), seed=rng.getrandbits(64))
        prefill = PeerRef(PREFILL if rng.random() < 0.95 else rng.choice(PARTIES), self._endpoint)
        decode = PeerRef(DECODE if rng.random() < 0.95 else rng.choice(PARTIES), "")
        longest = self._deadline_seconds
        seconds = rng.choice([0.0, 0.01, 1.0, longest])
        makers: list[tuple[int, Callable[[], Body]]] = [
            (2, lambda: PrefillRequest(key, tokens, sampling, decode, seconds, output)),
            (3, lambda: PrefillRequest(key, prompt, sampling, decode, longest, late_grant=rng.random() < 0.5)),
            (2, lambda: DecodeRequest(key, tokens, sampling, prefill, seconds, output)),
            (3, lambda: DecodeRequest(key, prompt, sampling, prefill, longest, late_grant=rng.random() < 0.5)),
            (2, lambda: GrantRequest(key)),
            (1, lambda: GrantDelayed(key)),
            (2, lambda: LocalRequest(key, tokens, sampling, seconds, output)),
            (2, lambda: LocalRequest(key, prompt, sampling, longest, [], prefill)),
            (2, lambda: PrefillRequest(key, prompt, sampling, decode, longest, prefix=rng.choice([prefill, decode]))),
            (2, lambda: PrefixGrant(key, rng.choice([0, 1, 9]), self._hashes(), rng.choice([0.0, 0.1, 10.0]))),
            (1, lambda: Abort(key)),
            (1, lambda: Introduce(prefill)),
            (1, lambda: PeerGone(prefill.party)),
            (1, lambda: ReadClock(seconds)),
            (1, lambda: ClockReading(seconds, rng.choice([0.0, 1.0, 1e9]))),
            (1, lambda: Profile("p", rng.choice([1, 100_000]), seconds)),
            (1, lambda: Profiled("p", "no", "", 1, 1.0, 0.5, 0.0)),
            (1, lambda: PeerHello(LAYOUT)),
            (
                3,
                lambda: PeerWelcome(
                    LAYOUT, "sim", [1 << 20], [RankMemory(b"x", [REGION], host=rng.choice([None, HOST]))]
                ),
            ),
            (1, lambda: PeerRefused("no")),
            (
                2,
                lambda: Grant(key, rng.choice([1, 4, 30, len(tokens)]), rng.choice([0, 4, 8]), rng.choice([0.1, 10.0])),
            ),
            (4, lambda: Grant(key, 10, rng.choice([0, 0, 4, 8]), 10.0, rng.random() < 0.5)),
            (9, lambda: self._offer(key)),
            (2, lambda: OfferAck(key, [rng.randrange(5)], rng.random() < 0.5, rng.choice([0, 0, 0, 1]))),
            (1, lambda: Release(key, rng.random() < 0.5)),
            (1, lambda: Withdrawn(key, "because", rng.random() < 0.3)),
            (1, lambda: StepTokens([TokenDelta(key, rng.randrange(5), output) for _ in range(rng.randrange(4))])),
            (1, lambda: RequestFailed(key, rng.choice(list(FailureCode)), "no")),
            (1, lambda: Heartbeat(WorkerLoad(num_waiting=rng.getrandbits(20)))),
            (1, lambda: rng.choice([Leave(), Draining(), Registered(), RegisterRefused("no")])),
            (1, lambda: Register(self._info())),
        ]
        (maker,) = rng.choices([maker for _, maker in makers], [weight for weight, _ in makers])
        return maker()

    def key(self) -> RequestKey:
        """Mostly one of a few that are talked about for a while, then over for good."""
        rng = self.rng
        number = rng.choice([rng.randrange(3), rng.randrange(3), rng.randrange(3), rng.randrange(1000)])
        return RequestKey(f"r{self._num_messages // 32 + number}", rng.choice([0, 0, 0, 0, 0, 1]))

    def _info(self) -> WorkerInfo:
        rng = self.rng
        party = rng.choice(PARTIES)
        sizes = [rng.choice([1, 64, 2**31 - 1]) for _ in range(4)]
        return WorkerInfo(party, rng.choice(list(Role)), self._endpoint, 1, LAYOUT, *sizes)

    def _hashes(self) -> list[bytes]:
        """Return hashes of blocks that may be cached here, or of none."""
        if self.rng.random() < 0.2:
            return [self.rng.randbytes(16) for _ in range(self.rng.choice([1, 2000]))]
        hashes: list[bytes] = []
        extend_hashes(hashes, root_hash(LAYOUT), [self.rng.randrange(4), *range(1, 10)], LAYOUT.block_size)
        return hashes

    def _offer(self, key: RequestKey) -> Offer:
        """The right one for a grant that was heard, or one for a prompt of ten tokens, which may be right."""
        rng = self.rng
        if self.grants and rng.random() < 0.7:
            grant = rng.choice(self.grants)
            first, end = grant.num_cached_tokens // 4, -(-grant.num_prompt_tokens // 4)
            ids = [(first + index) % NUM_BLOCKS for index in range(end - first)]
            blocks = [OfferedBlock(block_id, 1000 + block_id) for block_id in ids]
            if rng.random() < 0.2 and grant.num_prompt_tokens > 4 * (end - 1):
                return Offer(grant.key, [OfferedSpan(0, first, blocks[:-1])], 4 * (end - 1))
            revision = rng.choice([0, 0, 0, 1, 2])
            if revision:  # some are elsewhere
                places = [rng.choice([block.block_id, NUM_BLOCKS + n]) for n, block in enumerate(blocks)]
                blocks = [OfferedBlock(place, 1000 + place) for place in places]
            token = rng.randrange(VOCAB)
            return Offer(grant.key, [OfferedSpan(0, first, blocks)], grant.num_prompt_tokens, True, [token], revision)
        first = rng.choice([0, 0, 0, 1, 2])
        count = rng.choice([0, 1, 2, 3 - first, 3 - first, 3 - first, 4])
        blocks = [OfferedBlock(first + index, 1000 + first + index) for index in range(count)]
        last = rng.random() < 0.5
        num_tokens = min((first + count) * 4, 10) if last else (first + count) * 4
        return Offer(key, [OfferedSpan(0, first, blocks)], num_tokens, last, [rng.randrange(VOCAB)] if last else [])

    def _plain(self, value: Any) -> Any:
        """Dicts, lists and scalars, as on the wire."""
        return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=plain)

    def _mutated(self, node: Any) -> Any:
        """A copy with one value changed, removed, repeated or replaced, somewhere."""
        rng = self.rng
        if isinstance(node, dict) and node and rng.random() < 0.9:
            name = rng.choice(list(node))
            match rng.randrange(12):
                case 0:
                    return {key: value for key, value in node.items() if key != name}
                case 1:
                    return node | {rng.choice(["surprise", "", name + "s", "type"]): self._value()}
                case _:
                    return node | {name: self._mutated(node[name])}
        if isinstance(node, list | tuple) and node and rng.random() < 0.9:
            index = rng.randrange(len(node))
            match rng.randrange(10):
                case 0:
                    return [*node[:index], *node[index + 1 :]]
                case 1:
                    return [*node, *node] * (200 if rng.random() < 0.1 and isinstance(node[0], int) else 1)
                case _:
                    return [*node[:index], self._mutated(node[index]), *node[index + 1 :]]
        if isinstance(node, int) and not isinstance(node, bool) and rng.random() < 0.8:
            near = rng.choice([node + 1, node - 1, -node, node ^ (1 << rng.randrange(16))])
            return rng.choice([*HOSTILE_NUMBERS, *[max(-(2**63), min(2**64 - 1, near))] * 40])
        return self._value()

    def _value(self) -> Any:
        return self.rng.choice(HOSTILE_NUMBERS + HOSTILE_VALUES)

    def _broken(self, data: bytes) -> bytes:
        rng, mangled = self.rng, bytearray(data)
        for _ in range(rng.randint(1, 6)):
            position = rng.randrange(len(mangled) + 1)
            match rng.randrange(4):
                case 0:
                    mangled[position : position + 1] = rng.randbytes(1)
                case 1:
                    del mangled[position : position + rng.randint(1, 8)]
                case 2:
                    mangled[position:position] = rng.randbytes(rng.randint(1, 8))
                case _:
                    del mangled[position:]
        return bytes(mangled)


class FuzzedWorker:
    """A core that hears a fuzzer, with the loop, the connector and the device played by chance.

    :class:`core_driver.Worker` checks the invariants after every event, and that nothing stays due.
    """

    def __init__(self, seed: int, role: Role) -> None:
        self.rng = random.Random(seed)
        self.me = {Role.PREFILL: PREFILL, Role.DECODE: DECODE, Role.MIXED: Party("mixed-0", 7)}[role]
        num_blocks = self.rng.choice([NUM_BLOCKS, 8]) if role is Role.PREFILL else NUM_BLOCKS
        self.worker = Worker(role, self.me, num_blocks=num_blocks, num_slots=self.rng.choice([0, 12]))
        self.core = self.worker.core
        self.fuzzer = MessageFuzzer(self.rng, self.me)
        self.reads: dict[int, ReadCommand] = {}
        self.connecting: list[Party] = []
        self.plan: StepPlan | None = None
        self.num_refused = 0

    def run(self, num_messages: int) -> None:
        for index in range(num_messages):
            self.hear(self.fuzzer.message())
            while self.rng.random() < 0.7:
                self.progress()
            if index % 256 == 0:
                self.assert_bounded()

    def hear(self, data: bytes) -> None:
        try:
            envelope = decode(data)
        except WireError:
            self.num_refused += 1
            return
        self.core.handle(envelope, self.worker.now)
        self.settle()

    def settle(self, seconds: float = 0.0) -> None:
        self.perform(self.worker.tick(seconds))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, Grant() as grant):
                    self.fuzzer.grants.append(grant)
                case StartRead(command):
                    self.reads[command.read_id] = command
                case Connect(peer, _):
                    self.connecting.append(peer)
                case Disconnect(peer):
                    for read_id in [i for i, command in self.reads.items() if command.peer == peer]:
                        self.end_read(read_id, "disconnected")

    def progress(self) -> None:
        """Something happens outside: a read ends, a connection comes up, a step ends, time passes."""
        rng = self.rng
        match rng.randrange(7):
            case 0 if self.reads:
                self.end_read(rng.choice(list(self.reads)), "planted" if rng.random() < 0.05 else None)
            case 1 if self.connecting:
                peer = self.connecting.pop(rng.randrange(len(self.connecting)))
                self.perform(self.worker.event(PeerConnected(peer, "planted" if rng.random() < 0.05 else None)))
            case 2 | 3:
                self.step()
            case 5 if self.worker.copies:
                self.perform(self.worker.end_copy(rng.randrange(len(self.worker.copies)), is_good=rng.random() < 0.9))
            case 4:
                self.settle(rng.choice([0.0, 0.01, 0.01, 0.01, 0.1, 0.1, 0.1, 0.6, 3.0]))

    def step(self) -> None:
        if self.plan is None:
            self.plan = self.worker.plan()
            self.settle()
            return
        plan, self.plan = self.plan, None
        if self.rng.random() < 0.1:
            self.core.fail_step("planted", self.worker.now)
            self.settle()
        else:
            self.perform(self.worker.commit(plan, self.rng.randrange(VOCAB)))

    def end_read(self, read_id: int, error: str | None) -> None:
        command = self.reads.pop(read_id)
        generations = [1000 + block_id for block_id in command.remote_blocks] if error is None else []
        if generations and self.rng.random() < 0.2:  # some were taken meanwhile
            generations[self.rng.randrange(len(generations))] += 1
        self.perform(self.worker.event(ReadResult(read_id, error, generations)))

    def assert_bounded(self) -> None:
        state, source, sink = self.core.state, source_of(self.core), sink_of(self.core)
        assert len(state.sequences) <= PROTOCOL.max_requests
        assert len(state.tombstones) <= PROTOCOL.max_tombstones
        assert source.num_live <= PROTOCOL.max_requests + PROTOCOL.max_parked
        assert not state.outbox.effects
        assert len(sink.peers) <= PROTOCOL.max_peers
        assert sink.sink.num_reads_in_flight == len(self.reads)

    def calm_down(self) -> None:
        """Everything outside comes to its end, and all time-outs pass: nothing may be left."""
        for _ in range(400):
            for read_id in list(self.reads):
                if read_id in self.reads:
                    self.end_read(read_id, None)
            self.perform(self.worker.end_copies())
            while self.connecting:
                self.perform(self.worker.event(PeerConnected(self.connecting.pop(), None)))
            self.step()
            self.settle(0.5)
        self.assert_bounded()
        while self.plan is not None:
            self.step()
        self.worker.assert_idle()
