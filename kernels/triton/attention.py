"""Paged attention as Triton kernels, for any GPU: flash-decoding (Dao et al., 2023) and flash attention over blocks.

Leading sequences with one query token are decoded: a program per (sequence, key/value head, part of the context)
handles all query heads of the group, and the last of these programs to finish joins the parts by their log-sum-exp, in
order, so that the result doesn't depend on which one is last. All others are chunks
(:mod:`splitserve.kernels.triton.chunks`). A context's last tile is masked: unwritten memory may hold NaN.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, PagedBatch
from splitserve.kernels.paged import flat_tables, num_leading_decodes
from splitserve.kernels.triton.chunks import run_chunks, soft_capped
from splitserve.kernels.triton.launch import overlapped, prefetch, wait
from splitserve.kernels.triton.plans import (
    ChunkPart,
    DecodePart,
    DecodePartials,
    TritonDecodePlan,
    TritonMixedPlan,
    TritonPlan,
    chunk_arrays,
    chunk_workspace,
)
from splitserve.kernels.triton.sampling import to_device
from splitserve.kernels.tuning.decode_launch import decode_launch

_MIN_DOT = 16  # least number of rows of a matrix instruction
JOINED_AT_ONCE = tl.constexpr(8192)  # elements of parts that are in registers together


class TritonPagedAttention:
    """Implements :class:`splitserve.kernels.api.PagedAttention`."""

    def __init__(self, shape: AttentionShape) -> None:
        if reason := unsupported_reason(shape):
            raise ValueError(reason)
        self._shape = shape
        self._scale = shape.score_scale
        self._overlapped = overlapped(shape.device)
        self._chunk_workspace = chunk_workspace(shape)

    # ---- once per step ----

    def plan(self, batch: PagedBatch) -> TritonPlan:
        num_decodes = num_leading_decodes(batch)
        tables = flat_tables(batch, self._shape.block_size)
        indptr, indices, context_lens = (
            to_device(torch.from_numpy(array), self._shape.device)
            for array in (tables.indptr, tables.indices, tables.context_lens)
        )
        decode = chunks = None
        if num_decodes:
            decode = DecodePart(num_decodes, indptr, indices, context_lens, *self._partials(num_decodes))
        if num_decodes < len(batch.query_lens):
            arrays = chunk_arrays(batch, num_decodes, self._chunk_workspace.programs_per_head)
            items, joins = (to_device(torch.from_numpy(array), self._shape.device) for array in arrays)
            chunks = ChunkPart(indptr[num_decodes:], indices, items, joins, self._chunk_workspace)
        return TritonPlan(decode, chunks)

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> TritonDecodePlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return TritonDecodePlan(self._shape, batch_size, max_blocks, self._partials(batch_size))

    def make_mixed_plan(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> TritonMixedPlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        partials = self._partials(num_decodes) if num_decodes else None
        return TritonMixedPlan(
            self._shape, num_decodes, num_chunk_tokens, num_chunks, max_blocks, partials, self._chunk_workspace
        )

    def _partials(self, num_sequences: int) -> DecodePartials:
        shape = self._shape
        launch = decode_launch(shape, num_sequences)
        sizes = (num_sequences, shape.num_heads, launch.num_parts)
        partial = torch.empty((*sizes, shape.head_dim), dtype=torch.float32, device=shape.device)
        lse = torch.empty(sizes, dtype=torch.float32, device=shape.device)
        tickets = torch.zeros((num_sequences, shape.num_kv_heads), dtype=torch.int32, device=shape.device)
        return launch, partial, lse, tickets

    # ---- once per layer ----

    def run(self, query: Tensor, kv_layer: Tensor, plan: AttentionPlan, sinks: Tensor | None = None) -> Tensor:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        if isinstance(plan, TritonDecodePlan | TritonMixedPlan):
            plan = plan.fixed
        assert isinstance(plan, TritonPlan) and query.is_contiguous()
        shape = self._shape
        block_elements = shape.block_size * shape.head_dim
        assert kv_layer.stride()[1:] == (2 * block_elements, block_elements, shape.head_dim, 1)
        out = torch.empty_like(query)
        if plan.decode is not None:
            self._run_decode(query, kv_layer, out, plan.decode, sinks)
        if plan.chunks is not None:
            run_chunks(shape, query, kv_layer, out, plan.chunks, sinks)
        return out

    def _run_decode(self, query: Tensor, kv_layer: Tensor, out: Tensor, part: DecodePart, sinks: Tensor | None) -> None:
        shape = self._shape
        launch, num_parts = part.launch, part.launch.num_parts
        group = shape.num_heads // shape.num_kv_heads
        _decode_kernel[(part.num_sequences, shape.num_kv_heads, num_parts)](
            query,
            kv_layer,
            part.indptr,
            part.indices,
            part.context_lens,
            query if sinks is None else sinks,
            part.partial,
            part.partial_lse,
            part.tickets,
            out,
            self._scale * math.log2(math.e),
            BLOCK_STRIDE=kv_layer.stride(0),
            GROUP=group,
            GROUP_PADDED=triton.next_power_of_2(group),
            ROWS=max(_MIN_DOT, triton.next_power_of_2(group)),
            KV_HEADS=shape.num_kv_heads,
            BLOCK_SIZE=shape.block_size,
            HEAD_DIM=shape.head_dim,
            WINDOW=shape.window or 0,
            SOFT_CAP=(shape.soft_cap or 0.0) * math.log2(math.e),
            SINKS=sinks is not None,
            DIM=triton.next_power_of_2(shape.head_dim),
            TILE=launch.tile,
            PARTS=num_parts,
            PARTS_PADDED=triton.next_power_of_2(num_parts),
            PRECISION="ieee" if shape.dtype == torch.float32 else "tf32",
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            **self._overlapped,
        )


def unsupported_reason(shape: AttentionShape) -> str | None:
    """Return why these kernels don't support ``shape``, or None."""
    if shape.num_heads % shape.num_kv_heads:
        return f"{shape.num_heads} query heads can't share {shape.num_kv_heads} key/value heads"
    if shape.head_dim > 256:
        return f"head_dim {shape.head_dim} is larger than 256"
    return None


