"""State shared by the parts of a worker's core: its identity, blocks, live sequences, outbox and counters."""

from dataclasses import dataclass, field
from typing import NamedTuple

from splitserve.common.bounded import ExpiringMap
from splitserve.engine.block_manager import BlockManager
from splitserve.engine.effects import Outbox
from splitserve.engine.sequence import Sequence
from splitserve.engine.stage import Stage
from splitserve.kvconnector.layout.shape import num_blocks_for
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.counters import WorkerCounters
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.messages.logprobs import Logprobs
from splitserve.protocol.messages.requests import (
    FailureCode,
    PromptLogprobs,
    RequestFailed,
    StepTokens,
    TokenDelta,
)
from splitserve.protocol.request import Party, RequestKey
from splitserve.protocol.step import ScheduledChunk
from splitserve.protocol.token_ids import highest

DRAINING_REASON = "this worker is draining"
MAX_SCORES_PER_MESSAGE = 1 << 14  # tokens of a prompt: less than 3 MiB


class Tombstone(NamedTuple):
    """The reason for a request's end; ``attempt_over``: the attempt has ended on every worker."""

    reason: str
    attempt_over: bool


@dataclass(slots=True)
class EngineState:
    """Everything that the core of a worker and its parts share."""

    me: Party  # this incarnation of the worker
    layout: LayoutRecord  # its KV blocks, as peers see them
    blocks: BlockManager  # its memory
    protocol: ProtocolConfig  # time-outs and bounds
    max_model_len: int  # tokens of a prompt and its output
    vocab_size: int  # token ids are below it
    outbox: Outbox = field(default_factory=Outbox)  # effects for the loop to perform
    sequences: dict[RequestKey, Sequence] = field(default_factory=dict)  # every request in this worker, in any stage
    counters: WorkerCounters = field(init=False)  # since start; the tiers add to them, too
    tombstones: ExpiringMap[RequestKey, Tombstone] = field(init=False)  # requests that are over
    deltas: dict[Party, list[TokenDelta]] = field(default_factory=dict)  # new tokens by router, until the next flush
    is_draining: bool = False  # new requests are rejected, those that are here go on
    frozen_since: float | None = None  # the begin of a freeze: no step begins, no request's time passes
    freeze_number: int = 0  # of the SetFrozen that holds; 0 before the first
    has_news: bool = False  # the next heartbeat is sent at once

    def __post_init__(self) -> None:
        self.counters = self.blocks.tiers.counters
        self.tombstones = ExpiringMap(
            max_size=self.protocol.max_tombstones, ttl_seconds=self.protocol.tombstone_seconds
        )

    @property
    def is_frozen(self) -> bool:
        return self.frozen_since is not None

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def group_block_bytes(self) -> list[int]:
        """Bytes of a block of each group, on one rank."""
        cache = self.layout.cache
        return [cache.blocks(group).block_bytes for group in range(len(cache.groups))]

    def why_impossible(self, sequence: Sequence) -> str | None:
        """Return why a request can never run here, or None."""
        tokens = sequence.token_ids
        if not tokens:
            return "the prompt is empty"
        if len(tokens) >= self.max_model_len:
            return f"the prompt has {len(tokens)} tokens; at most {self.max_model_len - 1} fit this worker"
        needed = num_blocks_for(len(tokens) + 1, self.blocks.block_size)
        available = min(pool.num_blocks for pool in self.blocks.pools)
        if needed > available:
            return f"the prompt needs {needed} KV blocks; this worker has {available}"
        if highest(tokens) >= self.vocab_size:
            return f"a token id is outside the vocabulary of {self.vocab_size}"
        for name, token_ids in sequence.sampling.token_ids():
            if max(token_ids) >= self.vocab_size:
                return f"{name} holds a token id outside the vocabulary of {self.vocab_size}"
        return None

    def add_delta(self, sequence: Sequence, delta: TokenDelta) -> None:
        """Put new tokens into the step's message to the router that asked for them."""
        self.deltas.setdefault(sequence.reply_to, []).append(delta)

    def send_prompt_logprobs(self, sequence: Sequence, chunk: ScheduledChunk, logprobs: Logprobs) -> None:
        """Send log-probabilities of a prompt's tokens, for each of its choices, in messages of bounded size."""
        assert chunk.scored is not None
        position, count = chunk.start + chunk.scored.first_row + 1, len(chunk.scored.token_ids)
        for start in range(0, count, MAX_SCORES_PER_MESSAGE):
            part = logprobs.between(start, min(start + MAX_SCORES_PER_MESSAGE, count))
            for key in sequence.choice_keys:
                self.outbox.send(sequence.reply_to, PromptLogprobs(key, position + start, part))

    def flush_deltas(self) -> None:
        """One message per router for everything since the last flush."""
        for router, deltas in self.deltas.items():
            self.outbox.send(router, StepTokens(deltas=deltas))
        self.deltas.clear()

    def fail(self, sequence: Sequence, code: FailureCode, message: str) -> None:
        """Report to the router that this worker has failed a request, and with it the siblings that haven't begun."""
        for key in sequence.choice_keys:
            self.outbox.send(sequence.reply_to, RequestFailed(key=key, code=code, message=message))

    def leave_tombstone(self, key: RequestKey, reason: str, now: float, *, attempt_over: bool = False) -> None:
        """Forget a request, and remember that it's over, so that late messages don't bring it back."""
        self.sequences.pop(key, None)
        self.tombstones.put(key, Tombstone(reason, attempt_over), now)

    def forget_prefixes(self) -> None:
        """Let nothing that was computed so far be reused, nor what the present requests compute from it."""
        for sequence in self.sequences.values():
            sequence.keeps_to_itself = True
        self.blocks.forget_prefixes()

    def drop_blocks(self, sequence: Sequence) -> None:
        """Give a sequence's blocks back: now, or when what touches them has completed."""
        sequence.enter(Stage.RELEASED)
        if not sequence.is_touched:
            self.blocks.give_back(sequence)
