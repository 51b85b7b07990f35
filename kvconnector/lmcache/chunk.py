"""Format of a chunk in LMCache: a header, then the blocks as they are on the device.

LMCache hands out its own memory, and reclaims it when it considers this worker gone. A key can therefore lead to other
content than it promises: a worker died half-way through writing, or wrote into memory that had been reassigned. So each
block is checked against its own hash and checksum, computed over the bytes that landed: a mismatch is a miss.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]

ALIGNMENT = 4096
_MAGIC = b"SPLITLM2"
_HEAD = struct.Struct("<8s16sIQ")  # magic, root hash, blocks, bytes of a block
_ENTRY = struct.Struct("<16s16s")  # block's hash, checksum of its bytes
_PAGE_BYTES = 4096
_PAGE_WORDS = _PAGE_BYTES // 8


class ChunkFormat:
    """Chunks of ``num_blocks`` blocks of ``block_bytes`` whose hash chains begin at ``root``."""

    def __init__(self, root: bytes, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._head = _HEAD.pack(_MAGIC, root, num_blocks, block_bytes)
        size = _HEAD.size + num_blocks * _ENTRY.size
        self._data_offset = -(-size // ALIGNMENT) * ALIGNMENT
        self.num_bytes = self._data_offset + num_blocks * block_bytes

    def write(self, chunk: Bytes, hashes: Sequence[bytes], blocks: Iterable[Bytes]) -> None:
        """Write a chunk.

        ``chunk``: uint8 ``[num_bytes]``; ``blocks``: all blocks of the chunk, uint8 ``[block_bytes]`` each. The header
        is written last: until then the chunk is not valid.
        """
        assert len(hashes) == self.num_blocks, "a chunk is written as a whole"
        chunk[: _HEAD.size] = 0
        entries = b""
        for number, (block_hash, block) in enumerate(zip(hashes, blocks, strict=True)):
            np.copyto(self.block(chunk, number), block)
            entries += _ENTRY.pack(block_hash, checksum(block))
        chunk[_HEAD.size : _HEAD.size + len(entries)] = np.frombuffer(entries, dtype=np.uint8)
        chunk[: _HEAD.size] = np.frombuffer(self._head, dtype=np.uint8)

    def block(self, chunk: Bytes, number: int) -> Bytes:
        start = self._data_offset + number * self.block_bytes
        return chunk[start : start + self.block_bytes]

    def entries(self, chunk: Bytes) -> list[bytes]:
        """Return the header's entry of each block; an empty list if the chunk does not have our header."""
        if chunk[: _HEAD.size].tobytes() != self._head:
            return []
        data = chunk[_HEAD.size : _HEAD.size + self.num_blocks * _ENTRY.size].tobytes()
        return [data[start : start + _ENTRY.size] for start in range(0, len(data), _ENTRY.size)]

    def is_right(self, entry: bytes, block_hash: bytes, block: Bytes) -> bool:
        """Return whether ``block``, as it has landed, matches the entry and its own hash."""
        return entry == _ENTRY.pack(block_hash, checksum(block))


def checksum(block: Bytes) -> bytes:
    """Return the checksum of uint8 ``[bytes]``: BLAKE2b-128 of the sums of its 64-bit words modulo 2^64, by page and by
    position within a page, and of the bytes after the last whole page.

    It detects accidents, not attacks: an older, foreign or misplaced page changes its page's sum, words that changed
    positions within their page change the sums of those positions.
    """
    whole = len(block) // _PAGE_BYTES * _PAGE_BYTES
    words = block[:whole].view(np.uint64).reshape(-1, _PAGE_WORDS)
    digest = hashlib.blake2b(words.sum(axis=1), digest_size=16)
    digest.update(words.sum(axis=0))
    digest.update(block[whole:].data)
    return digest.digest()
