"""Digests of KV blocks, for ``--verify-kv``: the source's travel with its offers, the reader's are of what landed.

A digest is of a whole block as it is in memory: a read copies whole blocks, and once a block is offered nobody writes
to it, the unused end of a prompt's last block included.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from splitserve.kvconnector.memory import KVMemory

DIGEST_BYTES = 16

DigestBlocks: TypeAlias = Callable[[Sequence[int]], list[bytes]]
"""The digest of each of some blocks of this worker, by their ids. Called from several threads."""


def no_digests(block_ids: Sequence[int]) -> list[bytes]:
    """Verification is off: empty ones, which match everything."""
    return [b""] * len(block_ids)


def digests_of(memory: KVMemory) -> DigestBlocks:
    """BLAKE2b of each block's bytes, which are copied to the host first where they aren't there."""

    def digest_blocks(block_ids: Sequence[int]) -> list[bytes]:
        return [_digest(memory.blocks[block_id]) for block_id in block_ids]

    return digest_blocks


def first_digests_of(memory: KVMemory) -> DigestBlocks:
    """As :func:`digests_of`, but of each content as it was when it was first asked for.

    So a block that is damaged while it is cached doesn't pass for intact when a later prompt offers it again.
    """
    digest_blocks = digests_of(memory)
    known: dict[int, tuple[int, bytes]] = {}  # by block: its generation, the digest of that content

    def first_digests(block_ids: Sequence[int]) -> list[bytes]:
        for block_id in block_ids:
            generation = int(memory.generations[block_id])
            if block_id not in known or known[block_id][0] != generation:
                known[block_id] = generation, digest_blocks([block_id])[0]
        return [known[block_id][1] for block_id in block_ids]

    return first_digests


def _digest(block: torch.Tensor) -> bytes:
    data = block.contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(data.data, digest_size=DIGEST_BYTES).digest()
