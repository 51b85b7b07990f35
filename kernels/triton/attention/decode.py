"""Attention of sequences with one query token each, as a Triton kernel. See :mod:`.paged`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.api import AttentionShape
from splitserve.kernels.raw_qkv import RawQkv
from splitserve.kernels.triton.attention.chunks import soft_capped
from splitserve.kernels.triton.attention.plans import ITEM_NUMBERS, DecodePart
from splitserve.kernels.triton.attention.qkv import checked_rotation, prepared_heads
from splitserve.kernels.triton.launch import overlapped, prefetch, wait
from splitserve.kernels.tuning.decode_launch import DecodeLaunch

_MIN_DOT = 16  # least number of rows of a matrix instruction
_JOINED_PER_WARP = 4096  # elements of parts that are in registers together


def run_decode(
    shape: AttentionShape,
    query: Tensor | RawQkv,
    kv_layer: Tensor,
    out: Tensor,
    part: DecodePart,
    sinks: Tensor | None = None,
) -> None:
    """Fill the rows of ``out`` [T, H, D] that belong to ``part``, from those of ``query`` [T, H, D]; or from raw ones,
    and write their keys and values to ``kv_layer`` [num_blocks, G, 2, B, D]."""
    workspace = part.workspace
    launch = workspace.launch
    group = shape.num_heads // shape.num_kv_heads
    group_padded, dim = triton.next_power_of_2(group), triton.next_power_of_2(shape.head_dim)
    _decode_kernel[(shape.num_kv_heads, workspace.num_items)](
        **_query_arguments(query),
        kv_ptr=kv_layer,
        indices_ptr=part.indices,
        items_ptr=part.items,
        sinks_ptr=out if sinks is None else sinks,
        partial_ptr=workspace.partial,
        lse_ptr=workspace.partial_lse,
        tickets_ptr=workspace.tickets,
        out_ptr=out,
        scale_log2=shape.score_scale * math.log2(math.e),
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


def _query_arguments(query: Tensor | RawQkv) -> dict[str, Any]:
    """Return the kernel's arguments that say where its queries are, or what they are made from."""
    if isinstance(query, Tensor):
        names = ("query_ptr", "norm_ptr", "bias_ptr", "cos_ptr", "sin_ptr", "slots_ptr")
        sizes = {"part_stride": 0, "angle_stride": 0, "eps": 0.0}
        return {**dict.fromkeys(names, query), **sizes, "NUM_PARTS": 0, "HAS_NORM": False, "HAS_BIAS": False}
    cos, sin = checked_rotation(query)
    parts = query.parts
    return {
        "query_ptr": parts,
        "norm_ptr": cos if query.norm is None else query.norm,
        "bias_ptr": cos if query.bias is None else query.bias,
        "cos_ptr": cos,
        "sin_ptr": sin,
        "slots_ptr": query.slots,
        "part_stride": parts.stride(0),
        "angle_stride": cos.stride(0),
        "eps": query.eps,
        "NUM_PARTS": parts.shape[0],
        "HAS_NORM": query.norm is not None,
        "HAS_BIAS": query.bias is not None,
    }


