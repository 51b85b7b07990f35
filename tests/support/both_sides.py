"""Both sides of a hand-over, driven against each other."""

import random

from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.handover.pull import Pull, PullSpan
from splitserve.protocol.handover.reads import ReadCommand, ReadResult
from splitserve.protocol.handover.sink import SinkHandover
from splitserve.protocol.handover.source import SourceHandover, SourceState
from splitserve.protocol.messages.handover import Grant, Offer, OfferAck, OfferedBlock
from splitserve.protocol.request import Party, RequestKey

BLOCK_SIZE = 4


KEY = RequestKey("r", 0)


PREFILL, DECODE = Party("prefill", 1), Party("decode", 2)


CONFIG = ProtocolConfig(max_blocks_per_read=3, max_reads_in_flight_per_request=2)


NUM_PEER_BLOCKS = 100
PEER_BLOCKS = (NUM_PEER_BLOCKS,)  # by group


def make_sink(
    num_prompt_tokens: int = 18,
    num_cached_tokens: int = 0,
    config: ProtocolConfig = CONFIG,
    *,
    reads_host_tier: bool = False,
) -> SinkHandover:
    first_block = num_cached_tokens // BLOCK_SIZE
    num_blocks = -(-num_prompt_tokens // BLOCK_SIZE)
    pull = Pull(
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        block_size=BLOCK_SIZE,
        spans=[PullSpan(first_block, list(range(50, 50 + num_blocks - first_block)), 1000)],
        reads_host_tier=reads_host_tier,
    )
    return SinkHandover(KEY, PREFILL, pull, config, 0.0)


def blocks(*block_ids: int) -> list[OfferedBlock]:
    return [OfferedBlock(block_id, 1000 + block_id) for block_id in block_ids]


def poll(sink: SinkHandover, now: float, *, can_read: bool = True) -> tuple[list[Grant | OfferAck], list[ReadCommand]]:
    poll.next_read_id += 100  # type: ignore[attr-defined]
    actions = sink.poll(now, can_read=can_read, next_read_id=poll.next_read_id)  # type: ignore[attr-defined]
    return actions.messages, actions.reads


poll.next_read_id = 0  # type: ignore[attr-defined]


def verified(command: ReadCommand) -> ReadResult:
    return ReadResult(command.read_id, None, [1000 + block_id for block_id in command.remote_blocks])


class BothSides:
    """Source and sink over a network that loses, repeats and reorders; memory is a generation per block."""

    def __init__(self, seed: int, num_prompt_tokens: int, num_cached_tokens: int, loss: float) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.sink = make_sink(num_prompt_tokens, num_cached_tokens)
        self.source: SourceHandover | None = None
        self.num_prompt_tokens = num_prompt_tokens
        self.remote_ids = self.random.sample(range(NUM_PEER_BLOCKS), -(-num_prompt_tokens // BLOCK_SIZE))
        self.generations = [self.random.getrandbits(64) for _ in range(NUM_PEER_BLOCKS)]
        self.in_flight: list[tuple[float, Grant | OfferAck | Offer]] = []
        self.reads: list[tuple[float, ReadCommand]] = []
        self.read_blocks: dict[int, int] = {}
        self.next_read_id = 0

    def send(self, message: Grant | OfferAck | Offer) -> None:
        copies = 0 if self.random.random() < self.loss else self.random.choice([1, 1, 2])
        self.in_flight += [(self.now + self.random.uniform(0, 0.4), message) for _ in range(copies)]

    def deliver(self, message: Grant | OfferAck | Offer) -> None:
        if isinstance(message, Offer):
            self.sink.on_offer(message, PEER_BLOCKS, self.now)
        elif isinstance(message, OfferAck):
            if self.source is not None:
                self.source.acknowledge(message)
        elif self.source is None:
            self.source = SourceHandover(message, DECODE, BLOCK_SIZE, CONFIG, self.now)
        else:
            self.source.renew(self.now)

    def compute(self) -> None:
        """Prefill completes a chunk of a random length."""
        source = self.source
        if source is None or source.state not in (SourceState.GRANTED, SourceState.OFFERING):
            return
        num_blocks = source.num_offered_blocks() + self.random.randint(0, 4)
        if num_blocks * BLOCK_SIZE < self.num_prompt_tokens:
            if num_blocks > source.num_offered_blocks():
                source.offer([self.offered(source.num_offered_blocks(), num_blocks)], num_blocks * BLOCK_SIZE, self.now)
        else:
            rest = self.offered(source.num_offered_blocks(), len(self.remote_ids))
            source.offer_last([rest], self.num_prompt_tokens, [7], self.now)

    def offered(self, start: int, end: int) -> list[OfferedBlock]:
        return [OfferedBlock(block_id, self.generations[block_id]) for block_id in self.remote_ids[start:end]]

    def end_read(self, command: ReadCommand) -> None:
        for local, remote in zip(command.local_blocks, command.remote_blocks, strict=True):
            assert local not in self.read_blocks, "a block is read twice"
            self.read_blocks[local] = remote
        generations = [self.generations[block_id] for block_id in command.remote_blocks]
        self.sink.on_read_result(ReadResult(command.read_id, None, generations), self.now)

    def step(self) -> None:
        self.now += 0.05
        due = [message for time, message in self.in_flight if time <= self.now]
        self.in_flight = [entry for entry in self.in_flight if entry[0] > self.now]
        self.random.shuffle(due)
        for message in due:
            self.deliver(message)
        if self.random.random() < 0.3:
            self.compute()
        for _, command in [read for read in self.reads if read[0] <= self.now]:
            self.end_read(command)
        self.reads = [read for read in self.reads if read[0] > self.now]
        actions = self.sink.poll(self.now, can_read=True, next_read_id=self.next_read_id)
        self.next_read_id += len(actions.reads)
        self.reads += [(self.now + self.random.uniform(0, 0.5), command) for command in actions.reads]
        for message in actions.messages:
            self.send(message)
        if self.source is not None and (message := self.source.poll(self.now)) is not None:
            self.send(message)
