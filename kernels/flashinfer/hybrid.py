"""A backend for each phase: Triton's decode kernel, FlashInfer's FlashAttention 3 for longer chunks.

``splitserve bench kernels`` compares the backends on a GPU; ``benchmarks/results`` has one run.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, PagedBatch
from splitserve.kernels.flashinfer.attention import FlashInferPagedAttention
from splitserve.kernels.paged import num_leading_decodes
from splitserve.kernels.triton.attention import TritonPagedAttention
from splitserve.kernels.triton.plans import TritonDecodePlan, TritonMixedPlan


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """Plan of a step: ``decode`` handles the first ``num_decodes`` query tokens, ``chunks`` all others; None if there
    are none."""

    num_decodes: int
    decode: AttentionPlan | None
    chunks: AttentionPlan | None


class HybridPagedAttention:
    """Implements :class:`splitserve.kernels.api.PagedAttention`. Raises ValueError for a shape without kernels."""

    def __init__(self, shape: AttentionShape) -> None:
        self._triton = TritonPagedAttention(shape)
        self._flashinfer = FlashInferPagedAttention(shape)

    def plan(self, batch: PagedBatch) -> HybridPlan:
        count = num_leading_decodes(batch)
        decodes, chunks = (
            PagedBatch(batch.query_lens[part], batch.context_lens[part], batch.block_tables[part])
            for part in (slice(count), slice(count, None))
        )
        return HybridPlan(
            count,
            self._triton.plan(decodes) if decodes.query_lens else None,
            self._flashinfer.plan(chunks) if chunks.query_lens else None,
        )

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> TritonDecodePlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return self._triton.make_decode_plan(batch_size, max_blocks)

    def make_mixed_plan(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> TritonMixedPlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return self._triton.make_mixed_plan(num_decodes, num_chunk_tokens, num_chunks, max_blocks)

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor | None = None) -> Tensor:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        assert sinks is None, "FlashInfer attention takes no sinks"
        if isinstance(plan, TritonDecodePlan | TritonMixedPlan):
            return self._triton.run(query, kv_layer, plan)
        assert isinstance(plan, HybridPlan)
        if plan.decode is None:
            assert plan.chunks is not None
            return self._flashinfer.run(query, kv_layer, plan.chunks)
        decoded = self._triton.run(query[: plan.num_decodes], kv_layer, plan.decode)
        if plan.chunks is None:
            return decoded
        return torch.cat((decoded, self._flashinfer.run(query[plan.num_decodes :], kv_layer, plan.chunks)))
