"""Numbers of KV blocks: how many tokens need, and which of them are adjacent."""

from collections.abc import Iterator, Sequence


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
