"""Prefixes of earlier prompts, wherever their KV may be now: the most that a prefix cache could find. Pure."""

from splitserve.router.placement.prefix_view import PromptHashes

MAX_BLOCKS = 1 << 17
"""Blocks of one generation; the last two generations are remembered."""


class SeenPrefixes:
    """Hashes of blocks that earlier prompts consist of, at least the last ``max_blocks`` of them."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._new: set[bytes] = set()
        self._old: set[bytes] = set()

    def note(self, prompt: PromptHashes) -> int | None:
        """Remember a prompt. Return the number of tokens with which an earlier one began likewise; None if the prompt's
        blocks were not hashed."""
        found = prompt.longest_computed()
        if found is None:
            return None
        chain, block_size = found
        num_seen, end = 0, len(chain)
        while num_seen < end:  # of a chain, the blocks before a seen one were seen
            middle = (num_seen + end) // 2
            if chain[middle] in self._new or chain[middle] in self._old:
                num_seen = middle + 1
            else:
                end = middle
        if chain and chain[0] in self._new:
            self._new.update(chain[num_seen:])
        else:
            self._new.update(chain)
        if len(self._new) > self._max_blocks:
            self._old, self._new = self._new, set()
        return num_seen * block_size
