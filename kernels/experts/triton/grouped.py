"""Products of sorted pairs with their experts' weights, tile by tile.

A tile's rows are gathered, and results are stored by pair, so that every sum has one order: that of a token's choices.
Where a large expert has several tiles, these compute the same outputs at about the same time, so that all but one read
the weights from the cache.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.experts.launch import ExpertLaunch
from splitserve.kernels.experts.triton.activation import ACTIVATION_NUMBERS, activate
from splitserve.kernels.experts.triton.sorting import SortedPairs
from splitserve.kernels.experts.weights import ExpertWeights
from splitserve.kernels.fp8.triton_quantise import quantise_rows
from splitserve.kernels.fp8.weight import GROUP as FP8_GROUP
from splitserve.kernels.triton.launch import overlapped, wait, wait_alone

_TILES_TOGETHER = 8  # measured on an H200, as the next: docs/decisions/049
_CACHED_BYTES = 32 << 20  # of an expert's weights, which the level-2 cache keeps from one tile to the next


def grouped_gate_up(
    x: Tensor, ordered: SortedPairs, top_k: int, weights: ExpertWeights, launch: ExpertLaunch
) -> Tensor:
    """Return the activations [T * k, I] of all pairs of the rank's experts; those of other pairs are undefined."""
    num_pairs, inner_size, hidden_size = x.shape[0] * top_k, weights.inner_size, x.shape[1]
    out = torch.empty((num_pairs, inner_size), dtype=x.dtype, device=x.device)
    activation, scales = weights.activation, weights.gate_up_scales
    assert scales is None or scales.shape[2] == triton.cdiv(hidden_size, FP8_GROUP), "tiles read a scale of each group"
    x, x_scales = quantise_rows(x, FP8_GROUP) if scales is not None else (x, x)
    num_tiles = ordered.tile_experts.shape[0]
    _gate_up_kernel[(triton.cdiv(inner_size, launch.block_n) * num_tiles,)](
        x, x_scales, weights.gate_up, x if scales is None else scales, _or(weights.gate_up_bias, x), out,
        ordered.pairs, ordered.tile_experts, num_tiles, num_pairs, activation.limit or 0.0, activation.sigmoid_factor,
        activation.up_offset, HIDDEN=hidden_size, INNER=inner_size, TOP_K=top_k, IS_FP8=scales is not None,
        HAS_BIAS=weights.gate_up_bias is not None, INTERLEAVED=activation.interleaved,
        HAS_LIMIT=activation.limit is not None, FUNCTION=ACTIVATION_NUMBERS[activation.function],
        TOGETHER=_tiles_together(weights.gate_up),
        BLOCK_M=ordered.block_m, BLOCK_N=launch.block_n, BLOCK_K=FP8_GROUP if scales is not None else launch.block_k,
        num_warps=launch.num_warps, num_stages=launch.num_stages, **overlapped(x.device),
    )  # fmt: skip
    return out


def grouped_down(
    inner: Tensor, factors: Tensor, ordered: SortedPairs, weights: ExpertWeights, launch: ExpertLaunch
) -> Tensor:
    """Return the products [T * k, hidden] of all pairs of the rank's experts, times their factors [T, k]; those of
    other pairs are undefined."""
    num_pairs, inner_size = inner.shape
    hidden_size = weights.down.shape[1]
    out = torch.empty((num_pairs, hidden_size), dtype=inner.dtype, device=inner.device)
    scales = weights.down_scales
    assert scales is None or scales.shape[2] == triton.cdiv(inner_size, FP8_GROUP), "tiles read a scale of each group"
    x, x_scales = quantise_rows(inner, FP8_GROUP) if scales is not None else (inner, inner)
    num_tiles = ordered.tile_experts.shape[0]
    _down_kernel[(triton.cdiv(hidden_size, launch.down_block_n) * num_tiles,)](
        x, x_scales, weights.down, x if scales is None else scales, _or(weights.down_bias, x), factors, out,
        ordered.pairs, ordered.tile_experts, num_tiles, num_pairs, HIDDEN=hidden_size, INNER=inner_size,
        IS_FP8=scales is not None, HAS_BIAS=weights.down_bias is not None, TOGETHER=_tiles_together(weights.down),
        BLOCK_M=ordered.block_m,
        BLOCK_N=launch.down_block_n, BLOCK_K=FP8_GROUP if scales is not None else launch.down_block_k,
        num_warps=launch.num_warps, num_stages=launch.num_stages, **overlapped(x.device),
    )  # fmt: skip
    return out


