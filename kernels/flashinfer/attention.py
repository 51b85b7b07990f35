"""Paged attention through FlashInfer: its tensor-core decode and its FlashAttention 3 (else 2) prefill kernels.

They read KV blocks in place: keys and values of one layer are strided views in FlashInfer's "HND" order. A plan's
numbers are copied from a pinned buffer. Since a plan may be made while the copy of an earlier one is still waiting in
the stream, wrappers rotate through several such buffers; those that read chunks in place share theirs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, MixedPlan, PagedBatch
from splitserve.kernels.flashinfer.chunks import ChunkLimits, FixedChunkPlan, PagedChunkPlan, plan_chunks
from splitserve.kernels.flashinfer.ragged import RaggedPlan, RaggedPrefill, pinned_buffers, score_options
from splitserve.kernels.paged import FlatTables, flat_tables, last_block_lens, num_leading_decodes, part_of
from splitserve.kernels.triton.attention.plans import FixedArrays

_WORKSPACE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """Plan of a step: ``decode``, a wrapper, handles the first ``num_decodes`` query tokens, ``chunks`` the rest; None:
    unused."""

    num_decodes: int
    decode: Any
    chunks: RaggedPlan | PagedChunkPlan | None


class FlashInferPagedAttention:
    """Implements :class:`splitserve.kernels.api.PagedAttention`. Raises ValueError for a shape without kernels."""

    def __init__(self, shape: AttentionShape) -> None:
        if reason := unsupported_reason(shape):
            raise ValueError(reason)
        import flashinfer

        self._flashinfer = flashinfer
        self._shape = shape
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self.is_hopper = is_hopper = torch.cuda.get_device_capability(shape.device) == (9, 0)
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "HND", use_tensor_cores=True)
        # The decode kernels of a mixed step are launched before the prefill kernels overwrite the workspace, but plans
        # of both are in it at the same time, so each has its own.
        self._prefill_workspace = torch.empty_like(self._workspace)
        self._make_prefill: Callable[..., Any] = partial(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper,
            self._prefill_workspace,
            "HND",
            backend="fa3" if is_hopper else "fa2",
        )
        self._prefill = self._make_prefill()
        self._ragged = RaggedPrefill(flashinfer, shape, self._prefill_workspace) if is_hopper else None
        self._decode_pinned = pinned_buffers(self._decode)
        self._prefill_pinned = pinned_buffers(self._prefill)

    # ---- once per step ----

    def plan(self, batch: PagedBatch) -> FlashInferPlan:
        num_decodes = num_leading_decodes(batch)
        if num_decodes:
            tables = flat_tables(part_of(batch, 0, num_decodes), self._shape.block_size)
            plan_decode(self._decode, self._decode_pinned, tables, self._shape)
        has_chunks = num_decodes < len(batch.query_lens)
        return FlashInferPlan(
            num_decodes,
            self._decode if num_decodes else None,
            self.plan_chunks(batch, num_decodes) if has_chunks else None,
        )

    def plan_chunks(self, batch: PagedBatch, first: int) -> RaggedPlan | PagedChunkPlan:
        """Plan the attention of the sequences of ``batch`` from ``first`` on."""
        if self._ragged is not None and self._ragged.serves(batch, first):
            return self._ragged.plan(batch, first)
        chunks = part_of(batch, first)
        tables = flat_tables(chunks, self._shape.block_size)
        self._prefill._pin_memory_int_workspace_buffer = next(self._prefill_pinned)
        indices = torch.from_numpy(tables.indices).pin_memory()
        plan_chunks(self._prefill, chunks, tables, indices, self._shape)
        return PagedChunkPlan(self._prefill)

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> "FlashInferDecodePlan":
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return FlashInferDecodePlan(self._flashinfer, self._shape, self._workspace, batch_size, max_blocks)

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> Sequence[MixedPlan]:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        raise NotImplementedError("CUDA graphs of mixed steps need the triton or the hybrid attention backend")

    def make_chunk_plan(self, limits: ChunkLimits) -> FixedChunkPlan:
        """Make a plan of fixed size for chunks alone. Compute capability 9.0 only."""
        assert self.is_hopper

        def make_wrapper(**tensors: Any) -> Any:
            wrapper = self._make_prefill(**tensors)
            wrapper._int_workspace_buffer = self._prefill._int_workspace_buffer  # filled in the stream's order
            return wrapper

        return FixedChunkPlan(self._shape, limits, make_wrapper, self._prefill_pinned)

    # ---- once per layer ----

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor | None = None) -> Tensor:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        assert sinks is None, "FlashInfer attention takes no sinks"
        out = torch.empty_like(query)
        if isinstance(plan, FlashInferDecodePlan):
            plan.wrapper.run(query, _keys_values(kv_layer), out=out)
            return out
        assert isinstance(plan, FlashInferPlan)
        if plan.decode is not None:
            plan.decode.run(query[: plan.num_decodes], _keys_values(kv_layer), out=out[: plan.num_decodes])
        if plan.chunks is not None:
            self.run_chunks(query[plan.num_decodes :], kv_layer, plan.chunks, out[plan.num_decodes :])
        return out

    def run_chunks(
        self, query: Tensor, kv_layer: Tensor, plan: RaggedPlan | PagedChunkPlan | FixedChunkPlan, out: Tensor
    ) -> None:
        """Attend with the query tokens of chunks alone: ``query``, ``out`` [T, H, D]."""
        if isinstance(plan, RaggedPlan):
            assert self._ragged is not None
            self._ragged.run(query, kv_layer, plan, out)
        else:
            plan.wrapper.run(query, _keys_values(kv_layer), out=out)


def _keys_values(kv_layer: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values, each [num_blocks, G, B, D], as views."""
    return kv_layer[:, :, 0], kv_layer[:, :, 1]


