"""Latent attention and the operation before it as Triton kernels, for any GPU. Attention is in its absorbed form only.

A program handles a query token, some of its heads and a part of its context: it reads each latent once, for scores and
for the weighted sum. Parts are joined afterwards by their log-sum-exp. A context's last tile is masked: unwritten
memory may hold NaN.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.api import AttentionPlan, AttentionShape, PagedBatch
from splitserve.kernels.latent.plans import FixedRowPlan, PlanSize, RowPlan, RowWorkspace, heads_per_program, row_arrays
from splitserve.kernels.latent.reference import score_scale
from splitserve.kernels.latent.triton_products import head_products, join_parts
from splitserve.kernels.triton.launch import overlapped, prefetch, wait
from splitserve.kernels.triton.sampling import to_device

_MIN_DOT = 16  # least extent of a matrix instruction
_TILE = 32  # tokens of context at a time
_HEADS_PER_PROGRAM = 8


class TritonLatentAttention:
    """Implements :class:`splitserve.kernels.api.LatentAttention`."""

    def __init__(self, shape: AttentionShape) -> None:
        assert shape.latent is not None
        self._shape, self._latent = shape, shape.latent
        self._scale = score_scale(shape)
        self._workspace = RowWorkspace(shape)

    # ---- once per step ----

    def plan(self, batch: PagedBatch) -> RowPlan:
        """See :class:`splitserve.kernels.api.LatentAttention`."""
        arrays = [
            to_device(torch.from_numpy(array), self._shape.device)
            for array in row_arrays(batch, self._shape.block_size)
        ]
        return self._workspace.plan(arrays)

    def make_decode_plan(self, batch_size: int, max_blocks: int) -> FixedRowPlan:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        return FixedRowPlan(self._shape, PlanSize(batch_size, batch_size, batch_size), max_blocks, self._workspace)

    def make_mixed_plans(
        self, num_decodes: int, num_chunk_tokens: int, num_chunks: int, max_blocks: int
    ) -> Sequence[FixedRowPlan]:
        """See :class:`splitserve.kernels.api.PagedAttention`."""
        size = PlanSize(num_decodes, num_decodes + num_chunk_tokens, num_decodes + num_chunks)
        return [FixedRowPlan(self._shape, size, max_blocks, self._workspace)]

    # ---- once per layer ----

    def run_latent(self, query: Tensor, expansion: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        """See :class:`splitserve.kernels.api.LatentAttention`."""
        if isinstance(plan, FixedRowPlan):
            plan = plan.fixed
        assert isinstance(plan, RowPlan) and plan.starts.shape[0] == query.shape[0]
        sizes = self._latent
        absorbed = head_products(query[..., : sizes.plain_dim], expansion[:, : sizes.plain_dim].transpose(1, 2))
        mixed = self._attend(absorbed, query[..., sizes.plain_dim :], kv_layer, plan)
        return head_products(mixed, expansion[:, sizes.plain_dim :])

    def _attend(self, absorbed: Tensor, rotated: Tensor, kv_layer: Tensor, plan: RowPlan) -> Tensor:
        """Attend with both parts of queries, [T, H, rank] and [T, H, rotated_dim], to the latents: [T, H, rank]."""
        shape, latent, width = self._shape, self._latent, self._latent.width
        assert absorbed.is_contiguous() and rotated.stride(2) == 1
        assert kv_layer.stride()[1:] == (width, 1) and kv_layer.shape[1] == shape.block_size
        num_rows, num_heads = absorbed.shape[:2]
        heads = heads_per_program(num_heads)
        out = torch.empty_like(absorbed)
        _latent_kernel[(num_rows, num_heads // heads, plan.num_parts)](
            absorbed,
            rotated,
            kv_layer,
            plan.starts,
            plan.contexts,
            plan.indices,
            plan.partial,
            plan.partial_lse,
            out,
            self._scale * math.log2(math.e),
            kv_layer.stride(0),
            rotated.stride(0),
            rotated.stride(1),
            NUM_HEADS=num_heads,
            HEADS=heads,
            ROWS=max(_MIN_DOT, triton.next_power_of_2(heads)),
            BLOCK_SIZE=shape.block_size,
            RANK=latent.rank,
            RANK_PADDED=max(_MIN_DOT, triton.next_power_of_2(latent.rank)),
            ROTATED=latent.rotated_dim,
            ROTATED_PADDED=max(_MIN_DOT, triton.next_power_of_2(latent.rotated_dim)),
            WIDTH_PADDED=triton.next_power_of_2(width),
            TILE=_TILE,
            PARTS=plan.num_parts,
            PRECISION="ieee" if shape.dtype == torch.float32 else "tf32",
            num_warps=4 if heads <= _MIN_DOT else 8,
            num_stages=2,
            **overlapped(shape.device),
        )
        return out if plan.num_parts == 1 else join_parts(plan.partial, plan.partial_lse, absorbed.dtype)


# length: Triton inlines all calls, and the loop over tiles is the kernel; parts of it would pass ten tensors around.
@triton.jit
def _latent_kernel(
    absorbed_ptr,
    rotated_ptr,
    kv_ptr,
    starts_ptr,
    contexts_ptr,
    indices_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    scale_log2,
    block_stride,
    rotated_row_stride,
    rotated_head_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of this program, a divisor of NUM_HEADS
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_PADDED: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    token_row = tl.program_id(0)
    part = tl.program_id(2)
    context = tl.load(contexts_ptr + token_row)
    table = indices_ptr + tl.load(starts_ptr + token_row)
    size = tl.cdiv(tl.cdiv(context, PARTS), TILE) * TILE
    first = part * size
    last = tl.minimum(first + size, context)

    WIDTH: tl.constexpr = RANK + ROTATED
    inner = tl.arange(0, TILE)
    if OVERLAPPED:  # all but the newest token's latent are there already
        token_ahead = tl.minimum(first + inner, context - 1)
        block_ahead = tl.load(table + token_ahead // BLOCK_SIZE).to(tl.int64)
        prefetch(kv_ptr + block_ahead * block_stride + (token_ahead % BLOCK_SIZE) * WIDTH, 0, WIDTH, WIDTH_PADDED)
    wait(OVERLAPPED)
    row = tl.arange(0, ROWS)
    is_head = row < HEADS
    head = token_row.to(tl.int64) * NUM_HEADS + tl.program_id(1) * HEADS + row
    if first >= last:  # a part without tokens
        tl.store(lse_ptr + head * PARTS + part, tl.full((ROWS,), float("-inf"), tl.float32), mask=is_head)
        return
    column = tl.arange(0, RANK_PADDED)
    is_column = column < RANK
    angle = tl.arange(0, ROTATED_PADDED)
    is_angle = angle < ROTATED
    absorbed_at = absorbed_ptr + head[:, None] * RANK + column[None, :]
    plain = tl.load(absorbed_at, mask=is_head[:, None] & is_column[None, :], other=0.0)
    rotated_at = rotated_ptr + token_row.to(tl.int64) * rotated_row_stride + angle[None, :]
    rotated_at += (tl.program_id(1) * HEADS + row)[:, None] * rotated_head_stride
    rotated = tl.load(rotated_at, mask=is_head[:, None] & is_angle[None, :], other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, RANK_PADDED), tl.float32)
    for tile in tl.range(first, last, TILE):
        token = tile + inner
        is_token = token < last
        block = tl.load(table + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        at = kv_ptr + block * block_stride + (token % BLOCK_SIZE) * WIDTH
        latents = tl.load(at[:, None] + column[None, :], mask=is_token[:, None] & is_column[None, :], other=0.0)
        keys = tl.load(at[:, None] + RANK + angle[None, :], mask=is_token[:, None] & is_angle[None, :], other=0.0)
        latents, keys = latents.to(plain.dtype), keys.to(plain.dtype)  # they may be in FP8
        scores = tl.dot(plain, latents.T, input_precision=PRECISION)
        scores = tl.dot(rotated, keys.T, scores, input_precision=PRECISION) * scale_log2
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(latents.dtype), latents, mixed * shrink[:, None], input_precision=PRECISION)
        top = new_top
    result = mixed / total[:, None]
    mask = is_head[:, None] & is_column[None, :]
    if PARTS == 1:
        tl.store(out_ptr + head[:, None] * RANK + column[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(partial_ptr + (head[:, None] * PARTS + part) * RANK + column[None, :], result, mask=mask)
        tl.store(lse_ptr + head * PARTS + part, top + tl.log2(total), mask=is_head)


def prepare_latent(
    query: Tensor,
    latent: Tensor,
    norm: Tensor,
    eps: float,
    rotation: tuple[Tensor, Tensor],
    *,
    kv_layer: Tensor,
    slots: Tensor,
) -> None:
    """See :class:`splitserve.kernels.api.PrepareLatent`: norm, rotation and KV write in one kernel."""
    num_tokens, num_heads, query_dim = query.shape
    rank, width = norm.shape[0], latent.shape[1]
    cos, sin = rotation
    assert query.stride()[1:] == (query_dim, 1) and slots.is_contiguous() and latent.stride(1) == 1
    assert cos.stride() == sin.stride() and cos.stride(1) == 1
    assert kv_layer.stride()[1:] == (width, 1)
    _prepare_kernel[(num_tokens, 1 + triton.cdiv(num_heads, _HEADS_PER_PROGRAM))](
        query,
        latent,
        norm,
        cos,
        sin,
        slots,
        kv_layer,
        eps,
        query.stride(0),
        latent.stride(0),
        cos.stride(0),
        NUM_HEADS=num_heads,
        HEADS=_HEADS_PER_PROGRAM,
        QUERY_DIM=query_dim,
        RANK=rank,
        RANK_PADDED=triton.next_power_of_2(rank),
        ROTATED=width - rank,
        HALF=triton.next_power_of_2((width - rank) // 2),
        num_warps=4,
        **overlapped(query.device),
    )


@triton.jit
def _prepare_kernel(
    query_ptr,
    latent_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    kv_ptr,
    eps,
    query_stride,
    latent_stride,
    angle_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """The first program of each token writes its latent, the others rotate its queries."""
    wait(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF)
    middle: tl.constexpr = ROTATED // 2
    is_half = half < middle
    angle = token * angle_stride + half
    cos = tl.load(cos_ptr + angle, mask=is_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle + middle, mask=is_half, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            source, target = latent_ptr + token * latent_stride, kv_ptr + slot * (RANK + ROTATED)
            _write_latent(source, target, norm_ptr, eps, cos, sin, is_half, RANK, RANK_PADDED, ROTATED, HALF)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        inside = (head[:, None] < NUM_HEADS) & is_half[None, :]
        at = query_ptr + token * query_stride + head[:, None] * QUERY_DIM + (QUERY_DIM - ROTATED) + half[None, :]
        first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(at + middle, mask=inside, other=0.0).to(tl.float32)
        dtype = query_ptr.dtype.element_ty
        tl.store(at, (first * cos[None, :] - second * sin[None, :]).to(dtype), mask=inside)
        tl.store(at + middle, (second * cos[None, :] + first * sin[None, :]).to(dtype), mask=inside)


@triton.jit
def _write_latent(
    source,
    target,
    norm_ptr,
    eps,
    cos,
    sin,
    is_half,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
):
    """Write one token's latent to its slot: the normed part, then the rotated key that all heads share."""
    half = tl.arange(0, HALF)
    middle: tl.constexpr = ROTATED // 2
    column = tl.arange(0, RANK_PADDED)
    is_column = column < RANK
    x = tl.load(source + column, mask=is_column, other=0.0)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / RANK + eps)
    weight = tl.load(norm_ptr + column, mask=is_column, other=0.0)
    dtype = target.dtype.element_ty
    tl.store(target + column, ((wide * scale).to(x.dtype) * weight).to(tl.float32).to(dtype), mask=is_column)
    first = tl.load(source + RANK + half, mask=is_half, other=0.0).to(tl.float32)
    second = tl.load(source + RANK + middle + half, mask=is_half, other=0.0).to(tl.float32)
    tl.store(target + RANK + half, (first * cos - second * sin).to(dtype), mask=is_half)
    tl.store(target + RANK + middle + half, (second * cos + first * sin).to(dtype), mask=is_half)
