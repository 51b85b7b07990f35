"""Products of few tokens with their experts' weights: memory-bound, so each program reads whole rows of one expert.

Nothing is sorted: an expert that several tokens have chosen is read for each of them, from the cache. A token's sum is
made by the program of its output, in the order of the token's choices.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.experts.launch import ExpertLaunch
from splitserve.kernels.experts.triton.activation import ACTIVATION_NUMBERS, activate
from splitserve.kernels.experts.weights import ExpertWeights
from splitserve.kernels.triton.launch import overlapped, wait, wait_alone


def narrow_gate_up(x: Tensor, experts: Tensor, weights: ExpertWeights, launch: ExpertLaunch) -> Tensor:
    """Return the activations [T * k, I] of all pairs of the rank's experts; those of other pairs are undefined."""
    num_tokens, top_k = experts.shape
    inner_size, hidden_size = weights.inner_size, x.shape[1]
    out = torch.empty((num_tokens * top_k, inner_size), dtype=x.dtype, device=x.device)
    activation, bias, scales = weights.activation, weights.gate_up_bias, weights.gate_up_scales
    _narrow_gate_up_kernel[(triton.cdiv(inner_size, launch.block_n), num_tokens * top_k)](
        x, weights.gate_up, x if scales is None else scales, x if bias is None else bias, experts, out,
        weights.first, weights.num_experts, activation.limit or 0.0, activation.sigmoid_factor, activation.up_offset,
        HIDDEN=hidden_size, INNER=inner_size, TOP_K=top_k, GROUP=weights.group(weights.gate_up, scales),
        HAS_SCALES=scales is not None, HAS_BIAS=bias is not None,
        INTERLEAVED=activation.interleaved,
        HAS_LIMIT=activation.limit is not None, FUNCTION=ACTIVATION_NUMBERS[activation.function],
        BLOCK_N=launch.block_n, BLOCK_K=launch.block_k, num_warps=launch.num_warps, **overlapped(x.device),
    )  # fmt: skip
    return out


def narrow_down(
    inner: Tensor, experts: Tensor, factors: Tensor, weights: ExpertWeights, launch: ExpertLaunch
) -> Tensor:
    """Return the sum of each token's products, times their factors [T, k] -> float32 [T, hidden]."""
    num_tokens, top_k = experts.shape
    hidden_size, inner_size = weights.down.shape[1], weights.inner_size
    out = torch.empty((num_tokens, hidden_size), dtype=torch.float32, device=inner.device)
    bias, scales = weights.down_bias, weights.down_scales
    _narrow_down_kernel[(triton.cdiv(hidden_size, launch.down_block_n), num_tokens)](
        inner, weights.down, inner if scales is None else scales, inner if bias is None else bias, experts, factors,
        out, weights.first, weights.num_experts, HIDDEN=hidden_size, INNER=inner_size, TOP_K=top_k,
        GROUP=weights.group(weights.down, scales), HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None, BLOCK_N=launch.down_block_n, BLOCK_K=launch.down_block_k, num_warps=launch.num_warps,
        **overlapped(inner.device),
    )  # fmt: skip
    return out


@triton.jit
def _row_products(total, x_at, factor, weight_ptr, scales_ptr, rows, end, SIZE: tl.constexpr, GROUP: tl.constexpr,
                  HAS_SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Return float32 ``total`` [BLOCK_N, BLOCK_K], whose rows are sums to be, plus the products of ``factor`` times the
    vector at ``x_at`` with ``rows`` of the weight, of their elements before ``end``."""
    NUM_GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    columns = tl.arange(0, BLOCK_K)
    for start in range(0, SIZE, BLOCK_K):
        at = start + columns
        inside = at < end
        x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32) * factor
        weight = tl.load(weight_ptr + rows[:, None] * SIZE + at[None, :], mask=inside[None, :], other=0.0)
        weight = weight.to(tl.float32)
        if HAS_SCALES and NUM_GROUPS > 1:  # GROUP is a power of two then
            PARTS: tl.constexpr = max(BLOCK_K // GROUP, 1)
            groups = start // GROUP + tl.arange(0, PARTS)
            scales_at = scales_ptr + rows[:, None] * NUM_GROUPS + groups[None, :]
            scales = tl.load(scales_at, mask=groups[None, :] < NUM_GROUPS, other=0.0)
            scales = tl.broadcast_to(scales[:, :, None], (BLOCK_N, PARTS, BLOCK_K // PARTS))
            weight *= tl.reshape(scales, (BLOCK_N, BLOCK_K))
        if HAS_SCALES and NUM_GROUPS == 1:
            weight *= tl.load(scales_ptr + rows)[:, None]
        total += weight * x[None, :]
    return total


@triton.jit
def _narrow_gate_up_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    experts_ptr,
    out_ptr,
    first,
    num_experts,
    limit,
    sigmoid_factor,
    up_offset,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    FUNCTION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_alone(OVERLAPPED)
    pair = tl.program_id(1).to(tl.int64)
    expert = (tl.load(experts_ptr + pair) - first).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(outputs < INNER, outputs, 0)
    gate_rows = expert * 2 * INNER + (safe * 2 if INTERLEAVED else safe)
    up_rows = gate_rows + (1 if INTERLEAVED else INNER)
    x_at = x_ptr + pair // TOP_K * HIDDEN
    zeros = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    gate = _row_products(
        zeros, x_at, 1.0, weight_ptr, scales_ptr, gate_rows, HIDDEN, HIDDEN, GROUP, HAS_SCALES, BLOCK_N, BLOCK_K
    )
    up = _row_products(
        zeros, x_at, 1.0, weight_ptr, scales_ptr, up_rows, HIDDEN, HIDDEN, GROUP, HAS_SCALES, BLOCK_N, BLOCK_K
    )
    gate, up = tl.sum(gate, 1), tl.sum(up, 1)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + gate_rows).to(tl.float32)
        up += tl.load(bias_ptr + up_rows).to(tl.float32)
    inner = activate(gate, up, limit, sigmoid_factor, up_offset, HAS_LIMIT, FUNCTION)
    tl.store(out_ptr + pair * INNER + outputs, inner.to(out_ptr.dtype.element_ty), mask=outputs < INNER)


@triton.jit
def _narrow_down_kernel(
    inner_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    experts_ptr,
    factors_ptr,
    out_ptr,
    first,
    num_experts,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(outputs < HIDDEN, outputs, 0)
    wait(OVERLAPPED)
    total, biases = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32), tl.zeros((BLOCK_N,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):  # without branches: loads of several choices are in flight at once
        pair = token * TOP_K + choice
        expert = (tl.load(experts_ptr + pair) - first).to(tl.int64)
        is_own = (expert >= 0) & (expert < num_experts)
        end = tl.where(is_own, INNER, 0)
        factor = tl.load(factors_ptr + pair)
        rows = tl.where(is_own, expert, 0) * HIDDEN + safe
        total = _row_products(
            total, inner_ptr + pair * INNER, factor, weight_ptr, scales_ptr, rows, end, INNER, GROUP, HAS_SCALES,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            biases += tl.where(is_own, tl.load(bias_ptr + rows).to(tl.float32) * factor, 0.0)
    sums = tl.sum(total, 1) + biases
    tl.store(out_ptr + token * HIDDEN + outputs, sums, mask=outputs < HIDDEN)
