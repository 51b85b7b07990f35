"""Products of few tokens with their experts' weights: memory-bound, so each program reads whole rows of one expert.

Nothing is sorted: an expert that several tokens have chosen is read for each of them, from the cache. A token's sum is
made by the program of its output, in the order of the token's choices. The shared expert of a single token is computed
like more chosen ones: separate products would be two more kernels to start and to wait for.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.experts.launch import ExpertLaunch
from splitserve.kernels.experts.shared_expert import SharedExpert
from splitserve.kernels.experts.spec import GatedActivation
from splitserve.kernels.experts.triton.activation import ACTIVATION_NUMBERS, activate
from splitserve.kernels.experts.weights import ExpertWeights
from splitserve.kernels.triton.launch import overlapped, wait, wait_alone

_SHARED_BLOCKS_AHEAD = tl.constexpr(2)  # more would leave too few registers


def joined_matrices(
    shared: SharedExpert | None, weights: ExpertWeights, launch: ExpertLaunch, num_tokens: int
) -> tuple[Tensor, Tensor] | None:
    """Return gate and up [2 * n * I, hidden] and down [hidden, n * I] of a shared expert that these kernels compute
    like ``n`` more chosen experts; None: there is none, or it is computed by itself.

    Several tokens would each read it, where a product of its own reads it once.
    """
    is_plain = weights.activation == GatedActivation() and weights.gate_up_bias is None
    if shared is None or num_tokens > 1 or launch.block_m > 1 or not is_plain or weights.gate_up_scales is not None:
        return None
    matrices = shared.matrices(weights.gate_up.dtype)
    return None if matrices is None or matrices[1].shape[1] % weights.inner_size else matrices


def narrow_products(
    x: Tensor,
    experts: Tensor,
    factors: Tensor,
    weights: ExpertWeights,
    launch: ExpertLaunch,
    *,
    joined: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the sum of each token's products, times their factors [T, k], -> float32 [T, hidden]. ``joined``: see
    :func:`joined_matrices`."""
    gate_up, down = joined or (None, None)
    if gate_up is not None and down is not None:
        size = down.shape[1]
        assert gate_up.is_contiguous() and down.is_contiguous() and size % weights.inner_size == 0
        assert gate_up.shape == (2 * size, x.shape[1]) and down.shape[0] == x.shape[1]
    inner = _narrow_gate_up(x, experts, weights, launch, gate_up)
    return _narrow_down(inner, experts, factors, weights, launch, shared=down)


def _narrow_gate_up(
    x: Tensor, experts: Tensor, weights: ExpertWeights, launch: ExpertLaunch, shared: Tensor | None
) -> Tensor:
    """Return the activations [T * k + n, I] of all pairs of the rank's experts, then of the ``n`` slices of a
    single token's shared expert; those of other pairs are undefined."""
    num_tokens, top_k = experts.shape
    inner_size, hidden_size = weights.inner_size, x.shape[1]
    num_shared = 0 if shared is None else shared.shape[0] // (2 * inner_size)
    num_vectors = num_tokens * top_k + num_shared
    out = torch.empty((num_vectors, inner_size), dtype=x.dtype, device=x.device)
    activation, bias, scales = weights.activation, weights.gate_up_bias, weights.gate_up_scales
    _narrow_gate_up_kernel[(triton.cdiv(inner_size, launch.block_n), num_vectors)](
        x, weights.gate_up, x if shared is None else shared, x if scales is None else scales,
        x if bias is None else bias, experts, out, weights.first, weights.num_experts, activation.limit or 0.0,
        activation.sigmoid_factor, activation.up_offset,
        HIDDEN=hidden_size, INNER=inner_size, TOP_K=top_k, SHARED=num_shared, READ_ONCE=num_tokens == 1,
        GROUP=weights.group(weights.gate_up, scales), HAS_SCALES=scales is not None, HAS_BIAS=bias is not None,
        INTERLEAVED=activation.interleaved,
        HAS_LIMIT=activation.limit is not None, FUNCTION=ACTIVATION_NUMBERS[activation.function],
        BLOCK_N=launch.block_n, BLOCK_K=launch.block_k, num_warps=launch.num_warps, **overlapped(x.device),
    )  # fmt: skip
    return out


def _narrow_down(
    inner: Tensor,
    experts: Tensor,
    factors: Tensor,
    weights: ExpertWeights,
    launch: ExpertLaunch,
    *,
    shared: Tensor | None,
) -> Tensor:
    """See :func:`narrow_products`."""
    num_tokens, top_k = experts.shape
    hidden_size, inner_size = weights.down.shape[1], weights.inner_size
    out = torch.empty((num_tokens, hidden_size), dtype=torch.float32, device=inner.device)
    bias, scales = weights.down_bias, weights.down_scales
    num_shared = 0 if shared is None else shared.shape[1] // inner_size
    _narrow_down_kernel[(triton.cdiv(hidden_size, launch.down_block_n), num_tokens)](
        inner, weights.down, inner if shared is None else shared, inner if scales is None else scales,
        inner if bias is None else bias, experts, factors, out, weights.first, weights.num_experts,
        HIDDEN=hidden_size, INNER=inner_size, TOP_K=top_k, SHARED=num_shared, READ_ONCE=num_tokens == 1,
        GROUP=weights.group(weights.down, scales), HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None, BLOCK_N=launch.down_block_n, BLOCK_K=launch.down_block_k, num_warps=launch.num_warps,
        **overlapped(inner.device),
    )  # fmt: skip
    return out


