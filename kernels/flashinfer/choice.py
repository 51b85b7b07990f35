"""The choice between FlashInfer's FlashAttention 3 and Triton's kernel for prompts' chunks.

FlashAttention 3 gives a multiprocessor a tile of one head's query tokens, and all of their context. Triton's kernel has
a lower rate, but divides contexts, so that few query tokens keep the device busy, too.
"""

from dataclasses import dataclass

import torch

from splitserve.kernels.api import AttentionShape, PagedBatch
from splitserve.kernels.triton.attention.plans import QUERY_TILE as TRITON_TILE

RATE_RATIO = 1.8
"""Rate of FlashAttention 3 divided by that of Triton's kernel, with all multiprocessors of an H200 busy: estimated at
1.5 to 2.5 (docs/decisions/039-long-prompts-in-graphs.md)."""
MIN_MEAN_CONTEXT = 1000
"""The least number of tokens that a query token attends to, in the mean, for FlashAttention 3 in a graph: with fewer,
Triton's kernel, which starts while the one before it ends, is as quick or quicker."""


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """The choice for one shape of attention on one device."""

    num_heads: int
    num_processors: int  # multiprocessors of the device
    query_tile: int  # of FlashAttention 3
    window: int | None  # tokens that a query token attends to at most, itself included

    @classmethod
    def of(cls, shape: AttentionShape) -> "ChunkChoice":
        """Return the choice for ``shape`` on its device."""
        processors = torch.cuda.get_device_properties(shape.device).multi_processor_count
        return cls(shape.num_heads, processors, 192 if shape.head_dim == 64 else 128, shape.window)

    def flashinfer_is_quicker(self, chunks: PagedBatch) -> bool:
        """Return whether the longest tile of FlashAttention 3 takes less time than Triton's kernel for all of the
        work."""
        lengths = list(zip(chunks.query_lens, chunks.context_lens, strict=True))
        longest = max(self._attended(context, min(count, self.query_tile)) for count, context in lengths)
        rows = (
            -(-count // TRITON_TILE) * TRITON_TILE * self._attended(context, TRITON_TILE) for count, context in lengths
        )
        work = self.num_heads * sum(rows) / self.query_tile  # in tiles of FlashAttention 3, as longest is
        return longest * self.num_processors <= RATE_RATIO * work

    def may_suit_graph(self, num_tokens: int) -> bool:
        """Return whether :meth:`suits_graph` holds for one chunk of so many query tokens after a long context."""
        has_long_contexts = self.window is None or self.window >= MIN_MEAN_CONTEXT
        return has_long_contexts and self.flashinfer_is_quicker(PagedBatch([num_tokens], [num_tokens], [()]))

    def suits_graph(self, chunks: PagedBatch) -> bool:
        """Return whether a graph had better have FlashAttention 3 for ``chunks``, of which there may be none."""
        if not chunks.query_lens:
            return False
        lengths = zip(chunks.query_lens, chunks.context_lens, strict=True)
        num_pairs = sum(count * min(context - count / 2, self.window or context) for count, context in lengths)
        return num_pairs >= MIN_MEAN_CONTEXT * sum(chunks.query_lens) and self.flashinfer_is_quicker(chunks)

    def _attended(self, context: int, count: int) -> int:
        """Return the number of tokens that ``count`` tokens at the end of ``context`` attend to together."""
        return context if self.window is None else min(context, self.window + count)
