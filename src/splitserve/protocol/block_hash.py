"""Names for the content of KV blocks: a chain of 128-bit hashes over the parent's hash and the block's token ids.

The root covers everything else that the bytes depend on, so two workers agree on a hash only where the KV is
interchangeable. BLAKE2b is cryptographic: a client can't craft a prompt that hits another prompt's blocks.
"""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from splitserve.protocol.memory_records import LayoutRecord

DIGEST_BYTES = 16
_INT64_BYTES = 8


@functools.lru_cache(maxsize=64)
def root_hash(layout: LayoutRecord) -> bytes:
    """Hash that every chain without a salt starts from: model, weights version, KV dtype and block size."""
    fields = (layout.model, layout.weights_version, layout.dtype, str(layout.block_size), "")
    return hashlib.blake2b("\x00".join(fields).encode(), digest_size=DIGEST_BYTES).digest()


def salted_root(root: bytes, cache_salt: str) -> bytes:
    """Return the hash that the chains of requests with ``cache_salt`` start from; ``root`` itself for an empty salt.

    Requests share KV only with requests of the same salt: a client can't find out by its latency what others sent.
    """
    if not cache_salt:
        return root
    return hashlib.blake2b(root + b"cache salt\x00" + cache_salt.encode(), digest_size=DIGEST_BYTES).digest()


def shard_root(layout: LayoutRecord, rank: int) -> bytes:
    """Return the root hash of ``rank``'s part of the blocks whose chains start from :func:`root_hash`.

    Copies outside of the worker are named by it, too, since ranks of other numbers, or of workers of other sizes, hold
    other heads.
    """
    root = root_hash(layout)
    if layout.tensor_parallel_size == 1:
        return root
    shard = f"rank {rank} of {layout.tensor_parallel_size}"
    return hashlib.blake2b(root + shard.encode(), digest_size=DIGEST_BYTES).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append to ``hashes`` the hashes of those full blocks of ``token_ids`` that it lacks."""
    first, end = len(hashes), len(token_ids) // block_size
    if first >= end:
        return
    data = _as_int64(token_ids[first * block_size : end * block_size])
    parent, stride = hashes[-1] if hashes else root, _INT64_BYTES * block_size
    blake2b = hashlib.blake2b  # a function of ours for each block would take a third longer
    for start in range(0, len(data), stride):
        parent = blake2b(parent + data[start : start + stride], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)


def _as_int64(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype=np.int64).tobytes()
