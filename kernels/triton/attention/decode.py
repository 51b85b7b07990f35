"""Attention of sequences with one query token each, as a Triton kernel. See :mod:`.paged`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.api import AttentionShape
from splitserve.kernels.triton.attention.chunks import soft_capped
from splitserve.kernels.triton.attention.plans import ITEM_NUMBERS, DecodePart
from splitserve.kernels.triton.launch import overlapped, prefetch, wait
from splitserve.kernels.tuning.decode_launch import DecodeLaunch

_MIN_DOT = 16  # least number of rows of a matrix instruction
_JOINED_PER_WARP = 4096  # elements of parts that are in registers together


def run_decode(
    shape: AttentionShape,
    query: Tensor,
    kv_layer: Tensor,
    out: Tensor,
    part: DecodePart,
    sinks: Tensor | None = None,
) -> None:
    """Fill the rows of ``out`` [T, H, D] that belong to ``part``, from those of ``query`` [T, H, D]."""
    workspace = part.workspace
    launch = workspace.launch
    group = shape.num_heads // shape.num_kv_heads
    group_padded, dim = triton.next_power_of_2(group), triton.next_power_of_2(shape.head_dim)
    _decode_kernel[(shape.num_kv_heads, workspace.num_items)](
        query,
        kv_layer,
        part.indices,
        part.items,
        query if sinks is None else sinks,
        workspace.partial,
        workspace.partial_lse,
        workspace.tickets,
        out,
        shape.score_scale * math.log2(math.e),
        ITEM_NUMBERS=ITEM_NUMBERS,
        BLOCK_STRIDE=kv_layer.stride(0),
        GROUP=group,
        GROUP_PADDED=group_padded,
        ROWS=max(_MIN_DOT, group_padded),
        KV_HEADS=shape.num_kv_heads,
        BLOCK_SIZE=shape.block_size,
        HEAD_DIM=shape.head_dim,
        WINDOW=shape.window or 0,
        SOFT_CAP=(shape.soft_cap or 0.0) * math.log2(math.e),
        SINKS=sinks is not None,
        DIM=dim,
        TILE=launch.tile,
        AT_ONCE=_parts_at_once(launch, group_padded * dim),
        PRECISION="ieee" if shape.dtype == torch.float32 else "tf32",
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **overlapped(shape.device),
    )


def _parts_at_once(launch: DecodeLaunch, num_elements: int) -> int:
    """Return the number of parts, of ``num_elements`` each, that a program joins at a time: limited by registers, and
    to four times the usual number of parts or a little more, since most sequences have no more."""
    usual: int = triton.next_power_of_2(4 * launch.num_parts)
    return min(max(1, launch.num_warps * _JOINED_PER_WARP // num_elements), usual)


# length: Triton inlines all calls, and the loop over tiles is the kernel; parts of it would pass ten tensors around.
@triton.jit
def _decode_kernel(
    query_ptr,
    kv_ptr,
    indices_ptr,
    items_ptr,
    sinks_ptr,
    partial_ptr,
    lse_ptr,
    tickets_ptr,
    out_ptr,
    scale_log2,
    ITEM_NUMBERS: tl.constexpr,
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
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    at = items_ptr + item * ITEM_NUMBERS
    sequence = tl.load(at)
    table = indices_ptr + tl.load(at + 1)
    first = tl.load(at + 2) * TILE
    last = tl.load(at + 3)
    first_item = tl.load(at + 4)
    num_parts = tl.load(at + 5)
    num_rows = tl.load(at + 7)
    inner = tl.arange(0, TILE)
    head_offset = kv_head * (2 * BLOCK_SIZE * HEAD_DIM)
    if first >= last:  # no item: it writes nothing, and others of its kernel wait for the previous one
        return
    if OVERLAPPED:  # all but the newest token's keys and values are there already
        token_ahead = tl.minimum(first + inner, last - 1)
        block_ahead = tl.load(table + token_ahead // BLOCK_SIZE).to(tl.int64)
        keys_ahead = kv_ptr + block_ahead * BLOCK_STRIDE + head_offset + (token_ahead % BLOCK_SIZE) * HEAD_DIM
        prefetch(keys_ahead, 0, HEAD_DIM, DIM)
        prefetch(keys_ahead + BLOCK_SIZE * HEAD_DIM, 0, HEAD_DIM, DIM)
    wait(OVERLAPPED)

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
        top = tl.where(item == first_item, sink, top)  # as if a token without a value had come before all others
        total = tl.where(item == first_item, 1.0, total)
    if WINDOW:
        oldest = tl.load(at + 6) - WINDOW
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
            scores = tl.where((token >= oldest)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
        top = new_top
    result = mixed / total[:, None]
    if num_parts == 1:
        target = out_ptr + head[:, None] * HEAD_DIM + column[None, :]
        for _ in range(num_rows):
            tl.store(target, result.to(out_ptr.dtype.element_ty), mask=is_head[:, None] & is_column[None, :])
            target += KV_HEADS * GROUP * HEAD_DIM
    else:
        slot = item.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row
        tl.store(
            partial_ptr + slot[:, None] * HEAD_DIM + column[None, :], result, mask=is_head[:, None] & is_column[None, :]
        )
        tl.store(lse_ptr + slot, top + tl.log2(total), mask=is_head)
        tl.debug_barrier()  # every thread's share of the part is stored before the ticket is taken
        ticket = tickets_ptr + sequence * KV_HEADS + kv_head
        if tl.atomic_add(ticket, 1, sem="acq_rel") == num_parts - 1:
            tl.debug_barrier()
            first_slot = first_item.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
            first_head = sequence.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
            _join_parts(
                partial_ptr + first_slot * HEAD_DIM, lse_ptr + first_slot, out_ptr + first_head * HEAD_DIM, num_parts,
                num_rows, GROUP, GROUP_PADDED, KV_HEADS, HEAD_DIM, DIM, AT_ONCE,
            )  # fmt: skip
            tl.store(ticket, 0)


@triton.jit
def _join_parts(
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_parts,
    num_rows,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,  # parts whose loads are in flight together
):
    """Fill the heads of a group together, from their parts in order. Padding repeats the last head."""
    row, column = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM)
    head = tl.minimum(row, GROUP - 1)
    top = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    whole = tl.zeros((GROUP_PADDED,), tl.float32)
    out = tl.zeros((GROUP_PADDED, DIM), tl.float32)
    for first in range(0, num_parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = (part < num_parts)[None, :]
        slot = part[None, :] * (KV_HEADS * GROUP) + head[:, None]
        lse = tl.load(lse_ptr + slot, mask=there, other=float("-inf"), cache_modifier=".cg")
        within = there[:, :, None] & (column < HEAD_DIM)[None, None, :]
        partial_at = partial_ptr + slot[:, :, None] * HEAD_DIM + column[None, None, :]
        partial = tl.load(partial_at, mask=within, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 1))
        weight = tl.exp2(lse - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        whole = whole * shrink + tl.sum(weight, 1)
        out = out * shrink[:, None] + tl.sum(partial * weight[:, :, None], 1)
        top = new_top
    mask = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    target = out_ptr + row[:, None] * HEAD_DIM + column[None, :]
    joined = (out / whole[:, None]).to(out_ptr.dtype.element_ty)
    for _ in range(num_rows):
        tl.store(target, joined, mask=mask)
        target += KV_HEADS * GROUP * HEAD_DIM
