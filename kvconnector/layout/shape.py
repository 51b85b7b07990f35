"""Numbers of KV blocks: how many tokens need, and which of them are adjacent."""

from collections.abc import Iterator, Sequence


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


Run = tuple[int, int, int]
"""Blocks that are adjacent on both sides: the first block, the first of the others, the number of blocks."""


def runs(block_ids: Sequence[int], others: Sequence[int]) -> Iterator[Run]:
    """Yield the longest runs of blocks that are adjacent on both sides."""
    pairs = zip(block_ids, others, strict=True)
    first, other = end, other_end = next(pairs, (0, 0))
    for block_id, its_other in pairs:
        end += 1
        other_end += 1
        if block_id != end or its_other != other_end:
            yield first, other, end - first
            first, other = end, other_end = block_id, its_other
    if block_ids:
        yield first, other, end + 1 - first
