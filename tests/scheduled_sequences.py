"""Sequences, blocks and schedulers for tests of scheduling. Not a test module."""

import zlib

import numpy as np

from splitserve.decode.scheduler import DecodeScheduler
from splitserve.kvconnector.block_pool import BlockPool
from splitserve.kvconnector.tiers import Tiers
from splitserve.prefill.scheduler import Planned, PrefillScheduler
from splitserve.prefill.sequence import BlockManager, Sequence
from splitserve.request import Party, RequestKey, SamplingParams

BLOCK_SIZE = 4
ROUTER = Party("router", 1)


def make_blocks(num_blocks: int = 64) -> BlockManager:
    pool = BlockPool(np.zeros(num_blocks, dtype=np.uint64), first_generation=1)
    return BlockManager(pool, BLOCK_SIZE, b"root", Tiers(pool))


def make_sequence(name: str, tokens: int | list[int], *, num_output: int = 0, max_tokens: int = 100) -> Sequence:
    """Distinct tokens by name, so that no two share a prefix by chance."""
    token_ids = (
        [zlib.crc32(f"{name} {i}".encode()) % 10_000 for i in range(tokens)]
        if isinstance(tokens, int)
        else list(tokens)
    )
    sampling = SamplingParams(max_tokens=max_tokens)
    return Sequence(RequestKey(name), ROUTER, token_ids, len(token_ids) - num_output, sampling, deadline=100.0)


def complete(blocks: BlockManager, planned: list[Planned]) -> None:
    """What the core does with a step's results, but for drawing tokens."""
    for sequence, chunk in planned:
        sequence.num_computed += len(chunk.token_ids)
        blocks.publish_computed(sequence)


def lengths(planned: list[Planned]) -> list[tuple[str, int]]:
    return [(sequence.key.request_id, len(chunk.token_ids)) for sequence, chunk in planned]


def make_decode(
    num_blocks: int = 64, max_num_seqs: int = 4, max_num_prefill_tokens: int = 1000
) -> tuple[BlockManager, DecodeScheduler]:
    blocks = make_blocks(num_blocks)
    prefill = PrefillScheduler(blocks, max_num_seqs=max_num_seqs)
    return blocks, DecodeScheduler(
        blocks, prefill, max_num_seqs=max_num_seqs, max_num_prefill_tokens=max_num_prefill_tokens
    )
