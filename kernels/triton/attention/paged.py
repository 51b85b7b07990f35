"""Paged attention as Triton kernels, for any GPU: flash-decoding (Dao et al., 2023) and flash attention over blocks.

Leading sequences with one query token are decoded: a program per (sequence, key/value head, part of the context)
handles all query heads of the group, and the last of these programs to finish joins the parts by their log-sum-exp, in
order, so that the result doesn't depend on which one is last. All others are chunks
(:mod:`splitserve.kernels.triton.attention.chunks`). A context's last tile is masked: unwritten memory may hold NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, PagedBatch
from splitserve.kernels.paged import Int32Array, flat_tables, num_leading_decodes
from splitserve.kernels.triton.attention.chunks import run_chunks
from splitserve.kernels.triton.attention.decode import run_decode
from splitserve.kernels.triton.attention.plans import (
    ChunkPart,
    DecodePart,
    DecodeWorkspaces,
    TritonDecodePlan,
    TritonMixedPlan,
    TritonPlan,
    chunk_arrays,
    chunk_workspace,
    decode_items,
)
from splitserve.kernels.triton.sampling import to_device


class TritonPagedAttention:
    """Implements :class:`splitserve.kernels.api.PagedAttention`."""

    def __init__(self, shape: AttentionShape) -> None:
        if reason := unsupported_reason(shape):
            raise ValueError(reason)
        self._shape = shape
        self._chunk_workspace = chunk_workspace(shape)
        self._workspaces = DecodeWorkspaces(shape)

    # ---- once per step ----

    def plan(self, batch: PagedBatch) -> TritonPlan:
        num_decodes = num_leading_decodes(batch)
        tables = flat_tables(batch, self._shape.block_size)
        indptr, indices = self._on_device(tables.indptr, tables.indices)
        decode = chunks = None
        if num_decodes:
            workspace = self._workspaces.of(num_decodes)
            (items,) = self._on_device(decode_items(tables, num_decodes, 1, workspace.launch, self._shape.window))
            decode = DecodePart(indices, items, workspace)
        if num_decodes < len(batch.query_lens):
            arrays = chunk_arrays(batch, num_decodes, self._chunk_workspace.programs_per_head)
            items, joins = self._on_device(*arrays)
            chunks = ChunkPart(indptr[num_decodes:], indices, items, joins, self._chunk_workspace)
        return TritonPlan(decode, chunks)

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> TritonDecodePlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return TritonDecodePlan(self._shape, batch_size, max_blocks, self._workspaces.of(batch_size))

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> Sequence[TritonMixedPlan]:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        decodes = self._workspaces.of(num_decodes)
        sizes = num_decodes, num_chunk_tokens, num_chunks, max_blocks
        return [TritonMixedPlan(self._shape, *sizes, decodes, self._chunk_workspace)]

    def _on_device(self, *arrays: Int32Array) -> list[Tensor]:
        return [to_device(torch.from_numpy(array), self._shape.device) for array in arrays]

    # ---- once per layer ----

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor | None = None) -> Tensor:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        if isinstance(plan, TritonDecodePlan | TritonMixedPlan):
            plan = plan.fixed
        assert isinstance(plan, TritonPlan) and query.is_contiguous()
        block_elements = self._shape.block_size * self._shape.head_dim
        assert kv_layer.stride()[1:] == (2 * block_elements, block_elements, self._shape.head_dim, 1)
        out = torch.empty_like(query)
        if plan.decode is not None:
            run_decode(self._shape, query, kv_layer, out, plan.decode, sinks)
        if plan.chunks is not None:
            run_chunks(self._shape, query, kv_layer, out, plan.chunks, sinks)
        return out


def unsupported_reason(shape: AttentionShape) -> str | None:
    """Return why these kernels don't support ``shape``, or None."""
    if shape.num_heads % shape.num_kv_heads:
        return f"{shape.num_heads} query heads can't share {shape.num_kv_heads} key/value heads"
    if shape.head_dim > 256:
        return f"head_dim {shape.head_dim} is larger than 256"
    return None
