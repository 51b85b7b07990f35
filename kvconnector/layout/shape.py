"""The shape of KV memory: one allocation per rank, ``[block, layer, kv_head, 2 (K/V), token, head_dim]``."""

from collections.abc import Iterator, Sequence

from splitserve.protocol.memory_records import LayoutRecord

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def block_shape(layout: LayoutRecord) -> tuple[int, int, int, int, int]:
    """Return ``(layer, kv_head, 2, token, head_dim)`` of one rank."""
    return layout.num_layers, layout.kv_heads_per_rank, 2, layout.block_size, layout.head_dim


def block_bytes(layout: LayoutRecord) -> int:
    """Return the bytes of one block of one rank over all layers: contiguous, so one descriptor moves it."""
    size = DTYPE_BYTES[layout.dtype]
    for extent in block_shape(layout):
        size *= extent
    return size


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def runs(block_ids: Sequence[int], others: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(first block, first of the others, number of blocks)`` of the longest runs that are adjacent on both
    sides."""
    start = 0
    for end in range(1, len(block_ids) + 1):
        is_over = end == len(block_ids)
        if is_over or block_ids[end] != block_ids[end - 1] + 1 or others[end] != others[end - 1] + 1:
            yield block_ids[start], others[start], end - start
            start = end
