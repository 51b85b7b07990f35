"""Attention over KV memory in FP8 (float8_e4m3fn), for backends that read only the dtype that the model computes in."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, DecodePlan, PagedAttention, PagedBatch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of that format; larger numbers are stored as this."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """``block_ids`` int64 [n]: what the step reads; ``inner`` counts blocks in their order."""

    block_ids: Tensor
    inner: AttentionPlan


class DequantisingAttention:
    """The blocks that a step reads are converted, one layer at a time, for another backend.

    See :class:`splitserve.kernels.api.PagedAttention`. That takes memory and time as the context grows: it serves CPUs,
    where FP8 is for trying out what a GPU would do.
    """

    def __init__(self, shape: AttentionShape, make_attention: Callable[[AttentionShape], PagedAttention]) -> None:
        self._block_size = shape.block_size
        self._device = shape.device
        self._inner = make_attention(replace(shape, num_layers=1))

    def plan(self, batch: PagedBatch) -> _Plan:
        tables = [
            table[: -(-context // self._block_size)]
            for table, context in zip(batch.block_tables, batch.context_lens, strict=True)
        ]
        block_ids = sorted({block_id for table in tables for block_id in table})
        place = {block_id: index for index, block_id in enumerate(block_ids)}
        compact = [[place[block_id] for block_id in table] for table in tables]
        inner = self._inner.plan(PagedBatch(batch.query_lens, batch.context_lens, compact))
        return _Plan(torch.tensor(block_ids, device=self._device), inner)

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> DecodePlan:
        """There are no CUDA graphs here."""
        raise NotImplementedError(
            f"FP8 KV has a fixed plan for {batch_size} sequences of {max_blocks} blocks with the triton backend only"
        )

    def make_mixed_plan(self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int) -> DecodePlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        raise NotImplementedError("CUDA graphs of mixed steps over FP8 KV take the triton attention backend")

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        assert isinstance(plan, _Plan) and kv_layer.dtype == FP8
        return self._inner.run(query, kv_layer[plan.block_ids].to(query.dtype).contiguous(), plan.inner)