# length: Triton inlines all calls, and the loop over tiles is the kernel; parts of it would pass ten tensors around.
@triton.jit
def _decode_kernel(
    query_ptr,
    kv_ptr,
    indptr_ptr,
    indices_ptr,
    context_ptr,
    sinks_ptr,
    partial_ptr,
    lse_ptr,
    tickets_ptr,
    out_ptr,
    scale_log2,
    BLOCK_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # in units of scores, whose base is 2; 0: none
    SINKS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    context = tl.load(context_ptr + sequence)
    table = indices_ptr + tl.load(indptr_ptr + sequence)
    begin = 0
    if WINDOW:  # whole tiles, so that every part's first tile has a token of the window
        begin = tl.maximum(context - WINDOW, 0) // TILE * TILE
    size = _part_size(context - begin, PARTS, TILE)
    first = begin + part * size
    last = tl.minimum(first + size, context)
    inner = tl.arange(0, TILE)
    head_offset = kv_head * (2 * BLOCK_SIZE * HEAD_DIM)
    if OVERLAPPED:  # all but the newest token's keys and values are there already
        token_ahead = tl.minimum(first + inner, context - 1)
        block_ahead = tl.load(table + token_ahead // BLOCK_SIZE).to(tl.int64)
        keys_ahead = kv_ptr + block_ahead * BLOCK_STRIDE + head_offset + (token_ahead % BLOCK_SIZE) * HEAD_DIM
        prefetch(keys_ahead, 0, HEAD_DIM, DIM)
        prefetch(keys_ahead + BLOCK_SIZE * HEAD_DIM, 0, HEAD_DIM, DIM)
    wait(OVERLAPPED)
    if first >= last:
        return

    row = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    head = sequence.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row
    is_head = row < GROUP
    is_column = column < HEAD_DIM
    query = tl.load(
        query_ptr + head[:, None] * HEAD_DIM + column[None, :], mask=is_head[:, None] & is_column[None, :], other=0.0
    )
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + kv_head * GROUP + row, mask=is_head, other=0.0) * 1.4426950408889634
        top = tl.where(part == 0, sink, top)  # as if a token without a value had come before all others
        total = tl.where(part == 0, 1.0, total)
    for tile in tl.range(first, last, TILE):
        token = tile + inner
        is_token = token < last
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + tile // BLOCK_SIZE).to(tl.int64)
            base = block * BLOCK_STRIDE + head_offset + (tile % BLOCK_SIZE + inner) * HEAD_DIM
        else:
            block = tl.load(table + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
            base = block * BLOCK_STRIDE + head_offset + (token % BLOCK_SIZE) * HEAD_DIM
        keys_at = kv_ptr + base[:, None] + column[None, :]
        mask = is_token[:, None] & is_column[None, :]
        keys = tl.load(keys_at, mask=mask, other=0.0).to(query.dtype)  # they may be in FP8
        values = tl.load(keys_at + BLOCK_SIZE * HEAD_DIM, mask=mask, other=0.0).to(query.dtype)
        scores = tl.dot(query, keys.T, input_precision=PRECISION) * scale_log2
        if SOFT_CAP > 0:
            scores = soft_capped(scores, SOFT_CAP)
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        if WINDOW:
            scores = tl.where((token >= context - WINDOW)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
        top = new_top
    result = mixed / total[:, None]
    if PARTS == 1:
        target = out_ptr + head[:, None] * HEAD_DIM + column[None, :]
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=is_head[:, None] & is_column[None, :])
    else:
        target = partial_ptr + (head[:, None] * PARTS + part) * HEAD_DIM + column[None, :]
        tl.store(target, result, mask=is_head[:, None] & is_column[None, :])
        tl.store(lse_ptr + head * PARTS + part, top + tl.log2(total), mask=is_head)
        tl.debug_barrier()  # every thread's share of the part is stored before the ticket is taken
        ticket = tickets_ptr + sequence * KV_HEADS + kv_head
        num_parts = tl.cdiv(context - begin, size)  # those that aren't empty
        if tl.atomic_add(ticket, 1, sem="acq_rel") == num_parts - 1:
            tl.debug_barrier()
            first_head = sequence.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
            _join_parts(
                partial_ptr, lse_ptr, out_ptr, first_head, num_parts, GROUP, GROUP_PADDED, HEAD_DIM, DIM, PARTS,
                PARTS_PADDED,
            )  # fmt: skip
            tl.store(ticket, 0)


@triton.jit
def _part_size(context, PARTS: tl.constexpr, TILE: tl.constexpr):
    """Return the number of tokens of each part; the last parts may be empty, and then write nothing."""
    return tl.cdiv(tl.cdiv(context, PARTS), TILE) * TILE


@triton.jit
def _join_parts(
    partial_ptr,
    lse_ptr,
    out_ptr,
    first_head,
    num_parts,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    """Fill the heads of a group together, from their first ``num_parts`` parts. Padding repeats the last head."""
    row, every, column = tl.arange(0, GROUP_PADDED), tl.arange(0, PARTS_PADDED), tl.arange(0, DIM)
    head = first_head + tl.minimum(row, GROUP - 1)
    lse_at = (lse_ptr + head * PARTS)[:, None]
    is_part = (every < num_parts)[None, :]
    all_lse = tl.load(lse_at + every[None, :], mask=is_part, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(all_lse, 1)
    whole = tl.sum(tl.exp2(all_lse - top[:, None]), 1)
    partial_at = (partial_ptr + head * (PARTS * HEAD_DIM))[:, None, None] + column[None, None, :]
    out = tl.zeros((GROUP_PADDED, DIM), tl.float32)
    # Loads of several parts are in flight at once
    AT_ONCE: tl.constexpr = min(PARTS_PADDED, max(1, JOINED_AT_ONCE // (GROUP_PADDED * DIM)))
    for first in range(0, num_parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = (part < num_parts)[None, :]
        lse = tl.load(lse_at + part[None, :], mask=there, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(lse - top[:, None]) / whole[:, None]
        within = there[:, :, None] & (column < HEAD_DIM)[None, None, :]
        partial = tl.load(partial_at + part[None, :, None] * HEAD_DIM, mask=within, other=0.0, cache_modifier=".cg")
        out += tl.sum(partial * weight[:, :, None], 1)
    mask = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    out_at = out_ptr + head[:, None] * HEAD_DIM + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)
