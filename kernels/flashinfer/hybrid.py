"""A backend for each phase: Triton's decode kernel, and for chunks that are long enough FlashInfer's FlashAttention 3.

``splitserve bench kernels`` compares the backends on a GPU; ``benchmarks/results`` has one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, MixedPlan, PagedBatch
from splitserve.kernels.flashinfer.attention import FlashInferPagedAttention
from splitserve.kernels.flashinfer.choice import ChunkChoice
from splitserve.kernels.flashinfer.chunks import ChunkLimits, FixedChunkPlan, PagedChunkPlan
from splitserve.kernels.flashinfer.ragged import RaggedPlan
from splitserve.kernels.paged import num_leading_decodes, part_of
from splitserve.kernels.triton.attention.paged import TritonPagedAttention
from splitserve.kernels.triton.attention.plans import TritonDecodePlan, TritonMixedPlan, TritonPlan


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """Plan of a step whose chunks are FlashInfer's: ``decode`` handles the first ``num_decodes`` query tokens, None if
    there are none, ``chunks`` all others."""

    num_decodes: int
    decode: AttentionPlan | None
    chunks: RaggedPlan | PagedChunkPlan


class HybridPagedAttention:
    """Implements :class:`splitserve.kernels.api.PagedAttention`. Raises ValueError for a shape without kernels."""

    def __init__(self, shape: AttentionShape) -> None:
        self._triton = TritonPagedAttention(shape)
        self._flashinfer = FlashInferPagedAttention(shape)
        # Elsewhere FlashInfer's kernel is FlashAttention 2, which divides contexts.
        self._choice = ChunkChoice.of(shape) if self._flashinfer.is_hopper else None

    def plan(self, batch: PagedBatch) -> HybridPlan | TritonPlan:
        count = num_leading_decodes(batch)
        if count == len(batch.query_lens):
            return self._triton.plan(batch)
        if self._choice is not None and not self._choice.flashinfer_is_quicker(part_of(batch, count)):
            return self._triton.plan(batch)
        decode = self._triton.plan(part_of(batch, 0, count)) if count else None
        return HybridPlan(count, decode, self._flashinfer.plan_chunks(batch, count))

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> TritonDecodePlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return self._triton.make_decode_plan(batch_size, max_blocks)

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> Sequence[MixedPlan]:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        plans = self._triton.make_mixed_plans(num_decodes, num_chunk_tokens, num_chunks, max_blocks)
        if self._choice is None or not self._choice.may_suit_graph(num_chunk_tokens):
            return plans
        decode = self._triton.make_decode_plan(num_decodes, max_blocks) if num_decodes else None
        chunks = self._flashinfer.make_chunk_plan(ChunkLimits(num_chunks, num_chunk_tokens, max_blocks))
        return [HybridMixedPlan(num_decodes, decode, chunks, self._choice), *plans]

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
    """A plan of fixed size whose chunks are FlashInfer's. Implements ``kernels.api.MixedPlan``."""

    num_decodes: int
    decode: TritonDecodePlan | None
    chunks: FixedChunkPlan
    choice: ChunkChoice

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        if self.decode is not None:
            self.decode.update(part_of(batch, 0, self.num_decodes))
        self.chunks.update(part_of(batch, self.num_decodes))

    def suits(self, batch: PagedBatch, /) -> bool:
        """See :class:`splitserve.kernels.api.MixedPlan`."""
        return self.choice.suits_graph(part_of(batch, num_leading_decodes(batch)))
