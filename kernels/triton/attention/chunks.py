"""Attention of chunks of several query tokens as Triton kernels: flash attention over blocks.

There is a program per (query head, item), where an item is a tile of queries with its context or a part of that
(:func:`.plans.chunk_arrays`): a few queries over a long context keep a whole GPU busy only if many programs share the
context. Tiles of context that all rows see whole need no mask. A second kernel joins parts by their log-sum-exp, in
order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.api import AttentionShape
from splitserve.kernels.triton.attention.plans import CONTEXT_TILE, QUERY_TILE, ChunkPart
from splitserve.kernels.triton.launch import overlapped, wait

_JOIN_ROWS = 4


def run_chunks(
    shape: AttentionShape,
    query: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    part: ChunkPart,
    sinks: Tensor | None = None,
) -> None:
    """Fill the rows of ``out`` [T, H, D] that belong to ``part``, from those of ``query`` [T, H, D]."""
    num_items, workspace = part.items.shape[1], part.workspace
    # The first programs to start are those of the first, longest items.
    _chunk_kernel[(shape.num_heads, num_items)](
        query,
        kv_layer,
        part.indptr,
        part.indices,
        part.items,
        query if sinks is None else sinks,
        workspace.partial,
        workspace.partial_lse,
        out,
        math.log2(math.e) * shape.score_scale,
        num_items,
        BLOCK_STRIDE=kv_layer.stride(0),
        NUM_HEADS=shape.num_heads,
        GROUP=shape.num_heads // shape.num_kv_heads,
        BLOCK_SIZE=shape.block_size,
        HEAD_DIM=shape.head_dim,
        WINDOW=shape.window or 0,
        SOFT_CAP=(shape.soft_cap or 0.0) * math.log2(math.e),
        SINKS=sinks is not None,
        DIM=triton.next_power_of_2(shape.head_dim),
        TILE=CONTEXT_TILE,
        QUERIES=QUERY_TILE,
        PRECISION="ieee" if shape.dtype == torch.float32 else "tf32",
        SPLITS=workspace.programs_per_head > 1,
        num_warps=4,
        num_stages=2,
        **overlapped(shape.device),
    )
    if part.max_joins:
        _join_kernel[(workspace.programs_per_head, shape.num_heads)](
            workspace.partial,
            workspace.partial_lse,
            part.joins,
            out,
            part.max_joins,
            NUM_HEADS=shape.num_heads,
            HEAD_DIM=shape.head_dim,
            DIM=triton.next_power_of_2(shape.head_dim),
            QUERIES=QUERY_TILE,
            ROWS=_JOIN_ROWS,
            num_warps=4,
            **overlapped(shape.device),
        )


@triton.jit
def soft_capped(scores, CAP: tl.constexpr):
    """Return ``CAP * tanh(scores / CAP)``; scores and CAP are in units of base 2, as :func:`tl.exp2` takes them."""
    return CAP * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634 / CAP))))


# length: half of it declares arguments and passes them on.
@triton.jit(do_not_specialize=["num_items"])
def _chunk_kernel(
    query_ptr,
    kv_ptr,
    indptr_ptr,
    indices_ptr,
    items_ptr,
    sinks_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    scale_log2,
    num_items,
    BLOCK_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # in units of scores, whose base is 2; 0: none
    SINKS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    head = tl.program_id(0)
    item = items_ptr + tl.program_id(1)
    first_row = tl.load(item)
    start = tl.load(item + num_items)  # position of the first row
    num_rows = tl.load(item + 2 * num_items)
    sequence = tl.load(item + 3 * num_items)
    first = tl.load(item + 4 * num_items)
    end = tl.load(item + 5 * num_items)
    slot = tl.load(item + 6 * num_items)
    wait(OVERLAPPED)
    if num_rows == 0:
        return
    table = indices_ptr + tl.load(indptr_ptr + sequence)

    row = tl.arange(0, QUERIES)
    column = tl.arange(0, DIM)
    is_column = column < HEAD_DIM
    at = (first_row + row).to(tl.int64)[:, None] * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + column[None, :]
    mask_rows = (row < num_rows)[:, None] & is_column[None, :]
    query = tl.load(query_ptr + at, mask=mask_rows, other=0.0)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, DIM), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head) * 1.4426950408889634
        top = tl.where(first == 0, sink, top)  # in the first part, as if a token without a value had come before all
        total = tl.where(first == 0, 1.0, total)
    kv_head_ptr = kv_ptr + (head // GROUP) * (2 * BLOCK_SIZE * HEAD_DIM)
    if WINDOW:  # tiles before the first row's window hold nothing for any row
        first = tl.maximum(first, tl.maximum(start + 1 - WINDOW, 0) // TILE * TILE)
    else:
        seen_by_all = tl.maximum(first, tl.minimum(end, start + 1) // TILE * TILE)
        top, total, mixed = _attend(
            query, top, total, mixed, kv_head_ptr, table, start + row, first, seen_by_all, end, scale_log2,
            BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, WINDOW, SOFT_CAP, DIM, TILE, PRECISION, MASKED=False,
        )  # fmt: skip
        first = seen_by_all
    top, total, mixed = _attend(
        query, top, total, mixed, kv_head_ptr, table, start + row, first, end, end, scale_log2,
        BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, WINDOW, SOFT_CAP, DIM, TILE, PRECISION, MASKED=True,
    )  # fmt: skip
    if WINDOW:  # a row of another part's tokens alone: a weight of about 0 when the parts are joined
        total = tl.where(total == 0.0, 1e-30, total)
        top = tl.maximum(top, -1e30)  # nor any difference of infinities, where all the part is before the window
    result = mixed / total[:, None]
    if SPLITS:
        if slot >= 0:
            part_row = (slot.to(tl.int64) * NUM_HEADS + head) * QUERIES + row
            tl.store(partial_ptr + part_row[:, None] * HEAD_DIM + column[None, :], result, mask=mask_rows)
            tl.store(lse_ptr + part_row, top + tl.log2(total), mask=row < num_rows)
        num_rows = tl.where(slot < 0, num_rows, 0)
    mask_rows = (row < num_rows)[:, None] & is_column[None, :]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask_rows)


@triton.jit
def _attend(
    query,
    top,
    total,
    mixed,
    kv_ptr,
    table,
    position,
    first,
    last,
    end,
    scale_log2,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the tokens from ``first`` to ``last``, in tiles, to the sums of rows at ``position`` [rows]; ``MASKED``: not
    all rows see all of them, and those from ``end`` on don't exist."""
    inner, column = tl.arange(0, TILE), tl.arange(0, DIM)
    scale = 1.0 if SOFT_CAP > 0 else scale_log2
    for tile in tl.range(first, last, TILE):
        token = tile + inner
        is_token = token < end
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + tile // BLOCK_SIZE).to(tl.int64)
            base = block * BLOCK_STRIDE + (tile % BLOCK_SIZE + inner) * HEAD_DIM
        else:
            block = tl.load(table + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
            base = block * BLOCK_STRIDE + (token % BLOCK_SIZE) * HEAD_DIM
        keys_at = kv_ptr + base[:, None] + column[None, :]
        values_at = keys_at + BLOCK_SIZE * HEAD_DIM
        if MASKED or HEAD_DIM < DIM:
            mask = is_token[:, None] & (column < HEAD_DIM)[None, :]
            keys = tl.load(keys_at, mask=mask, other=0.0).to(query.dtype)  # they may be in FP8
            values = tl.load(values_at, mask=mask, other=0.0).to(query.dtype)
        else:
            keys, values = tl.load(keys_at).to(query.dtype), tl.load(values_at).to(query.dtype)
        scores = tl.dot(query, keys.T, input_precision=PRECISION)
        if SOFT_CAP > 0:
            scores = soft_capped(scores * scale_log2, SOFT_CAP)
        if MASKED:
            scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        if WINDOW:
            scores = tl.where(token[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        if WINDOW:  # a row may have seen no token yet: its sums stay 0, and no difference is of infinities
            new_top = tl.maximum(new_top, -1e30)
        weights = tl.exp2(scores * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
        top = new_top
    return top, total, mixed


@triton.jit(do_not_specialize=["max_joins"])
def _join_kernel(
    partial_ptr,
    lse_ptr,
    joins_ptr,
    out_ptr,
    max_joins,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Join all split tiles, if any; programs take turns, ``ROWS`` rows each."""
    UNITS: tl.constexpr = QUERIES // ROWS
    head = tl.program_id(1).to(tl.int64)
    num_units = tl.load(joins_ptr) * UNITS
    column = tl.arange(0, DIM)
    is_column = column < HEAD_DIM
    wait(OVERLAPPED)
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0)):
        join = joins_ptr + 1 + unit // UNITS
        first_row = tl.load(join)
        num_rows = tl.load(join + max_joins)
        first_slot = tl.load(join + 2 * max_joins)
        num_parts = tl.load(join + 3 * max_joins)
        row = unit % UNITS * ROWS + tl.arange(0, ROWS)
        is_row = row < num_rows
        mask = is_row[:, None] & is_column[None, :]
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, DIM), tl.float32)
        for slot in tl.range(first_slot, first_slot + num_parts):
            at = (slot * NUM_HEADS + head) * QUERIES + row
            lse = tl.load(lse_ptr + at, mask=is_row, other=0.0)
            part = tl.load(partial_ptr + at[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
            new_top = tl.maximum(top, lse)
            weight = tl.exp2(lse - new_top)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + weight
            mixed = mixed * shrink[:, None] + part * weight[:, None]
            top = new_top
        out_row = (first_row + row).to(tl.int64) * NUM_HEADS + head
        out = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM + column[None, :], out, mask=mask)