@triton.jit
def _row_products(total, x_at, factor, weight_ptr, scales_ptr, rows, end, SIZE: tl.constexpr, GROUP: tl.constexpr,
                  HAS_SCALES: tl.constexpr, READ_ONCE: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_K: tl.constexpr):  # fmt: skip
    """Return float32 ``total`` [BLOCK_N, BLOCK_K], whose rows are sums to be, plus the products of ``factor`` times the
    vector at ``x_at`` with ``rows`` of the weight, of their elements before ``end``."""
    NUM_GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    columns = tl.arange(0, BLOCK_K)
    for start in range(0, SIZE, BLOCK_K):
        at = start + columns
        inside = at < end
        x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32) * factor
        weight = _weight(weight_ptr + rows[:, None] * SIZE + at[None, :], inside, READ_ONCE)
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
def _weight(at, inside, READ_ONCE: tl.constexpr):
    """Load elements [BLOCK_N, BLOCK_K] of a weight; those of a single token leave the cache first."""
    POLICY: tl.constexpr = "evict_first" if READ_ONCE else ""
    return tl.load(at, mask=inside[None, :], other=0.0, eviction_policy=POLICY)


@triton.jit
def _shared_gate_up(x_ptr, weight_ptr, out_at, gate_rows, outputs, HIDDEN: tl.constexpr, INNER: tl.constexpr,
                    SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                    OVERLAPPED: tl.constexpr):  # fmt: skip
    """Make activations ``outputs`` of the shared expert's slice whose rows of the gate are ``gate_rows``.

    The weight doesn't depend on the router, so that its first blocks are loaded before the wait.
    """
    AHEAD: tl.constexpr = min(_SHARED_BLOCKS_AHEAD, (HIDDEN + BLOCK_K - 1) // BLOCK_K)
    columns = tl.arange(0, BLOCK_K)
    gates_at = weight_ptr + gate_rows[:, None] * HIDDEN
    ups_at = gates_at + SHARED * INNER * HIDDEN
    gates, ups = (), ()
    for block in tl.static_range(AHEAD):
        at = block * BLOCK_K + columns
        gates += (_weight(gates_at + at[None, :], at < HIDDEN, True),)
        ups += (_weight(ups_at + at[None, :], at < HIDDEN, True),)
    wait_alone(OVERLAPPED)
    gate = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for block in tl.static_range(AHEAD):
        at = block * BLOCK_K + columns
        x = tl.load(x_ptr + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
        gate += gates[block].to(tl.float32) * x[None, :]
        up += ups[block].to(tl.float32) * x[None, :]
    for start in range(AHEAD * BLOCK_K, HIDDEN, BLOCK_K):
        at = start + columns
        x = tl.load(x_ptr + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
        gate += _weight(gates_at + at[None, :], at < HIDDEN, True).to(tl.float32) * x[None, :]
        up += _weight(ups_at + at[None, :], at < HIDDEN, True).to(tl.float32) * x[None, :]
    inner = activate(tl.sum(gate, 1), tl.sum(up, 1), 0.0, 1.0, 0.0, False, 0)
    tl.store(out_at + outputs, inner.to(out_at.dtype.element_ty), mask=outputs < INNER)


@triton.jit
def _narrow_gate_up_kernel(
    x_ptr,
    weight_ptr,
    shared_ptr,
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
    SHARED: tl.constexpr,  # slices of INNER of a single token's shared expert: their programs come first
    READ_ONCE: tl.constexpr,
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
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(outputs < INNER, outputs, 0)
    pair = tl.program_id(1).to(tl.int64)
    if SHARED > 0:
        if pair < SHARED:
            out_at = out_ptr + (TOP_K + pair) * INNER
            _shared_gate_up(
                x_ptr, shared_ptr, out_at, pair * INNER + safe, outputs, HIDDEN, INNER, SHARED, BLOCK_N, BLOCK_K,
                OVERLAPPED,
            )  # fmt: skip
            return
        pair -= SHARED
    wait_alone(OVERLAPPED)
    expert = (tl.load(experts_ptr + pair) - first).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    gate_rows = expert * 2 * INNER + (safe * 2 if INTERLEAVED else safe)
    up_rows = gate_rows + (1 if INTERLEAVED else INNER)
    x_at = x_ptr + pair // TOP_K * HIDDEN
    zeros = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    gate = _row_products(zeros, x_at, 1.0, weight_ptr, scales_ptr, gate_rows, HIDDEN, HIDDEN, GROUP, HAS_SCALES,
                         READ_ONCE, BLOCK_N, BLOCK_K)  # fmt: skip
    up = _row_products(zeros, x_at, 1.0, weight_ptr, scales_ptr, up_rows, HIDDEN, HIDDEN, GROUP, HAS_SCALES,
                       READ_ONCE, BLOCK_N, BLOCK_K)  # fmt: skip
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
    shared_ptr,
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
    SHARED: tl.constexpr,  # slices of INNER of a single token's shared expert
    READ_ONCE: tl.constexpr,
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
            READ_ONCE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            biases += tl.where(is_own, tl.load(bias_ptr + rows).to(tl.float32) * factor, 0.0)
    for part in tl.static_range(SHARED):
        vector = inner_ptr + (TOP_K + part) * INNER
        total = _row_products(
            total, vector, 1.0, shared_ptr + part * INNER, scales_ptr, safe * SHARED, INNER, INNER, GROUP, False,
            READ_ONCE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    sums = tl.sum(total, 1) + biases
    tl.store(out_ptr + token * HIDDEN + outputs, sums, mask=outputs < HIDDEN)
