"""Attention over KV memory in FP8 (float8_e4m3fn), for backends that read only the model's compute dtype."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, DecodePlan, MixedPlan, PagedAttention, PagedBatch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of that format; larger ones are stored as this."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Plan of a step. ``block_ids`` int64 [n]: the blocks that the step reads; ``inner`` uses indices into them."""

    block_ids: Tensor
    inner: AttentionPlan


class DequantisingAttention:
    """Attention that converts the blocks of a step, one layer at a time, for another backend.

    See :class:`splitserve.kernels.api.PagedAttention`. Its memory and time grow with the context: it is meant for CPUs,
    where FP8 serves only to try out a GPU's behaviour.
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
        compact_id = {block_id: index for index, block_id in enumerate(block_ids)}
        compact = [[compact_id[block_id] for block_id in table] for table in tables]
        inner = self._inner.plan(PagedBatch(batch.query_lens, batch.context_lens, compact))
        return _Plan(torch.tensor(block_ids, device=self._device), inner)

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> DecodePlan:
        """Raise NotImplementedError: there are no CUDA graphs here."""
        raise NotImplementedError(
            f"a fixed plan over FP8 KV (for {batch_size} sequences of {max_blocks} blocks) needs the triton backend"
        )

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> Sequence[MixedPlan]:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        raise NotImplementedError("CUDA graphs of mixed steps over FP8 KV need the triton attention backend")

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor | None = None) -> Tensor:
        assert isinstance(plan, _Plan) and kv_layer.dtype == FP8
        return self._inner.run(query, kv_layer[plan.block_ids].to(query.dtype).contiguous(), plan.inner, sinks)
