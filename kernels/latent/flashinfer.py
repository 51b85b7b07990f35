"""Latent attention through FlashInfer's MLA kernels (FlashAttention 3's on compute capability 9.0), absorbed; long
chunks are expanded (:mod:`.expanded`).

The kernels read latents in place: the two parts of one field are strided views of a layer. A plan's numbers are copied
from pinned buffers that rotate, as in :mod:`splitserve.kernels.flashinfer.attention`. Latents in FP8 and sizes other
than DeepSeek's take Triton's kernels.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, DecodePlan, LatentAttention, PagedBatch
from splitserve.kernels.flashinfer.ragged import pinned_buffers
from splitserve.kernels.latent.expanded import ExpandedPlan, ExpandedPrefill, pays
from splitserve.kernels.latent.reference import score_scale
from splitserve.kernels.latent.triton import TritonLatentAttention
from splitserve.kernels.latent.triton_products import head_products
from splitserve.kernels.paged import flat_tables, num_leading_decodes

_SIZES = (512, 64)  # of a latent and of the rotated part of a key
_WORKSPACE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FlashInferLatentPlan:
    """Plan of a step: ``wrapper``, which has the step's numbers, handles the first ``num_absorbed`` query tokens,
    ``expanded`` the rest, if it is there."""

    wrapper: Any
    num_absorbed: int
    expanded: ExpandedPlan | None


def has_kernels(shape: AttentionShape) -> bool:
    """Return whether FlashInfer has kernels for the sizes of ``shape``."""
    assert shape.latent is not None
    return (shape.latent.rank, shape.latent.rotated_dim) == _SIZES


def make_attention(shape: AttentionShape) -> LatentAttention:
    """Return FlashInfer's attention, or Triton's for sizes that FlashInfer has no kernels for."""
    return FlashInferLatentAttention(shape) if has_kernels(shape) else TritonLatentAttention(shape)


class FlashInferLatentAttention:
    """Implements :class:`splitserve.kernels.api.LatentAttention`."""

    def __init__(self, shape: AttentionShape) -> None:
        import flashinfer

        assert shape.latent is not None
        self._flashinfer, self._shape, self._latent = flashinfer, shape, shape.latent
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._wrapper: Any = flashinfer.mla.BatchMLAPagedAttentionWrapper(self._workspace)
        self._pinned = pinned_buffers(self._wrapper)
        self._expanded = ExpandedPrefill(flashinfer, shape) if ExpandedPrefill.supports(shape) else None

    # ---- once per step ----

    def plan(self, batch: PagedBatch) -> FlashInferLatentPlan:
        """See :class:`splitserve.kernels.api.LatentAttention`."""
        expanded, absorbed = None, batch
        num_decodes = num_leading_decodes(batch)
        if self._expanded is not None and pays(self._shape, batch, num_decodes):
            expanded = self._expanded.plan(batch, num_decodes)
            absorbed = PagedBatch(
                batch.query_lens[:num_decodes], batch.context_lens[:num_decodes], batch.block_tables[:num_decodes]
            )
        if absorbed.query_lens:
            plan_step(self._wrapper, self._pinned, absorbed, self._shape)
        return FlashInferLatentPlan(self._wrapper, sum(absorbed.query_lens), expanded)

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> "FlashInferLatentDecodePlan":
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return FlashInferLatentDecodePlan(self._flashinfer, self._shape, self._workspace, batch_size, max_blocks)

    def make_mixed_plan(self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int) -> DecodePlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        raise NotImplementedError("CUDA graphs of mixed steps aren't supported with latent attention")

    # ---- once per layer ----

    def run_latent(self, query: Tensor, expansion: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """See :class:`splitserve.kernels.api.LatentAttention`."""
        if isinstance(plan, FlashInferLatentDecodePlan):
            return self._run_absorbed(query, expansion, kv_layer, plan.wrapper)
        assert isinstance(plan, FlashInferLatentPlan)
        if plan.expanded is None:
            return self._run_absorbed(query, expansion, kv_layer, plan.wrapper)
        assert self._expanded is not None
        count = plan.num_absorbed
        out = query.new_empty((*query.shape[:2], self._latent.value_dim))
        if count:
            out[:count] = self._run_absorbed(query[:count], expansion, kv_layer, plan.wrapper)
        self._expanded.run(query[count:], expansion, kv_layer, plan.expanded, out[count:])
        return out

    def _run_absorbed(self, query: Tensor, expansion: Tensor, kv_layer: Tensor, wrapper: Any) -> Tensor:
        rank, plain_dim = self._latent.rank, self._latent.plain_dim
        absorbed = head_products(query[..., :plain_dim], expansion[:, :plain_dim].transpose(1, 2))
        mixed = torch.empty_like(absorbed)
        wrapper.run(absorbed, query[..., plain_dim:], kv_layer[..., :rank], kv_layer[..., rank:], out=mixed)
        return head_products(mixed, expansion[:, plain_dim:])


class FlashInferLatentDecodePlan:
    """A decode plan whose tensors keep their addresses, for CUDA graphs. Implements ``kernels.api.DecodePlan``."""

    def __init__(
        self, flashinfer: Any, shape: AttentionShape, workspace: Tensor, batch_size: int, max_blocks: int
    ) -> None:
        self._shape, self._batch_size = shape, batch_size
        ends, counts, indices, lens = (
            torch.zeros(size, dtype=torch.int32, device=shape.device)
            for size in (batch_size + 1, batch_size + 1, batch_size * max_blocks, batch_size)
        )
        self.wrapper: Any = flashinfer.mla.BatchMLAPagedAttentionWrapper(
            workspace, use_cuda_graph=True, qo_indptr=ends, kv_indptr=counts, kv_indices=indices, kv_len_arr=lens
        )
        self._pinned = pinned_buffers(self.wrapper)

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        assert len(batch.query_lens) == self._batch_size
        plan_step(self.wrapper, self._pinned, batch, self._shape)


def plan_step(wrapper: Any, pinned: Iterator[Tensor], batch: PagedBatch, shape: AttentionShape) -> None:
    """Give ``wrapper`` the numbers of a step; those that it copies itself are in pinned memory."""
    assert shape.latent is not None
    tables = flat_tables(batch, shape.block_size)
    ends = torch.tensor([0, *itertools.accumulate(batch.query_lens)], dtype=torch.int32)
    numbers = (ends, *(torch.from_numpy(each) for each in (tables.indptr, tables.indices, tables.context_lens)))
    wrapper._pin_memory_int_workspace_buffer = next(pinned)
    wrapper.plan(
        *(each.pin_memory() for each in numbers),
        shape.num_heads,
        shape.latent.rank,
        shape.latent.rotated_dim,
        shape.block_size,
        True,  # causal
        score_scale(shape),
        shape.dtype,
        shape.dtype,
    )
