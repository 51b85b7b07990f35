"""A step's inputs, norm and activation as Triton kernels; one pass over memory each.

Signatures and shapes are those of :mod:`splitserve.kernels.api`. Offsets that can exceed 2**31 elements (long flat
batches) are computed in 64 bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.api import AttentionShape, TokenRows
from splitserve.kernels.triton.launch import overlapped, wait

_GATE_BLOCK = 1024


def begin_step(
    inputs: Tensor, drawn: Tensor, embedding: Tensor, rotations: Tensor, shapes: Sequence[AttentionShape]
) -> TokenRows:
    """See :class:`splitserve.kernels.api.BeginStep`: one kernel instead of a dozen."""
    num_tokens, hidden_size, shape = inputs.shape[1], embedding.shape[1], shapes[0]
    device = inputs.device
    assert inputs.is_contiguous() and drawn.is_contiguous() and embedding.is_contiguous() and rotations.is_contiguous()
    hidden = torch.empty((num_tokens, hidden_size), dtype=shape.dtype, device=device)
    rotation = torch.empty((num_tokens, 2, shape.head_dim), dtype=rotations.dtype, device=device)
    slots = torch.empty((len(shapes), num_tokens, shape.num_kv_heads), dtype=torch.int64, device=device)
    _begin_step_kernel[(num_tokens,)](
        inputs,
        drawn,
        embedding,
        rotations,
        hidden,
        rotation,
        slots,
        num_tokens,
        HIDDEN=hidden_size,
        HIDDEN_BLOCK=triton.next_power_of_2(hidden_size),
        ROTATION=2 * shape.head_dim,
        ROTATION_BLOCK=triton.next_power_of_2(2 * shape.head_dim),
        BLOCK_SIZE=shape.block_size,
        BLOCK_ROWS=tuple(each.rows_per_block * each.block_size for each in shapes),
        KV_HEADS=shape.num_kv_heads,
        KV_HEADS_BLOCK=triton.next_power_of_2(shape.num_kv_heads),
        num_warps=4,
        **overlapped(device),
    )
    return TokenRows(hidden, (rotation[:, 0], rotation[:, 1]), slots)


@triton.jit(do_not_specialize=["num_tokens"])
def _begin_step_kernel(
    inputs_ptr,
    drawn_ptr,
    embedding_ptr,
    rotations_ptr,
    hidden_ptr,
    rotation_ptr,
    slots_ptr,
    num_tokens,
    HIDDEN: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
    ROTATION: tl.constexpr,
    ROTATION_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # of each group of the cache
    KV_HEADS: tl.constexpr,
    KV_HEADS_BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(inputs_ptr + row)
    position = tl.load(inputs_ptr + num_tokens + row)
    previous = tl.load(inputs_ptr + 2 * num_tokens + row)
    known = tl.maximum(tl.load(drawn_ptr + tl.maximum(previous, 0)), 0)
    token = tl.where(previous >= 0, known, token)

    column = tl.arange(0, HIDDEN_BLOCK)
    embedded = tl.load(embedding_ptr + token * HIDDEN + column, mask=column < HIDDEN)
    tl.store(hidden_ptr + row * HIDDEN + column, embedded.to(hidden_ptr.dtype.element_ty), mask=column < HIDDEN)
    column = tl.arange(0, ROTATION_BLOCK)
    rotation = tl.load(rotations_ptr + position * ROTATION + column, mask=column < ROTATION)
    tl.store(rotation_ptr + row * ROTATION + column, rotation, mask=column < ROTATION)
    head = tl.arange(0, KV_HEADS_BLOCK)
    for group in tl.static_range(len(BLOCK_ROWS)):
        block = tl.load(inputs_ptr + (3 + group) * num_tokens + row)
        slot = block * BLOCK_ROWS[group] + position % BLOCK_SIZE + head * (2 * BLOCK_SIZE)
        tl.store(slots_ptr + (group * num_tokens + row) * KV_HEADS + head, slot, mask=head < KV_HEADS)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :class:`splitserve.kernels.api.RmsNorm`; ``weight`` has ``x``'s last dimension, or its last two."""
    size = x.shape[-1]
    rows, weights = x.reshape(-1, size), weight.reshape(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm_kernel[(rows.shape[0],)](
        rows,
        weights,
        out,
        rows.stride(0),
        weights.shape[0],
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 1024 else 1,
        **overlapped(x.device),
    )
    return out


@triton.jit(do_not_specialize=["x_stride", "num_weight_rows"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    num_weight_rows,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + (row % num_weight_rows) * SIZE + columns, mask=inside, other=0.0)
    wait(OVERLAPPED)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row * SIZE + columns, normalised(x, weight, eps, SIZE), mask=inside)


def add_parts(residual: Tensor, parts: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Add the sum of ``parts`` [S, T, N] over S, in order, in float32, and ``bias`` [N] to ``residual`` [T, N] in
    place. Return the residual RMS-normalised by ``weight`` [N] (:class:`splitserve.kernels.api.RmsNorm`)."""
    num_parts, num_rows, size = parts.shape
    assert residual.is_contiguous() and parts.is_contiguous() and residual.shape == (num_rows, size)
    normed = torch.empty_like(residual)
    _add_parts_kernel[(num_rows,)](
        residual,
        parts,
        parts if bias is None else bias,
        weight,
        normed,
        num_rows,
        eps,
        HAS_BIAS=bias is not None,
        PARTS=num_parts,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 1024 else 1,
        **overlapped(residual.device),
    )
    return normed


@triton.jit(do_not_specialize=["num_rows"])
def _add_parts_kernel(
    residual_ptr,
    parts_ptr,
    bias_ptr,
    weight_ptr,
    normed_ptr,
    num_rows,
    eps,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait(OVERLAPPED)
    at = row * SIZE + columns
    total = sum_of_parts(parts_ptr, at, inside, num_rows.to(tl.int64) * SIZE, PARTS)
    if HAS_BIAS:
        total += bias
    total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total = total.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + at, total, mask=inside)
    tl.store(normed_ptr + at, normalised(total, weight, eps, SIZE), mask=inside)


@triton.jit
def sum_of_parts(parts_ptr, at, inside, stride, PARTS: tl.constexpr):
    """Return the sum of the parts, in float32, in order. ``stride``: elements from one part to the next."""
    total = tl.load(parts_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * stride + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def normalised(x, weight, eps, SIZE: tl.constexpr):
    """Return a normalised row of ``SIZE`` elements in its own dtype; elements of ``x`` beyond are zero."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    return normed.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See :class:`splitserve.kernels.api.SiluMul`. Leaves ``gate_up`` as it is."""
    return _gate_mul(gate_up, gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See :class:`splitserve.kernels.api.GeluMul`."""
    return _gate_mul(gate_up, gelu=True)


def _gate_mul(gate_up: Tensor, *, gelu: bool) -> Tensor:
    num_tokens, width = gate_up.shape
    size = width // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    _gate_mul_kernel[(num_tokens, triton.cdiv(size, _GATE_BLOCK))](
        gate_up, out, gate_up.stride(0), GELU=gelu, SIZE=size, BLOCK=_GATE_BLOCK, num_warps=4, **overlapped(out.device)
    )
    return out


@triton.jit
def _gate_mul_kernel(
    gate_up_ptr,
    out_ptr,
    row_stride,
    GELU: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + columns, mask=inside, other=0.0)
    exponent = gate
    if GELU:  # (1 + tanh(y)) / 2 is the logistic function of 2y
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
        exponent = tl.maximum(exponent, -88.0)  # exp(88) is finite
    activated = (gate / (1.0 + tl.exp(-exponent))).to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, activated.to(up.dtype), mask=inside)