def _tiles_together(weight: Tensor) -> int:
    """Return how many tiles take a block of outputs before the next one; ``weight`` [experts, outputs, inputs]."""
    return 1 if weight[0].nbytes <= _CACHED_BYTES else _TILES_TOGETHER


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


@triton.jit
def _place(num_tiles, BLOCKS: tl.constexpr, TOGETHER: tl.constexpr):
    """Return this program's tile and block of outputs: ``TOGETHER`` tiles take each block before the next one."""
    program = tl.program_id(0)
    first = program // (BLOCKS * TOGETHER) * TOGETHER
    count = tl.minimum(num_tiles - first, TOGETHER)
    within = program % (BLOCKS * TOGETHER)
    return first + within % count, within // count


@triton.jit
def _tile(x_at, weight_at, x_scales_at, weight_scales_at, total, SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
          IS_FP8: tl.constexpr):  # fmt: skip
    """Return ``total`` plus the product of a tile's rows of x and of the weight; pointers are those of the rows."""
    columns = tl.arange(0, BLOCK_K)
    for start in range(0, SIZE, BLOCK_K):
        inside = start + columns < SIZE
        rows = tl.load(x_at[:, None] + start + columns[None, :], mask=inside[None, :], other=0.0)
        weight = tl.load(weight_at[None, :] + start + columns[:, None], mask=inside[:, None], other=0.0)
        if IS_FP8:
            group = start // BLOCK_K
            scale = tl.load(x_scales_at + group)[:, None] * tl.load(weight_scales_at + group)[None, :]
            total += tl.dot(rows, weight) * scale
        else:
            total = tl.dot(rows, weight, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    pairs_ptr,
    tile_experts_ptr,
    num_tiles,
    num_pairs,
    limit,
    sigmoid_factor,
    up_offset,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    FUNCTION: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_alone(OVERLAPPED)
    tile, block = _place(num_tiles, (INNER + BLOCK_N - 1) // BLOCK_N, TOGETHER)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    GROUPS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    pairs = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    has_pair = pairs < num_pairs
    tokens = tl.where(has_pair, pairs // TOP_K, 0).to(tl.int64)
    local = block * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)  # an output's gate, then its up
    safe = tl.where(local < 2 * INNER, local, 0)
    weight_rows = expert * 2 * INNER + (safe if INTERLEAVED else safe // 2 + safe % 2 * INNER)
    total = _tile(
        x_ptr + tokens * HIDDEN, weight_ptr + weight_rows * HIDDEN, x_scales_ptr + tokens * GROUPS,
        weight_scales_ptr + weight_rows * GROUPS, tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32), HIDDEN, BLOCK_K,
        IS_FP8,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias_ptr + weight_rows).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N, 2)))  # neighbours, which one thread has
    inner = activate(gate, up, limit, sigmoid_factor, up_offset, HAS_LIMIT, FUNCTION)
    outputs = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out_ptr + tl.where(has_pair, pairs, 0).to(tl.int64)[:, None] * INNER + outputs[None, :]
    tl.store(at, inner.to(out_ptr.dtype.element_ty), mask=has_pair[:, None] & (outputs < INNER)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _down_kernel(
    inner_ptr,
    inner_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    factors_ptr,
    out_ptr,
    pairs_ptr,
    tile_experts_ptr,
    num_tiles,
    num_pairs,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    tile, block = _place(num_tiles, (HIDDEN + BLOCK_N - 1) // BLOCK_N, TOGETHER)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    GROUPS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    pairs = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    has_pair = pairs < num_pairs
    safe_pairs = tl.where(has_pair, pairs, 0).to(tl.int64)
    outputs = block * BLOCK_N + tl.arange(0, BLOCK_N)
    has_output = outputs < HIDDEN
    rows = expert * HIDDEN + tl.where(has_output, outputs, 0)
    total = _tile(
        inner_ptr + safe_pairs * INNER, weight_ptr + rows * INNER, inner_scales_ptr + safe_pairs * GROUPS,
        weight_scales_ptr + rows * GROUPS, tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), INNER, BLOCK_K, IS_FP8,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
    total *= tl.load(factors_ptr + safe_pairs)[:, None]
    at = out_ptr + safe_pairs[:, None] * HIDDEN + outputs[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=has_pair[:, None] & has_output[None, :])