class FlashInferDecodePlan:
    """A decode plan whose tensors keep their addresses, for CUDA graphs. Implements ``kernels.api.DecodePlan``."""

    def __init__(
        self, flashinfer: Any, shape: AttentionShape, workspace: Tensor, batch_size: int, max_blocks: int
    ) -> None:
        self._shape = shape
        self._fast_plan = flashinfer.decode.fast_decode_plan
        self._numbers = FixedArrays((batch_size + 1, batch_size, batch_size * max_blocks), shape.device)
        indptr, last, indices = self._numbers.arrays
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
        )
        self._pinned = pinned_buffers(self.wrapper)
        self._is_planned = False

    def update(self, batch: PagedBatch) -> None:
        """See :class:`splitserve.kernels.api.DecodePlan`."""
        shape, tables = self._shape, flat_tables(batch, self._shape.block_size)
        if not self._is_planned:  # the first plan loads the kernels
            plan_decode(self.wrapper, self._pinned, tables, shape)
            self._is_planned = True
            return
        indptr, _, indices = self._numbers.arrays
        last_lens = last_block_lens(tables, shape.block_size)
        self._numbers.fill((tables.indptr, last_lens.numpy(), tables.indices))
        self.wrapper._pin_memory_int_workspace_buffer = next(self._pinned)
        self._fast_plan(
            self.wrapper,
            indptr=indptr,
            indices=indices,
            last_page_len=last_lens,
            num_qo_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.block_size,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            global_override_indptr_cpu=torch.from_numpy(tables.indptr),
            **score_options(shape),
        )


def plan_decode(wrapper: Any, pinned: Iterator[Tensor], tables: FlatTables, shape: AttentionShape) -> None:
    """Make a full plan of a decode wrapper; the arrays stay on the host until FlashInfer copies them."""
    wrapper._pin_memory_int_workspace_buffer = next(pinned)
    wrapper.plan(
        torch.from_numpy(tables.indptr),
        torch.from_numpy(tables.indices).pin_memory(),
        last_block_lens(tables, shape.block_size),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        **score_options(shape),
    )


def unsupported_reason(shape: AttentionShape) -> str | None:
    """Return why FlashInfer doesn't support ``shape``, or None."""
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer attention takes bfloat16 and float16, not {shape.dtype}; use the triton backend"
    if shape.head_dim not in (64, 128, 256):
        return f"FlashInfer attention has no kernel for head_dim {shape.head_dim}; use the triton backend"
    if shape.has_sinks:
        return "FlashInfer attention takes no sinks; use the triton backend"
    if shape.num_heads % shape.num_kv_heads:
        return f"{shape.num_heads} query heads can't share {shape.num_kv_heads} key/value heads"
    return None
