"""Hashes of earlier prompts' blocks, so that the next turn of a conversation hashes only what it adds. Pure."""

from array import array
from collections.abc import Sequence

from splitserve.protocol.block_hash import extend_hashes
from splitserve.protocol.token_ids import TOKEN_ID_BYTES

SPAN_TOKENS = 512
MAX_SPANS = 4096
"""Spans of one generation, a few KiB each; the last two generations are remembered."""


class KnownChains:
    """Hashes of whole spans of prompts, by the block size, the hash of the block before the span, and its tokens.

    Prompts that begin alike have the same objects for hashes, which are compared and remembered as such.
    """

    def __init__(self) -> None:
        self._new: dict[bytes, tuple[bytes, ...]] = {}
        self._old: dict[bytes, tuple[bytes, ...]] = {}

    def extend(self, chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
        """Append to ``chain`` the hashes that it lacks, as :func:`extend_hashes` does."""
        num_blocks = max(1, SPAN_TOKENS // block_size)  # of a span
        if len(chain) % num_blocks or not isinstance(token_ids, array):
            extend_hashes(chain, root, token_ids, block_size)
            return
        size = block_size.to_bytes(8, "little")
        data, stride = token_ids.tobytes(), num_blocks * block_size * TOKEN_ID_BYTES
        starts = range(len(chain) // num_blocks * stride, len(data) - stride + 1, stride)
        for start in starts:
            key = size + (chain[-1] if chain else root) + data[start : start + stride]
            known = self._new.get(key) or self._old.get(key)
            if known is None:
                break
            self._new[key] = known
            chain += known
        num_known = len(chain)
        extend_hashes(chain, root, token_ids, block_size)
        for begin in range(num_known, len(chain) - num_blocks + 1, num_blocks):
            start = begin // num_blocks * stride
            key = size + (chain[begin - 1] if begin else root) + data[start : start + stride]
            self._new[key] = tuple(chain[begin : begin + num_blocks])
        if len(self._new) > MAX_SPANS:
            self._old, self._new = self._new, {}
