"""A backend for each phase: Triton's decode kernel, and for chunks that are long enough FlashInfer's FlashAttention 3.

``splitserve bench kernels`` compares the backends on a GPU; ``benchmarks/results`` has one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, MixedPlan, PagedBatch
from splitserve.kernels.flashinfer.attention import ChunkPlan, FlashInferPagedAttention
from splitserve.kernels.flashinfer.chunks import FixedChunkPlan
from splitserve.kernels.paged import num_leading_decodes, part_of
from splitserve.kernels.triton.attention import TritonPagedAttention
from splitserve.kernels.triton.plans import TritonDecodePlan, TritonMixedPlan, TritonPlan

QUERY_TILE = 128
"""Query tokens of one head that FlashInfer's kernel computes together, over their whole context."""
RATE_RATIO = 1.8
"""FlashInfer's kernel computes so much faster than Triton's, which divides contexts and so keeps the device busy with
few query tokens (docs/decisions/039-long-prompts-in-graphs.md)."""
MIN_MEAN_CONTEXT = 1000
"""Of query tokens: with less, Triton's kernel is as quick, and starts earlier."""


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """Plan of a step whose chunks are FlashInfer's: ``decode`` handles the first ``num_decodes`` query tokens, None if
    there are none, ``chunks`` all others."""

    num_decodes: int
    decode: AttentionPlan | None
    chunks: ChunkPlan


class HybridPagedAttention:
    """Implements :class:`splitserve.kernels.api.PagedAttention`. Raises ValueError for a shape without kernels."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._triton = TritonPagedAttention(shape)
        self._flashinfer = FlashInferPagedAttention(shape)

    def plan(self, batch: PagedBatch) -> HybridPlan | TritonPlan:
        count = num_leading_decodes(batch)
        if count == len(batch.query_lens) or not self._takes_flashinfer(part_of(batch, count)):
            return self._triton.plan(batch)
        decode = self._triton.plan(part_of(batch, 0, count)) if count else None
        return HybridPlan(count, decode, self._flashinfer.plan_chunks(batch, count))

    def _takes_flashinfer(self, chunks: PagedBatch) -> bool:
        # Elsewhere FlashInfer's kernel is FlashAttention 2, which divides contexts.
        return not self._flashinfer.is_hopper or fills_device(self._shape, chunks)

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> TritonDecodePlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return self._triton.make_decode_plan(batch_size, max_blocks)

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> Sequence[MixedPlan]:
        """See :class:`splitserve.kernels.api.PagedAttention`. Decodes make a step long enough for one form to do."""
        sizes = num_decodes, num_chunk_tokens, num_chunks, max_blocks
        whole = PagedBatch([num_chunk_tokens], [num_chunk_tokens], [()])
        if not self._flashinfer.is_hopper or not fills_device(self._shape, whole):
            return self._triton.make_mixed_plans(*sizes)
        decode = self._triton.make_decode_plan(num_decodes, max_blocks) if num_decodes else None
        chunks = self._flashinfer.make_chunk_plan(num_chunks, max_blocks)
        plan = HybridMixedPlan(self._shape, num_decodes, decode, chunks)
        return [plan] if num_decodes else [plan, *self._triton.make_mixed_plans(*sizes)]

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor | None = None) -> Tensor:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        assert sinks is None, "FlashInfer attention takes no sinks"
        if isinstance(plan, TritonPlan | TritonDecodePlan | TritonMixedPlan):
            return self._triton.run(query, kv_layer, plan)
        assert isinstance(plan, HybridPlan | HybridMixedPlan)
        count, decode = plan.num_decodes, plan.decode
        out = torch.empty_like(query) if decode is None else self._triton.run(query, kv_layer, decode)
        self._flashinfer.run_chunks(query[count:], kv_layer, plan.chunks, out[count:])
        return out


@dataclass(frozen=True, slots=True)
class HybridMixedPlan:
    """A plan of fixed size, for CUDA graphs, in which FlashInfer attends for the chunks. Implements
    ``kernels.api.MixedPlan``."""

    shape: AttentionShape
    num_decodes: int
    decode: TritonDecodePlan | None
    chunks: FixedChunkPlan

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        if self.decode is not None:
            self.decode.update(part_of(batch, 0, self.num_decodes))
        self.chunks.update(part_of(batch, self.num_decodes))

    def suits(self, batch: PagedBatch, /) -> bool:
        """See :class:`splitserve.kernels.api.MixedPlan`."""
        if self.decode is not None:
            return True
        num_pairs = sum(
            count * (context - count / 2) for count, context in zip(batch.query_lens, batch.context_lens, strict=True)
        )
        return num_pairs >= MIN_MEAN_CONTEXT * sum(batch.query_lens) and fills_device(self.shape, batch)


def fills_device(shape: AttentionShape, chunks: PagedBatch) -> bool:
    """Return whether FlashInfer's kernel is quicker than Triton's for long ``chunks``, although its time is that of the
    longest context at least. Each multiprocessor has one tile at a time."""
    num_processors = torch.cuda.get_device_properties(shape.device).multi_processor_count
    lengths = zip(chunks.query_lens, chunks.context_lens, strict=True)
    work = shape.num_heads * sum(-(-count // QUERY_TILE) * context for count, context in lengths)
    return max(chunks.context_lens) * num_processors <= RATE_RATIO * work
