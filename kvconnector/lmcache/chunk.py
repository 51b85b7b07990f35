"""What we keep in a chunk of LMCache's: a header, then the blocks as they are on the device.

LMCache hands out memory of its own, and takes it back when it believes that we are gone. So what was written by one
that died half-way, or into memory that was another's by then, can be found under a key that promises something else.
Each block goes by its own name and checksum, which are of what has landed: anything else is a miss.
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
        """``chunk``: uint8 ``[num_bytes]``; ``blocks``: uint8 ``[block_bytes]`` each, all of the chunk's. The header
        comes last: until then the chunk is nobody's."""
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
        """What the header says of each block; none if it isn't one of ours."""
        if chunk[: _HEAD.size].tobytes() != self._head:
            return []
        data = chunk[_HEAD.size : _HEAD.size + self.num_blocks * _ENTRY.size].tobytes()
        return [data[start : start + _ENTRY.size] for start in range(0, len(data), _ENTRY.size)]

    def is_right(self, entry: bytes, block_hash: bytes, block: Bytes) -> bool:
        """Whether ``block``, as it has landed, is what the entry, and its name, say."""
        return entry == _ENTRY.pack(block_hash, checksum(block))


def checksum(block: Bytes) -> bytes:
    """Of uint8 ``[bytes]``: BLAKE2b-128 of the sums of its 64-bit words modulo 2^64, by page and by place in a page,
    and of the bytes after the last whole page.

    Against accidents, not against attackers: a page that is older, another's, or in another place shows in its own sum,
    words that changed places within their page show in those of their places.
    """
    whole = len(block) // _PAGE_BYTES * _PAGE_BYTES
    words = block[:whole].view(np.uint64).reshape(-1, _PAGE_WORDS)
    digest = hashlib.blake2b(words.sum(axis=1), digest_size=16)
    digest.update(words.sum(axis=0))
    digest.update(block[whole:].data)
    return digest.digest()
