"""Tokens in the order of their experts, sorted on the device: grids and buffers depend on sizes alone.

A pair is a token and one of its experts; pair ``p`` is choice ``p % k`` of token ``p // k``. Each expert's pairs fill
tiles of ``block_m`` rows, the last one in part.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.triton.launch import overlapped, wait

_CHUNK = 4096  # pairs that a program looks at together


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """The pairs of a rank's experts, in tiles."""

    pairs: Tensor  # int32 [tiles * block_m]: the pair of each row; the number of all pairs: none
    tile_experts: Tensor  # int32 [tiles]: the rank's expert of each tile, counted from its first one; -1: none
    block_m: int


def sort_pairs(experts: Tensor, first: int, num_experts: int, block_m: int) -> SortedPairs:
    """Sort the pairs of ``experts`` int32 [T, k] by expert, each expert's in their order; those of other experts than
    ``first`` to ``first + num_experts - 1`` are left out."""
    num_pairs = experts.numel()
    num_tiles = num_pairs // block_m + min(num_experts, num_pairs)
    pairs = torch.empty(num_tiles * block_m, dtype=torch.int32, device=experts.device)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=experts.device)
    chunk = min(_CHUNK, triton.next_power_of_2(num_pairs))
    _place_kernel[(num_experts + 1,)](
        experts, pairs, tile_experts, num_pairs, num_tiles, first, num_experts,
        COUNTS=triton.next_power_of_2(num_experts + 1), BLOCK_M=block_m, CHUNK=chunk,
        num_warps=4 if chunk <= 1024 else 8, **overlapped(experts.device),
    )  # fmt: skip
    return SortedPairs(pairs, tile_experts, block_m)


@triton.jit
def _place_kernel(
    experts_ptr,
    pairs_ptr,
    tile_experts_ptr,
    num_pairs,
    num_tiles,
    first,
    num_experts,
    COUNTS: tl.constexpr,  # at least one more than experts
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program counts the pairs of all experts; that after the last expert's marks the tiles that nothing fills."""
    wait(OVERLAPPED)
    own = tl.program_id(0)
    numbers, within = tl.arange(0, COUNTS), tl.arange(0, CHUNK)
    counts = tl.zeros((COUNTS,), dtype=tl.int32)
    for start in range(0, num_pairs, CHUNK):
        experts = tl.load(experts_ptr + start + within, mask=start + within < num_pairs, other=-1) - first
        is_here = (experts >= 0) & (experts < num_experts)
        counts += tl.histogram(tl.where(is_here, experts, num_experts), COUNTS)
    counts = tl.where(numbers < num_experts, counts, 0)
    tiles_of = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(numbers < own, tiles_of, 0), 0)
    own_tiles = tl.sum(tl.where(numbers == own, tiles_of, 0), 0)
    if own == num_experts:
        for start in range(first_tile, num_tiles, CHUNK):
            tl.store(tile_experts_ptr + start + within, -1, mask=start + within < num_tiles)
    else:
        for start in range(0, own_tiles, CHUNK):
            inside = start + within < own_tiles
            tl.store(tile_experts_ptr + first_tile + start + within, own, mask=inside)
        at = first_tile * BLOCK_M
        for start in range(0, num_pairs, CHUNK):
            pairs = start + within
            is_own = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=-1) == own + first
            rank = tl.cumsum(is_own.to(tl.int32), 0)
            tl.store(pairs_ptr + at + rank - 1, pairs, mask=is_own)
            at += tl.sum(is_own.to(tl.int32), 0)
        rest = tl.arange(0, BLOCK_M)
        tl.store(pairs_ptr + at + rest, num_pairs, mask=at + rest < (first_tile + own_tiles) * BLOCK_M)
