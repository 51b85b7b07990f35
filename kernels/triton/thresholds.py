"""The smallest logit that top-k and top-p keep, for each row, with several programs per row.

A logit's bits, taken in the order of float32, are a number of 32 bits. The threshold is found digit by digit: in each
pass, the programs of a row measure their part of the vocabulary (tokens, or their weights, of at least each of 16
candidates), and those of the next pass add the parts up, in a fixed order, and take the largest candidate that is
enough. Nothing is sorted, and no result depends on the order of programs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.triton.launch import overlapped, wait

_PART = 4096  # token ids per program
_CHUNK = 1024  # of them at a time
_DIGIT_BITS = 4
_NUM_PASSES = 32 // _DIGIT_BITS


def keep_thresholds(logits: Tensor, numbers: Tensor, heats: Tensor, *, has_top_k: bool, has_top_p: bool) -> Tensor:
    """Return the smallest logit kept in each row, float32 [R]; -inf where all are.

    ``logits`` [R, vocab]; ``numbers`` and ``heats`` as :func:`.sampling._numbers` packs them. ``has_top_k`` and
    ``has_top_p``: some row has that filter.
    """
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _PART)
    device, options = logits.device, overlapped(logits.device)
    largest = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    kept = torch.empty(num_rows, dtype=torch.int64, device=device)  # order key of the smallest logit kept so far
    surplus = torch.empty(num_rows, dtype=torch.float64, device=device)  # tokens that ties add to those k
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
    grid = (num_rows, num_parts)
    sizes = {"VOCAB_SIZE": vocab_size, "NUM_PARTS": num_parts, "PARTS": triton.next_power_of_2(num_parts)}
    _begin_kernel[grid](
        logits, largest, kept, surplus, thresholds, logits.stride(0),
        VOCAB_SIZE=vocab_size, NUM_PARTS=num_parts, PART=_PART, CHUNK=_CHUNK, **options,
    )  # fmt: skip
    for by_mass in [False] * has_top_k + [True] * has_top_p:
        digits = torch.empty((_NUM_PASSES, num_rows, num_parts, 1 << _DIGIT_BITS), dtype=torch.float64, device=device)
        prefixes = torch.empty((_NUM_PASSES, num_rows), dtype=torch.int64, device=device)
        goals = torch.empty(num_rows, dtype=torch.float64, device=device)
        for index in range(_NUM_PASSES):
            _narrow_kernel[grid](
                logits, numbers, heats, largest, kept, surplus, digits, prefixes, goals,
                logits.stride(0), num_rows, index, **sizes, BY_MASS=by_mass, PART=_PART, CHUNK=_CHUNK,
                BITS=_DIGIT_BITS, **options,
            )  # fmt: skip
        _settle_kernel[(num_rows,)](
            numbers, heats, kept, surplus, digits, prefixes, goals, thresholds, num_rows, _NUM_PASSES,
            **sizes, BY_MASS=by_mass, BITS=_DIGIT_BITS, **options,
        )  # fmt: skip
    return thresholds


@triton.jit
def _order_key(x):
    """Map float32 to int64 in [0, 2**32) with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _logit(key):
    """Return the float32 of an order key: the inverse of ``_order_key``."""
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _begin_kernel(
    logits_ptr,
    largest_ptr,
    kept_ptr,
    surplus_ptr,
    thresholds_ptr,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write the largest logit of each part; every row keeps all tokens so far."""
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    largest = tl.full((), float("-inf"), tl.float32)
    for first in range(0, PART, CHUNK):
        columns = part * PART + first + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * row_stride + columns, mask=columns < VOCAB_SIZE, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(x.to(tl.float32)))
    tl.store(largest_ptr + row * NUM_PARTS + part, largest)
    if part == 0:
        tl.store(kept_ptr + row, 0)
        tl.store(surplus_ptr + row, 0.0)
        tl.store(thresholds_ptr + row, float("-inf"))


@triton.jit
def _is_filtered(numbers_ptr, heats_ptr, row, num_rows, VOCAB_SIZE: tl.constexpr, BY_MASS: tl.constexpr):
    if BY_MASS:
        filtered = tl.load(heats_ptr + num_rows + row) < 1.0
    else:
        top_k = tl.load(numbers_ptr + 3 * num_rows + row)
        filtered = (top_k > 0) & (top_k < VOCAB_SIZE)
    return filtered & (tl.load(heats_ptr + row) > 0.0)


@triton.jit
def _resolved(
    numbers_ptr,
    heats_ptr,
    digits_ptr,
    prefixes_ptr,
    goals_ptr,
    row,
    num_rows,
    index,
    surplus_mass,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    BY_MASS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Return the digits found by the passes before ``index``, at least 1; the goal of the search; the measure of what
    they keep. ``surplus_mass``: of the ties that top-k keeps beyond k, which count for nothing in top-p's total."""
    WAYS: tl.constexpr = 1 << BITS
    parts = tl.arange(0, PARTS)
    ways = tl.arange(0, WAYS)
    at = ((index - 1) * num_rows + row) * NUM_PARTS * WAYS
    measured = tl.load(
        digits_ptr + at + parts[:, None] * WAYS + ways[None, :], mask=parts[:, None] < NUM_PARTS, other=0.0
    )
    totals = tl.sum(measured, axis=0)
    if BY_MASS:
        if index == 1:
            total = tl.sum(tl.where(ways == 0, totals, 0.0)) - surplus_mass
            goal = tl.load(heats_ptr + num_rows + row) * total
        else:
            goal = tl.load(goals_ptr + row)
    else:
        goal = tl.load(numbers_ptr + 3 * num_rows + row).to(tl.float64)
    digit = tl.sum(((totals >= goal) & (ways > 0)).to(tl.int64))
    prefix = tl.load(prefixes_ptr + (index - 1) * num_rows + row) + (digit << (32 - BITS * index))
    return prefix, goal, tl.sum(tl.where(ways == digit, totals, 0.0))


@triton.jit(do_not_specialize=["num_rows", "index"])
def _narrow_kernel(
    logits_ptr,
    numbers_ptr,
    heats_ptr,
    largest_ptr,
    kept_ptr,
    surplus_ptr,
    digits_ptr,
    prefixes_ptr,
    goals_ptr,
    row_stride,
    num_rows,
    index,
    VOCAB_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    BY_MASS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Measure a part of a row for the candidates of digit ``index``."""
    wait(OVERLAPPED)
    WAYS: tl.constexpr = 1 << BITS
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if _is_filtered(numbers_ptr, heats_ptr, row, num_rows, VOCAB_SIZE, BY_MASS):
        parts = tl.arange(0, PARTS)
        of_parts = tl.load(largest_ptr + row * NUM_PARTS + parts, mask=parts < NUM_PARTS, other=float("-inf"))
        largest = tl.max(of_parts)
        heat = tl.load(heats_ptr + row).to(tl.float32)
        kept = tl.load(kept_ptr + row)
        prefix = tl.full((), 0, tl.int64)
        if index > 0:
            surplus = tl.load(surplus_ptr + row)
            surplus_mass = tl.where(surplus > 0, surplus * tl.exp((_logit(kept) - largest) / heat), 0.0)
            prefix, goal, _ = _resolved(
                numbers_ptr, heats_ptr, digits_ptr, prefixes_ptr, goals_ptr, row, num_rows, index, surplus_mass,
                NUM_PARTS, PARTS, BY_MASS, BITS,
            )  # fmt: skip
            if (part == 0) & (index == 1):
                tl.store(goals_ptr + row, goal)
        if part == 0:
            tl.store(prefixes_ptr + index * num_rows + row, prefix)
        ways = tl.arange(0, WAYS)
        candidates = prefix + (ways.to(tl.int64) << (32 - BITS - BITS * index))
        measured = tl.zeros((WAYS,), tl.float64)
        for first in range(0, PART, CHUNK):
            columns = part * PART + first + tl.arange(0, CHUNK)
            inside = columns < VOCAB_SIZE
            x = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
            key = _order_key(x)
            if BY_MASS:
                weight = tl.where(inside & (key >= kept), tl.exp((x - largest) / heat), 0.0)
            else:
                weight = inside.to(tl.float32)
            enough = key[:, None] >= candidates[None, :]
            measured += tl.sum(tl.where(enough, weight[:, None], 0.0), axis=0).to(tl.float64)
        tl.store(digits_ptr + ((index * num_rows + row) * NUM_PARTS + part) * WAYS + ways, measured)


@triton.jit(do_not_specialize=["num_rows", "index"])
def _settle_kernel(
    numbers_ptr,
    heats_ptr,
    kept_ptr,
    surplus_ptr,
    digits_ptr,
    prefixes_ptr,
    goals_ptr,
    thresholds_ptr,
    num_rows,
    index,
    VOCAB_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    BY_MASS: tl.constexpr,
    BITS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write the threshold of each row with the filter, after its last pass."""
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    if _is_filtered(numbers_ptr, heats_ptr, row, num_rows, VOCAB_SIZE, BY_MASS):
        key, goal, measured = _resolved(
            numbers_ptr, heats_ptr, digits_ptr, prefixes_ptr, goals_ptr, row, num_rows, index, 0.0,
            NUM_PARTS, PARTS, BY_MASS, BITS,
        )  # fmt: skip
        tl.store(kept_ptr + row, key)
        if not BY_MASS:
            tl.store(surplus_ptr + row, measured - goal)
        tl.store(thresholds_ptr + row, tl.where(key == 0, float("-inf"), _logit(key)))
