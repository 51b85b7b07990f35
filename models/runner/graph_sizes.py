"""Sizes of the steps for which the runner captures CUDA graphs. Pure arithmetic, without torch."""

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from splitserve.protocol.placement.chunk_bounds import longer_by

MAX_MIXED_CHUNKS = 4  # prefill chunks in a step with a graph
TOKENS_ALONE = (64, 128, 256, 512, 1024, 2048)  # of prefill alone
MAX_LONGER = 6  # sizes with more prompt tokens than the fixed number; steps beyond them have no graph
MAX_TOKENS_ALWAYS = 512  # a replay of so many is used for any smaller step as well


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes worth a graph of their own: at most an eighth of the rows is left over from 16 on."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 32, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class MixedSize(NamedTuple):
    """The size of a mixed step: the number of sequences that decode, and of the prefill tokens after them."""

    num_decodes: int
    num_tokens: int

    @property
    def is_long(self) -> bool:
        """Return whether it is prefill alone, of so many tokens that a replay needn't be quicker."""
        return self.num_decodes == 0 and self.num_tokens > MAX_TOKENS_ALWAYS


def mixed_sizes(max_num_seqs: int, max_tokens: int, max_tokens_alone: int, max_sized: int = 0) -> list[MixedSize]:
    """Return the sizes worth a graph: prefill beside decode in quarters of ``max_tokens``; beside fewer numbers of
    sequences, up to ``max_sized`` as an objective sizes prompts (:data:`MAX_LONGER`); and prefill alone."""
    tokens = {-(-max_tokens * quarter // 4) for quarter in (1, 2, 3, 4)}
    longer = longer_tokens(max_tokens, max_sized)
    sizes = {MixedSize(*each) for each in product(_up_to(max_num_seqs, (8, 16, 32, 64, 128)), tokens)}
    sizes |= {MixedSize(*each) for each in product(_up_to(max_num_seqs, (16, 64)), longer)}
    return sorted(sizes | {MixedSize(0, min(size, max_tokens_alone)) for size in TOKENS_ALONE})


def longer_tokens(max_tokens: int, max_sized: int) -> range:
    """Return the numbers of prompt tokens above ``max_tokens``, up to ``max_sized``, that have graphs: those that an
    objective sizes."""
    more = longer_by(max_tokens)
    return range(max_tokens + more, min(max_sized, max_tokens + MAX_LONGER * more) + 1, more)


def _up_to(most: int, sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size < most] + [most]


def least_tokens(num_tokens: int, launch_seconds: float, launched_seconds: float, replay_seconds: float) -> int:
    """Return the fewest tokens for which to replay a graph of ``num_tokens``, rather than to launch a step kernel by
    kernel; more than ``num_tokens``: none.

    Of a step of ``num_tokens``: ``launch_seconds`` of the host, which hardly depend on the tokens, ``launched_seconds``
    until the device is done, and ``replay_seconds``, the same for the graph, whose attention may be another one.
    """
    if replay_seconds <= launch_seconds:
        return 1
    return math.ceil(num_tokens * replay_seconds / launched_seconds)
