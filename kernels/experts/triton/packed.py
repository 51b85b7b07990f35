"""Products of pairs with their experts' weights in MXFP4: a program has a tile of sorted pairs, or one pair.

Sums have one order, as in :mod:`splitserve.kernels.experts.triton.grouped`. Few pairs are not sorted: an expert that
several tokens have chosen is read for each of them, from the cache. Small tiles in bfloat16 have kernels of their own
(:mod:`splitserve.kernels.experts.triton.streamed`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.experts.launch import MAX_STREAMED, ExpertLaunch
from splitserve.kernels.experts.mxfp4 import padded_size
from splitserve.kernels.experts.triton import streamed
from splitserve.kernels.experts.triton.activation import ACTIVATION_NUMBERS, activate
from splitserve.kernels.experts.triton.mxfp4 import packed_product
from splitserve.kernels.experts.triton.sorting import SortedPairs
from splitserve.kernels.experts.weights import ExpertWeights
from splitserve.kernels.triton.launch import overlapped, wait, wait_alone

_COLUMNS_OF_A_PAIR = 8  # matrix instructions take no fewer


def packed_gate_up(
    x: Tensor, experts: Tensor, ordered: SortedPairs | None, weights: ExpertWeights, launch: ExpertLaunch
) -> Tensor:
    """Return the activations [T * k, I] of all pairs of the rank's experts; those of other pairs are undefined.

    ``experts``: int32 [T, k]; ``ordered``: their pairs, or None for a program to each; ``weights``: as the kernels read
    them.
    """
    inner_size, hidden_size, activation = weights.inner_size, x.shape[1], weights.activation
    bias, scales = weights.gate_up_bias, weights.gate_up_scales
    assert scales is not None
    out = torch.empty((experts.numel(), inner_size), dtype=x.dtype, device=x.device)
    num_tiles, tiles = _tiles(experts, ordered)
    is_streamed = _is_streamed(x, launch)
    words = weights.gate_up.view(torch.int32 if is_streamed else torch.int16)
    constants = _constants(
        x, launch, num_rows=2 * launch.block_n, block_k=launch.block_k, num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )  # fmt: skip
    kernel = streamed.gate_up_kernel if is_streamed else _gate_up_kernel
    kernel[(triton.cdiv(inner_size, launch.block_n), num_tiles)](
        x, words, scales, x if bias is None else bias, out, experts.numel(), weights.first,
        weights.num_experts, activation.limit or 0.0, activation.sigmoid_factor, activation.up_offset, **tiles,
        HIDDEN=hidden_size, INNER=inner_size, TOP_K=experts.shape[1], HAS_BIAS=bias is not None,
        INTERLEAVED=activation.interleaved, HAS_LIMIT=activation.limit is not None,
        FUNCTION=ACTIVATION_NUMBERS[activation.function], BLOCK_N=launch.block_n,
        **constants, **overlapped(x.device),
    )  # fmt: skip
    return out


def packed_down(
    inner: Tensor, experts: Tensor, factors: Tensor, ordered: SortedPairs | None, weights: ExpertWeights,
    launch: ExpertLaunch,
) -> Tensor:  # fmt: skip
    """Return the products [T * k * S, hidden] of all pairs of the rank's experts, times their factors [T, k], each in
    ``S = launch.down_split_k`` parts; those of other pairs are undefined. They are in float32 where pairs aren't sorted
    or there are parts, else in the dtype of ``inner``."""
    num_pairs, inner_size = inner.shape
    hidden_size, bias, split_k = weights.down.shape[1], weights.down_bias, launch.down_split_k
    scales, is_streamed = weights.down_scales, _is_streamed(inner, launch)
    assert scales is not None
    dtype = torch.float32 if ordered is None or split_k > 1 else inner.dtype
    out = torch.empty((num_pairs * split_k, hidden_size), dtype=dtype, device=inner.device)
    num_tiles, tiles = _tiles(experts, ordered)
    constants = _constants(
        inner, launch, num_rows=launch.down_block_n, block_k=launch.down_block_k,
        num_warps=launch.down_num_warps or launch.num_warps, num_stages=launch.down_num_stages or launch.num_stages,
    )  # fmt: skip
    words = weights.down.view(torch.int32 if is_streamed else torch.int16)
    kernel = streamed.down_kernel if is_streamed else _down_kernel
    kernel[(triton.cdiv(hidden_size, launch.down_block_n), num_tiles, split_k)](
        inner, words, scales, inner if bias is None else bias, factors, out, num_pairs, weights.first,
        weights.num_experts, **tiles, HIDDEN=hidden_size, INNER=inner_size, HAS_BIAS=bias is not None,
        BLOCK_N=launch.down_block_n, SPLIT_K=split_k,
        **constants, **overlapped(inner.device),
    )  # fmt: skip
    return out


def _tiles(experts: Tensor, ordered: SortedPairs | None) -> tuple[int, dict[str, Any]]:
    """Return the number of tiles, and the kernels' arguments that say what is in them."""
    if ordered is None:
        columns = _COLUMNS_OF_A_PAIR
        return experts.numel(), {"pairs_ptr": experts, "experts_ptr": experts, "SORTED": False, "BLOCK_M": columns}
    tiles = {"pairs_ptr": ordered.pairs, "experts_ptr": ordered.tile_experts, "SORTED": True}
    return ordered.tile_experts.numel(), {**tiles, "BLOCK_M": ordered.block_m}