def _parts_at_once(launch: DecodeLaunch, num_elements: int) -> int:
    """Return the number of parts, of ``num_elements`` each, that a program joins at a time: limited by registers, and
    to four times the usual number of parts or a little more, since most sequences have no more."""
    usual: int = triton.next_power_of_2(4 * launch.num_parts)
    return min(max(1, launch.num_warps * _JOINED_PER_WARP // num_elements), usual)


# length: Triton inlines all calls, and the loop over tiles is the kernel; parts of it would pass ten tensors around.
@triton.jit(do_not_specialize=["part_stride", "angle_stride"])
def _decode_kernel(
    query_ptr,
    norm_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    kv_ptr,
    indices_ptr,
    items_ptr,
    sinks_ptr,
    partial_ptr,
    lse_ptr,
    tickets_ptr,
    out_ptr,
    scale_log2,
    part_stride,
    angle_stride,
    eps,
    NUM_PARTS: tl.constexpr,  # of query_ptr, which are RawQkv's; 0: it has the queries
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    known = last
    if NUM_PARTS > 0:
        query = prepared_heads(
            query_ptr, norm_ptr, bias_ptr, cos_ptr, sin_ptr, sequence, kv_head * GROUP + row, is_head, part_stride,
            angle_stride, eps, NUM_PARTS, KV_HEADS * (GROUP + 2), HEAD_DIM, DIM, True, HAS_NORM, HAS_BIAS,
        )  # fmt: skip
    else:
        query = tl.load(
            query_ptr + head[:, None] * HEAD_DIM + column[None, :], mask=is_head[:, None] & is_column[None, :],
            other=0.0,
        )  # fmt: skip
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + kv_head * GROUP + row, mask=is_head, other=0.0) * 1.4426950408889634
        top = tl.where(item == first_item, sink, top)  # as if a token without a value had come before all others
        total = tl.where(item == first_item, 1.0, total)
    context = tl.load(at + 6)
    if NUM_PARTS > 0:  # the newest token counts in its item; without a branch, its loads and the query's overlap
        known = tl.minimum(last, context - 1)
        is_newest = tl.arange(0, 1) + last == context
        key, value = _newest(
            query_ptr, norm_ptr, bias_ptr, cos_ptr, sin_ptr, slots_ptr, kv_ptr, sequence, kv_head, is_newest,
            part_stride, angle_stride, eps, query.dtype, NUM_PARTS, GROUP, KV_HEADS, BLOCK_SIZE, HEAD_DIM, DIM,
            HAS_NORM, HAS_BIAS,
        )  # fmt: skip
        score = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale_log2
        if SOFT_CAP > 0:
            score = soft_capped(score, SOFT_CAP)
        new_top = tl.where(is_newest, tl.maximum(top, score), 0.0)  # elsewhere top may be -inf
        weight = tl.where(is_newest, tl.exp2(score - new_top), 0.0)
        total = tl.where(is_newest, total * tl.exp2(top - new_top), total) + weight
        mixed = weight[:, None] * value.to(tl.float32)
        top = tl.where(is_newest, new_top, top)
    if WINDOW:
        oldest = context - WINDOW
    for tile in tl.range(first, last, TILE):
        token = tile + inner
        is_token = token < known
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


@triton.jit
def _newest(
    qkv_ptr, norm_ptr, bias_ptr, cos_ptr, sin_ptr, slots_ptr, kv_ptr, sequence, kv_head, is_newest, part_stride,
    angle_stride, eps, narrow: tl.constexpr, NUM_PARTS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write the key and the value of a sequence's newest token, and return them as memory has them: [1, DIM] each.
    Unless ``is_newest`` [1], nothing is written, and they are zeros."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    NUM_ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    head, column = HEADS + kv_head + tl.arange(0, 1), tl.arange(0, DIM)
    slot = tl.load(slots_ptr + sequence.to(tl.int64) * KV_HEADS + kv_head + tl.arange(0, 1))
    key = prepared_heads(
        qkv_ptr, norm_ptr, bias_ptr, cos_ptr, sin_ptr, sequence, head, is_newest, part_stride, angle_stride, eps,
        NUM_PARTS, NUM_ALL, HEAD_DIM, DIM, True, HAS_NORM, HAS_BIAS,
    )  # fmt: skip
    value = prepared_heads(
        qkv_ptr, norm_ptr, bias_ptr, cos_ptr, sin_ptr, sequence, head + KV_HEADS, is_newest, part_stride, angle_stride,
        eps, NUM_PARTS, NUM_ALL, HEAD_DIM, DIM, False, HAS_NORM, HAS_BIAS,
    )  # fmt: skip
    key, value = key.to(kv_ptr.dtype.element_ty), value.to(kv_ptr.dtype.element_ty)
    written = kv_ptr + slot[:, None] * HEAD_DIM + column[None, :]
    mask = (is_newest & (slot >= 0))[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(written, key, mask=mask)
    tl.store(written + BLOCK_SIZE * HEAD_DIM, value, mask=mask)
    return key.to(narrow), value.to(narrow)
