"""Queries, keys and values between their projection and attention, as Triton kernels: norm, rotation, KV write.

Offsets that can exceed 2**31 elements (KV memory, long flat batches) are computed in 64 bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.raw_qkv import RawQkv
from splitserve.kernels.triton.launch import overlapped, wait
from splitserve.kernels.triton.operations import sum_of_parts

_HEADS_PER_PROGRAM = 8


def prepare_qkv(raw: RawQkv, kv_layer: Tensor) -> Tensor:
    """See :class:`splitserve.kernels.api.PrepareQkv`: norm, rotation and KV write in one kernel."""
    num_parts, num_tokens, num_all_heads, head_dim = raw.parts.shape
    num_kv_heads, block_size = kv_layer.shape[1], kv_layer.shape[3]
    num_heads = num_all_heads - 2 * num_kv_heads
    cos, sin = raw.rotation
    assert raw.parts.is_contiguous() and raw.slots.is_contiguous()
    assert cos.stride() == sin.stride() and cos.stride(1) == 1
    assert kv_layer.stride()[1:] == (2 * block_size * head_dim, block_size * head_dim, head_dim, 1)
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=cos.dtype, device=cos.device)
    _prepare_qkv_kernel[(num_tokens, triton.cdiv(num_all_heads, _HEADS_PER_PROGRAM))](
        raw.parts,
        query if raw.norm is None else raw.norm,
        query if raw.bias is None else raw.bias,
        cos,
        sin,
        raw.slots,
        query,
        kv_layer,
        raw.eps,
        cos.stride(0),
        num_tokens,
        NUM_PARTS=num_parts,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=raw.norm is not None,
        HAS_BIAS=raw.bias is not None,
        HEADS=_HEADS_PER_PROGRAM,
        num_warps=4,
        **overlapped(cos.device),
    )
    return query


# length: a third of it declares arguments.
@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_qkv_kernel(
    qkv_ptr,
    norm_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    query_ptr,
    kv_ptr,
    eps,
    angle_stride,
    num_tokens,
    NUM_PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    num_rotated, num_all = NUM_HEADS + NUM_KV_HEADS, NUM_HEADS + 2 * NUM_KV_HEADS
    column = tl.arange(0, HALF)
    middle: tl.constexpr = HEAD_DIM // 2
    inside = (head[:, None] < num_all) & (column[None, :] < middle)
    at = (token * num_all + head[:, None]) * HEAD_DIM + column[None, :]
    part_stride = num_tokens.to(tl.int64) * num_all * HEAD_DIM
    first = sum_of_parts(qkv_ptr, at, inside, part_stride, NUM_PARTS)
    second = sum_of_parts(qkv_ptr, at + middle, inside, part_stride, NUM_PARTS)
    if HAS_BIAS:
        bias_at = bias_ptr + head[:, None] * HEAD_DIM + column[None, :]
        first += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias_at + middle, mask=inside, other=0.0).to(tl.float32)
    first, second = first.to(query_ptr.dtype.element_ty), second.to(query_ptr.dtype.element_ty)

    is_rotated = head[:, None] < num_rotated
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        norm = norm_ptr + head[:, None] * HEAD_DIM + column[None, :]
        weight_first = tl.load(norm, mask=inside & is_rotated, other=0.0)
        weight_second = tl.load(norm + middle, mask=inside & is_rotated, other=0.0)
        wide_first = _scaled(wide_first, scale, weight_first, first.dtype)
        wide_second = _scaled(wide_second, scale, weight_second, first.dtype)
    angle = token * angle_stride + column
    cos = tl.load(cos_ptr + angle, mask=column < middle, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle + middle, mask=column < middle, other=0.0).to(tl.float32)[None, :]
    rotated_first = (wide_first * cos - wide_second * sin).to(first.dtype)
    rotated_second = (wide_second * cos + wide_first * sin).to(first.dtype)
    first = tl.where(is_rotated, rotated_first, first)
    second = tl.where(is_rotated, rotated_second, second)

    is_query = head[:, None] < NUM_HEADS
    target = query_ptr + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + column[None, :]
    tl.store(target, first, mask=inside & is_query)
    tl.store(target + middle, second, mask=inside & is_query)

    row, is_kv = _kv_rows(slots_ptr, token, head, NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE)
    written = kv_ptr + row[:, None] * HEAD_DIM + column[None, :]
    tl.store(written, first, mask=inside & is_kv[:, None])
    tl.store(written + middle, second, mask=inside & is_kv[:, None])


@triton.jit
def _kv_rows(slots_ptr, token, head, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the rows of HEAD_DIM that a token's keys and values are written to, and a mask of the key and value heads
    in ``head``."""
    num_rotated = NUM_HEADS + NUM_KV_HEADS
    is_kv = (head >= NUM_HEADS) & (head < num_rotated + NUM_KV_HEADS)
    is_value = head >= num_rotated
    kv_head = tl.where(is_value, head - num_rotated, head - NUM_HEADS)
    row = tl.load(slots_ptr + token * NUM_KV_HEADS + kv_head, mask=is_kv, other=0)
    return tl.where(is_value, row + BLOCK_SIZE, row), is_kv & (row >= 0)


@triton.jit
def _scaled(wide, scale, weight, narrow: tl.constexpr):
    """Scale in float32, rounding like the reference: after the scale, and after the weight."""
    scaled = (wide * scale).to(narrow).to(tl.float32) * weight.to(tl.float32)
    return scaled.to(narrow).to(tl.float32)
