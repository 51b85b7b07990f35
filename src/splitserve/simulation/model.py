"""The simulator's tiny model and its settings.

The KV of a position is a number per head that depends on all tokens up to it, and a drawn token depends on all KV that
its step reads: a block with wrong content anywhere gives a wrong token, which :meth:`Model.expected_output` reveals.
Every other worker has two ranks with a head each, which write and read at times of their own.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from splitserve.protocol.cache_layout import CacheGroup, Field, GroupKind
from splitserve.protocol.config import ProtocolConfig
from splitserve.protocol.memory_records import LayoutRecord
from splitserve.protocol.request import Party, SamplingParams
from splitserve.protocol.step import Draw, StepPlan

VOCAB = 50
BLOCK_SIZE = 4
NUM_HEADS = 2
LAYOUT = LayoutRecord("sim", "w", "float32", BLOCK_SIZE, 1, 1, 1)
PROTOCOL = ProtocolConfig(request_deadline_seconds=60.0, max_blocks_per_read=4, tombstone_seconds=60.0)
ROUTER = Party("router", 1)
"""The first router; the others are called router-1, router-2, ..."""


def is_router(party: Party) -> bool:
    """Return whether a party is a router."""
    return party.engine_id.startswith(ROUTER.engine_id)


class Head(Protocol):
    """The part of one worker's model that draws tokens."""

    def draw(self, plan: StepPlan, read: Mapping[int, Sequence[int]]) -> list[Draw | None]:
        """Return the draw of each chunk; ``read`` is the KV, all heads', of those that draw. Steps come in order."""


class Model(Protocol):
    """The rule for drawing tokens from KV, the same on all workers."""

    def new_head(self) -> Head:
        """Return the part that draws on one worker, for the time that it lives."""

    def expected_output(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        """Return the tokens that a single undisturbed worker draws."""


class HashedModel:
    """Draws tokens by a hash of KV, seed and position. The model and the head of each worker."""

    def new_head(self) -> Head:
        """See :meth:`Model.new_head`."""
        return self

    def draw(self, plan: StepPlan, read: Mapping[int, Sequence[int]]) -> list[Draw | None]:
        """See :meth:`Head.draw`."""
        drawn: list[Draw | None] = [None] * len(plan.chunks)
        for index, kv in read.items():
            chunk = plan.chunks[index]
            assert chunk.sample is not None
            tokens = [
                mix(*kv, draw_key(spec.seed, spec.choice), spec.position) % VOCAB
                for spec in (chunk.sample, *chunk.others)
            ]
            drawn[index] = Draw((tokens[0],), others=tuple(Draw((token,)) for token in tokens[1:]))
        return drawn

    def expected_output(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        """See :meth:`Model.expected_output`."""
        return output_of(
            prompt,
            sampling,
            lambda kv, output: mix(*kv, draw_key(sampling.seed, sampling.choice), len(prompt) + len(output)) % VOCAB,
        )


def layout_of(window: int) -> LayoutRecord:
    """Return the layout of a cache with a full group, and a window group unless ``window`` is 0."""
    if not window:
        return LAYOUT
    fields = (Field("kv", "float32", 1, 8 * BLOCK_SIZE),)
    full = CacheGroup(GroupKind.FULL, (0,), BLOCK_SIZE, fields)
    tail = CacheGroup(GroupKind.WINDOW, (1,), BLOCK_SIZE, fields, window)
    return msgspec.structs.replace(LAYOUT, num_layers=2, groups=(full, tail))


def tail_kv(kv: int) -> int:
    """Return the KV that a window group has of a position, from that of the full group: a tag of the same prefix."""
    return mix(kv, 7)


def mix(*values: int) -> int:
    """Return a number of 56 bits that depends on all ``values``."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=7).digest(), "big")


def next_kv(kv: list[int], token: int, head: int) -> int:
    """Return a head's KV of the position after those of ``kv``."""
    return mix(kv[-1] if kv else 0, token, head)


def draw_key(seed: int, choice: int) -> int:
    """Return the number that keys the draws of one choice."""
    return seed + (choice << 64)


def output_of(prompt: list[int], sampling: SamplingParams, draw: Callable[[list[int], list[int]], int]) -> list[int]:
    """Return a request's output tokens: ``draw`` gets the KV and the output so far."""
    heads: list[list[int]] = [[] for _ in range(NUM_HEADS)]
    output: list[int] = []
    while True:
        for head, kv in enumerate(heads):
            for token in [*prompt, *output][len(kv) :]:
                kv.append(next_kv(kv, token, head))
        output.append(draw([number for kv in heads for number in kv], output))
        if sampling.finish_reason(output[-1], len(output)):
            return output


def score_of(kv: list[int], token: int) -> float:
    """Return the log-probability of a token after ``kv``, that of all heads one after the other; float32 is exact."""
    return -(mix(*kv, token) % 4096) / 64


def expected_scores(tokens: list[int]) -> list[float]:
    """Return the log-probabilities of all tokens but the first."""
    heads: list[list[int]] = [[] for _ in range(NUM_HEADS)]
    scores = []
    for token, following in pairwise(tokens):
        for head, kv in enumerate(heads):
            kv.append(next_kv(kv, token, head))
        scores.append(score_of([number for kv in heads for number in kv], following))
    return scores
