"""Latent attention through FlashInfer's MLA kernels (FlashAttention 3's on compute capability 9.0), absorbed; long
chunks are expanded (:mod:`.expanded`).

The kernels read latents in place: the two parts of one field are strided views of a layer. A plan's numbers are copied
from pinned buffers that rotate, as in :mod:`splitserve.kernels.flashinfer.attention`; all plans of an attention share
these, and the memory on the device that the numbers go to. Latents in FP8 and sizes other
than DeepSeek's take Triton's kernels.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, LatentAttention, PagedBatch
from splitserve.kernels.flashinfer.ragged import pinned_buffers
from splitserve.kernels.latent.expanded import ExpandedPlan, ExpandedPrefill, pays, pays_without_graph
from splitserve.kernels.latent.plans import PlanSize
from splitserve.kernels.latent.reference import score_scale
from splitserve.kernels.latent.triton import TritonLatentAttention
from splitserve.kernels.latent.triton_products import head_products
from splitserve.kernels.paged import flat_tables, num_leading_decodes, part_of

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
            absorbed = part_of(batch, 0, num_decodes)
        if absorbed.query_lens:
            plan_step(self._wrapper, self._pinned, absorbed, self._shape)
        return FlashInferLatentPlan(self._wrapper, sum(absorbed.query_lens), expanded)

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> "FixedLatentPlan":
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return self._fixed(PlanSize(batch_size, batch_size, batch_size), max_blocks)

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> Sequence["FixedLatentPlan"]:
        """See :class:`splitserve.kernels.api.PagedAttention`. Long chunks are absorbed, too."""
        size = PlanSize(num_decodes, num_decodes + num_chunk_tokens, num_decodes + num_chunks + 1)
        return [self._fixed(size, max_blocks)]

    def _fixed(self, size: PlanSize, max_blocks: int) -> "FixedLatentPlan":
        count = size.num_sequences
        sizes = count + 1, count + 1, count * max_blocks, count
        ends, counts, indices, lens = (
            torch.zeros(each, dtype=torch.int32, device=self._shape.device) for each in sizes
        )
        wrapper = self._flashinfer.mla.BatchMLAPagedAttentionWrapper(
            self._workspace, use_cuda_graph=True, qo_indptr=ends, kv_indptr=counts, kv_indices=indices, kv_len_arr=lens
        )
        wrapper._int_workspace_buffer = self._wrapper._int_workspace_buffer  # each step fills it in the stream's order
        return FixedLatentPlan(wrapper, self._pinned, self._shape, size)

    # ---- once per layer ----

    def run_latent(self, query: Tensor, expansion: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """See :class:`splitserve.kernels.api.LatentAttention`."""
        if isinstance(plan, FixedLatentPlan):
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


class FixedLatentPlan:
    """A plan whose tensors keep their addresses, for CUDA graphs. Implements ``kernels.api.MixedPlan``.

    Every batch is filled up to ``size``. The kernel's grid depends on the mean of query tokens per sequence, and
    therefore stays the same.
    """

    def __init__(self, wrapper: Any, pinned: Iterator[Tensor], shape: AttentionShape, size: PlanSize) -> None:
        self.wrapper = wrapper
        self._pinned, self._shape, self._size = pinned, shape, size
        self._may_expand = ExpandedPrefill.supports(shape)
        self._grid: list[int] | None = None

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        plan_step(self.wrapper, self._pinned, filled_up(batch, self._size), self._shape)
        grid = [int(extent) for extent in self.wrapper._plan_info[:2]]
        assert self._grid in (None, grid), "a graph has the grid of its capture"
        self._grid = grid

    def suits(self, batch: PagedBatch, /) -> bool:
        """See :class:`splitserve.kernels.api.MixedPlan`: not for chunks that had better be expanded, either."""
        expands = self._may_expand and pays_without_graph(self._shape, batch, num_leading_decodes(batch))
        return not expands and not self._size.repeats_much(batch)


def filled_up(batch: PagedBatch, size: PlanSize) -> PagedBatch:
    """Return ``batch`` padded to the query tokens and sequences of ``size``: with empty sequences, of which the last
    has the unused query tokens."""
    num_more = size.num_sequences - len(batch.query_lens)
    num_unused = size.num_tokens - sum(batch.query_lens)
    assert num_leading_decodes(batch) >= size.num_decodes, "too few sequences that decode"
    assert num_unused >= 0 and num_more >= (1 if num_unused else 0), "the batch is larger than its plan"
    if not num_more:
        return batch
    query_lens = [*batch.query_lens, *[0] * (num_more - 1), num_unused]
    return PagedBatch(query_lens, [*batch.context_lens, *[0] * num_more], [*batch.block_tables, *[()] * num_more])


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
