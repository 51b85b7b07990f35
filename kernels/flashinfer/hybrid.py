"""A backend for each phase: Triton's decode kernel, FlashInfer's FlashAttention 3 for longer chunks.

``splitserve bench kernels`` compares the backends on a GPU; ``benchmarks/results`` has one run.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, MixedPlan, PagedBatch
from splitserve.kernels.flashinfer.attention import ChunkPlan, FlashInferPagedAttention
from splitserve.kernels.flashinfer.chunks import FixedChunkPlan
from splitserve.kernels.paged import num_leading_decodes, part_of
from splitserve.kernels.triton.attention import TritonPagedAttention
from splitserve.kernels.triton.plans import TritonDecodePlan, TritonMixedPlan

MIN_TILES = 96
"""Tiles of 128 query tokens, for each head, from which on a CUDA graph has FlashInfer's kernel for its chunks. It
divides no context, so fewer leave more of the device idle than its rate makes up for."""
_TILE = 128


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """Plan of a step: ``decode`` handles the first ``num_decodes`` query tokens, ``chunks`` all others; None if there
    are none."""

    num_decodes: int
    decode: AttentionPlan | None
    chunks: ChunkPlan | None


class HybridPagedAttention:
    """Implements :class:`splitserve.kernels.api.PagedAttention`. Raises ValueError for a shape without kernels."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._triton = TritonPagedAttention(shape)
        self._flashinfer = FlashInferPagedAttention(shape)

    def plan(self, batch: PagedBatch) -> HybridPlan:
        count = num_leading_decodes(batch)
        has_chunks = count < len(batch.query_lens)
        return HybridPlan(
            count,
            self._triton.plan(part_of(batch, 0, count)) if count else None,
            self._flashinfer.plan_chunks(batch, count) if has_chunks else None,
        )

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> TritonDecodePlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return self._triton.make_decode_plan(batch_size, max_blocks)

    def make_mixed_plan(self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int) -> MixedPlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        num_tiles = -(-num_chunk_tokens // _TILE) * self._shape.num_heads
        if not self._flashinfer.is_hopper or num_tiles < MIN_TILES:
            return self._triton.make_mixed_plan(num_decodes, num_chunk_tokens, num_chunks, max_blocks)
        decode = self._triton.make_decode_plan(num_decodes, max_blocks) if num_decodes else None
        return HybridMixedPlan(num_decodes, decode, self._flashinfer.make_chunk_plan(num_chunks, max_blocks))

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor | None = None) -> Tensor:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        assert sinks is None, "FlashInfer attention takes no sinks"
        if isinstance(plan, TritonDecodePlan | TritonMixedPlan):
            return self._triton.run(query, kv_layer, plan)
        assert isinstance(plan, HybridPlan | HybridMixedPlan)
        count, decode, chunks = plan.num_decodes, plan.decode, plan.chunks
        out = torch.empty_like(query) if decode is None else self._triton.run(query, kv_layer, decode)
        if chunks is not None:
            self._flashinfer.run_chunks(query[count:], kv_layer, chunks, out[count:])
        return out


@dataclass(frozen=True, slots=True)
class HybridMixedPlan:
    """A plan of fixed size, for CUDA graphs, in which FlashInfer attends for the chunks. Implements
    ``kernels.api.MixedPlan``."""

    num_decodes: int
    decode: TritonDecodePlan | None
    chunks: FixedChunkPlan

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        if self.decode is not None:
            self.decode.update(part_of(batch, 0, self.num_decodes))
        self.chunks.update(part_of(batch, self.num_decodes))

    def suits(self, _batch: PagedBatch, /) -> bool:
        """See :class:`splitserve.kernels.api.MixedPlan`."""
        return True