def _is_streamed(x: Tensor, launch: ExpertLaunch) -> bool:
    return _is_paired(x) and launch.block_m <= MAX_STREAMED


def _is_paired(x: Tensor) -> bool:
    """Return whether the kernels unpack two elements at once, which the interpreter can't."""
    return x.dtype == torch.bfloat16 and isinstance(_gate_up_kernel, triton.JITFunction)


def _constants(
    x: Tensor, launch: ExpertLaunch, *, num_rows: int, block_k: int, num_warps: int, num_stages: int
) -> dict[str, Any]:
    """Return the compile-time arguments that depend on the kernel that multiplies ``x``.

    ``num_rows``: rows of the matrix that a program has.
    """
    if _is_streamed(x, launch):
        assert launch.block_m in (1, MAX_STREAMED) and num_rows >= streamed.ROWS_OF_WARP, launch
        num_warps = min(num_warps, num_rows // streamed.ROWS_OF_WARP)
        return {"AHEAD": num_stages, "WARPS": num_warps, "num_warps": num_warps}
    unpacking = {"PADDED": padded_size(x.shape[1]), "PAIRED": _is_paired(x)}
    return {**unpacking, "BLOCK_K": block_k, "num_warps": num_warps, "num_stages": num_stages}


@triton.jit
def _pairs_of(pairs_ptr, experts_ptr, num_pairs, first, SORTED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the tile's expert of the rank, int64, and its pairs [BLOCK_M]; ``num_pairs`` stands for none."""
    number, rows = tl.program_id(1), tl.arange(0, BLOCK_M)
    if SORTED:
        expert = tl.load(experts_ptr + number)
        pairs = tl.load(pairs_ptr + number * BLOCK_M + rows, mask=rows < tl.where(expert < 0, 0, BLOCK_M), other=0)
    else:
        expert = tl.load(experts_ptr + number) - first
        pairs = tl.where(rows == 0, number, num_pairs)
    return expert.to(tl.int64), pairs


@triton.jit
def _gate_up_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_pairs,
    first,
    num_experts,
    limit,
    sigmoid_factor,
    up_offset,
    pairs_ptr,
    experts_ptr,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    FUNCTION: tl.constexpr,
    PAIRED: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_alone(OVERLAPPED)
    expert, pairs = _pairs_of(pairs_ptr, experts_ptr, num_pairs, first, SORTED, BLOCK_M)
    if (expert < 0) | (expert >= num_experts):
        return
    has_pair = pairs < num_pairs
    one = tl.min(pairs, 0)
    tokens = (tl.where(has_pair, pairs, one) // TOP_K).to(tl.int64)
    ALL_ROWS: tl.constexpr = INNER % BLOCK_N == 0
    local = tl.program_id(0) * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)  # an output's gate, then its up
    row = local if INTERLEAVED else local // 2 + local % 2 * INNER
    total = tl.zeros((2 * BLOCK_N, BLOCK_M), dtype=tl.float32)
    words_ptr += expert * (2 * INNER * (PADDED // 4))
    scales_ptr += expert * (2 * INNER * ((PADDED + 127) // 128))
    total = packed_product(
        x_ptr + tokens * HIDDEN, words_ptr, scales_ptr, row, total, 0, 2 * INNER, HIDDEN, PADDED, 1, BLOCK_K, PAIRED,
        ALL_ROWS,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert * 2 * INNER + row, mask=local < 2 * INNER, other=0.0).to(tl.float32)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(total, (BLOCK_N, 2, BLOCK_M)), (0, 2, 1)))
    inner = activate(gate, up, limit, sigmoid_factor, up_offset, HAS_LIMIT, FUNCTION)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out_ptr + tl.where(has_pair, pairs, 0).to(tl.int64)[None, :] * INNER + outputs[:, None]
    tl.store(at, inner.to(out_ptr.dtype.element_ty), mask=has_pair[None, :] & (outputs < INNER)[:, None])


@triton.jit
def _down_kernel(
    inner_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    factors_ptr,
    out_ptr,
    num_pairs,
    first,
    num_experts,
    pairs_ptr,
    experts_ptr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAIRED: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    expert, pairs = _pairs_of(pairs_ptr, experts_ptr, num_pairs, first, SORTED, BLOCK_M)
    if (expert < 0) | (expert >= num_experts):
        return
    has_pair = pairs < num_pairs
    safe_pairs = tl.where(has_pair, pairs, tl.min(pairs, 0)).to(tl.int64)
    ALL_ROWS: tl.constexpr = HIDDEN % BLOCK_N == 0
    outputs, part = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(2)
    is_row = outputs < HIDDEN
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    words_ptr += expert * (HIDDEN * (PADDED // 4))
    scales_ptr += expert * (HIDDEN * ((PADDED + 127) // 128))
    total = packed_product(
        inner_ptr + safe_pairs * INNER, words_ptr, scales_ptr, outputs, total, part, HIDDEN, INNER, PADDED, SPLIT_K,
        BLOCK_K, PAIRED, ALL_ROWS,
    )  # fmt: skip
    if HAS_BIAS:
        has_bias = outputs < tl.where(part == 0, HIDDEN, 0)
        total += tl.load(bias_ptr + expert * HIDDEN + outputs, mask=has_bias, other=0.0).to(tl.float32)[:, None]
    total *= tl.load(factors_ptr + safe_pairs)[None, :]
    at = out_ptr + (safe_pairs * SPLIT_K + part)[None, :] * HIDDEN + outputs[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=has_pair[None, :] & is_row[:, None])
