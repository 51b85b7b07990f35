"""The choice of experts as a Triton kernel: one program per token."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.experts.spec import GroupScore, RouterSpec, Score
from splitserve.kernels.triton.launch import overlapped, wait

_SCORES = {Score.SOFTMAX: 0, Score.SIGMOID: 1, Score.SOFTMAX_OF_TOP: 2}


def route(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """See :class:`splitserve.kernels.api.Route`. A token's experts come best first; of equal ones the lowest number."""
    num_tokens = logits.shape[0]
    assert logits.shape[1] == spec.num_experts and logits.stride(1) == 1
    experts = torch.empty((num_tokens, spec.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, spec.top_k), dtype=torch.float32, device=logits.device)
    constants = choice_constants(spec, has_bias=bias is not None)
    _route_kernel[(num_tokens,)](
        logits,
        logits if bias is None else bias,
        experts,
        weights,
        logits.stride(0),
        **constants,
        num_warps=1 if constants["GROUP_BLOCK"] * constants["SIZE_BLOCK"] <= 256 else 4,
        **overlapped(logits.device),
    )
    return experts, weights


def choice_constants(spec: RouterSpec, *, has_bias: bool) -> dict[str, Any]:
    """Return the constants of :func:`choose`."""
    return {
        "SCALE": spec.scale,
        "SCORE": _SCORES[spec.score],
        "HAS_BIAS": has_bias,
        "NORMALISED": spec.normalised,
        "GROUPS": spec.num_groups,
        "GROUP_SIZE": spec.group_size,
        "KEPT_GROUPS": spec.kept_groups,
        "BEST_TWO": spec.group_score is GroupScore.TOP2_SUM,
        "TOP_K": spec.top_k,
        "GROUP_BLOCK": triton.next_power_of_2(spec.num_groups),
        "SIZE_BLOCK": triton.next_power_of_2(spec.group_size),
        "SLOT_BLOCK": triton.next_power_of_2(spec.top_k),
    }


@triton.jit
def _kept(
    ranked,
    numbers,
    groups,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    LOWEST: tl.constexpr,
):
    """Return whether each group is one of the best, by its best expert or its best two."""
    group_best = tl.max(ranked, 1)
    if BEST_TWO:
        firsts = tl.min(tl.where(ranked == group_best[:, None], numbers, 1 << 30), 1)
        others = tl.where(numbers == firsts[:, None], float("-inf"), ranked)
        group_best += tl.max(others, 1)
    group_best = tl.where(groups < GROUPS, tl.maximum(group_best, LOWEST), float("-inf"))
    is_kept = groups < 0
    for _ in range(KEPT_GROUPS):
        best = tl.max(group_best, 0)
        chosen = tl.min(tl.where(group_best == best, groups, 1 << 30), 0)
        is_kept = is_kept | (groups == chosen)
        group_best = tl.where(groups == chosen, float("-inf"), group_best)
    return is_kept


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    row_stride,
    SCALE: tl.constexpr,
    SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    choose(
        logits_ptr + row * row_stride, bias_ptr, experts_ptr + row * TOP_K, weights_ptr + row * TOP_K, SCALE, SCORE,
        HAS_BIAS, NORMALISED, GROUPS, GROUP_SIZE, KEPT_GROUPS, BEST_TWO, TOP_K, GROUP_BLOCK, SIZE_BLOCK, SLOT_BLOCK,
    )  # fmt: skip


@triton.jit
def choose(
    logits_at,
    bias_ptr,
    experts_at,
    weights_at,
    SCALE: tl.constexpr,
    SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
):
    """Choose a row's experts by its logits, and store them with their weights."""
    LOWEST: tl.constexpr = -3.0e38  # of experts without a number; those that can't be chosen have minus infinity
    groups, members = tl.arange(0, GROUP_BLOCK), tl.arange(0, SIZE_BLOCK)
    numbers = groups[:, None] * GROUP_SIZE + members[None, :]
    exists = (groups[:, None] < GROUPS) & (members[None, :] < GROUP_SIZE)
    logits = tl.load(logits_at + numbers, mask=exists, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    scores = logits
    if SCORE == 0:
        powers = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    if SCORE == 1:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + numbers, mask=exists, other=0.0)
    ranked = tl.where(ranked == ranked, tl.maximum(ranked, LOWEST), LOWEST)
    ranked = tl.where(exists, ranked, float("-inf"))
    if KEPT_GROUPS < GROUPS:
        is_kept = _kept(ranked, numbers, groups, GROUPS, KEPT_GROUPS, BEST_TWO, LOWEST)
        ranked = tl.where(is_kept[:, None], ranked, float("-inf"))
    BLOCK: tl.constexpr = GROUP_BLOCK * SIZE_BLOCK
    slots, places = tl.arange(0, SLOT_BLOCK), tl.arange(0, BLOCK)
    # As integers of the same order: a warp has an instruction for the greatest and the least of those
    bits = tl.reshape(tl.where(ranked == 0.0, 0.0, ranked), (BLOCK,)).to(tl.int32, bitcast=True)
    left, chosen = bits ^ ((bits >> 31) & 0x7FFFFFFF), tl.zeros((SLOT_BLOCK,), dtype=tl.int32)
    for slot in range(TOP_K):
        place = tl.min(tl.where(left == tl.max(left, 0), places, BLOCK), 0)  # of equal ones the first
        chosen = tl.where(slots == slot, place, chosen)
        left = tl.where(places == place, -(1 << 31), left)
    inside = slots < TOP_K
    is_chosen = (places[None, :] == chosen[:, None]) & inside[:, None]
    weights = tl.sum(tl.where(is_chosen, tl.reshape(scores, (BLOCK,))[None, :], 0.0), 1)
    if SCORE == 2:
        weights = tl.where(inside, weights, float("-inf"))
        powers = tl.exp(weights - tl.max(weights, 0))
        weights = powers / tl.sum(powers, 0)
    if NORMALISED:
        weights = weights / tl.maximum(tl.sum(weights, 0), 1e-20)
    tl.store(experts_at + slots, chosen // SIZE_BLOCK * GROUP_SIZE + chosen % SIZE_BLOCK, mask=inside)
    tl.store(weights_at + slots, weights * SCALE, mask=inside)
