"""The smallest logit that top-k and top-p keep, for each row, in three launches.

Few tokens of a large vocabulary pass a filter, so most are put aside at once. The vocabulary is cut into groups; the
k-th largest of the groups' maxima is no larger than the k-th largest logit, for k groups have one that is at least as
large. The tokens that reach this bound, a few more than k, are collected, and one program per row searches them alone.
For top-p without top-k the bound is one of the lower maxima; where what reaches it has too little mass, or where more
tokens reach a bound than there is room for, the program searches the whole row.

A logit's bits, taken in the order of float32, are a number of 32 bits, of which narrower dtypes fill the first. A
search finds its threshold digit by digit: it measures the tokens (their number, or their weight) of at least each of
three candidates, and takes the largest that is enough. Nothing is sorted, and no result depends on the order in which
tokens were collected but by rounding.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.triton.launch import overlapped, wait

_PART = 4096  # token ids per program
_GROUP = 256  # token ids that share a maximum
_ROOM = 2048  # tokens that can be collected for a row
_CHUNK = 2048  # logits that a row's program searches at a time
_NUM_WARPS = 16  # of that program
_NUM_DIGITS = {torch.bfloat16: 8, torch.float16: 10}  # of a logit's bits as float32, two each; 16 of another dtype


def keep_thresholds(
    logits: Tensor, numbers: Tensor, heats: Tensor, *, group: int = _GROUP, room: int = _ROOM
) -> Tensor:
    """Return the smallest logit kept in each row, float32 [R]; -inf where all are.

    ``logits`` [R, vocab]; ``numbers`` and ``heats`` as :func:`.sampling._numbers` packs them. ``group`` tokens (a power
    of two, at most 4096) share a maximum, and ``room`` tokens of a row can be collected.
    """
    num_rows, vocab_size = logits.shape
    num_parts, num_groups = triton.cdiv(vocab_size, _PART), triton.cdiv(vocab_size, group)
    device, options = logits.device, overlapped(logits.device)
    maxima = torch.empty((num_rows, num_groups), dtype=logits.dtype, device=device)
    masses = torch.empty((2, num_rows, num_parts), dtype=torch.float32, device=device)  # largest logit, sum of weights
    counts = torch.empty(num_rows, dtype=torch.int32, device=device)
    collected = torch.empty((num_rows, room), dtype=logits.dtype, device=device)
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
    sizes = {"VOCAB_SIZE": vocab_size, "NUM_GROUPS": num_groups}
    _maxima_kernel[(num_rows, num_parts)](
        logits, numbers, heats, maxima, masses, counts, logits.stride(0), num_rows,
        **sizes, NUM_PARTS=num_parts, PART=_PART, GROUP=group, **options,
    )  # fmt: skip
    _collect_kernel[(num_rows, num_parts)](
        logits, numbers, heats, maxima, counts, collected, logits.stride(0), num_rows,
        **sizes, ROOM=room, PART=_PART, **options,
    )  # fmt: skip
    _settle_kernel[(num_rows,)](
        logits, numbers, heats, masses, counts, collected, thresholds, logits.stride(0), num_rows,
        **sizes, NUM_PARTS=num_parts, PARTS=triton.next_power_of_2(num_parts), ROOM=room, CHUNK=_CHUNK,
        NUM_DIGITS=_NUM_DIGITS.get(logits.dtype, 16), num_warps=_NUM_WARPS, **options,
    )  # fmt: skip
    return thresholds


@triton.jit
def _order_key(x):
    """Map float32 to uint32 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _logit(key):
    """Return the float32 of an order key: the inverse of ``_order_key``."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _filters(numbers_ptr, heats_ptr, row, num_rows, VOCAB_SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """Return the row's temperature, top-k (0: none), top-p (1: none), and the rank among the groups' maxima that bounds
    the tokens to collect: 0 where none bounds them closely."""
    heat = tl.load(heats_ptr + row)
    top_k = tl.load(numbers_ptr + 3 * num_rows + row)
    top_k = tl.where((heat > 0.0) & (top_k < VOCAB_SIZE), top_k, 0)
    top_p = tl.where(heat > 0.0, tl.load(heats_ptr + num_rows + row), 1.0)
    rank = tl.where(top_k > NUM_GROUPS // 2, 0, top_k)
    rank = tl.where((top_k == 0) & (top_p < 1.0), NUM_GROUPS * 7 // 8, rank)
    return heat, top_k, top_p, rank


@triton.jit
def _search(
    values_ptr,
    count,
    goal,
    kept,
    largest,
    heat,
    BY_MASS: tl.constexpr,
    NUM_DIGITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the largest order key such that the values of at least it measure ``goal``, with ``NUM_DIGITS`` digits of
    two bits, and their measure (float64).

    ``values_ptr``: ``count`` logits. Measured is their number, or with ``BY_MASS`` the sum of their weights
    exp((x - largest) / heat), of those with at least the key ``kept``. Each lane adds up its own before all are added.
    """
    prefix = tl.full((), 0, tl.uint32)
    reached = tl.full((), 0.0, tl.float64) + count
    shift = tl.full((), 32, tl.uint32)
    for _ in range(NUM_DIGITS):
        shift -= 2
        step = tl.full((), 1, tl.uint32) << shift
        first, second, third = prefix + step, prefix + 2 * step, prefix + 3 * step
        of_first = tl.zeros((CHUNK,), tl.float32)
        of_second = tl.zeros((CHUNK,), tl.float32)
        of_third = tl.zeros((CHUNK,), tl.float32)
        for start in range(0, count, CHUNK):
            columns = start + tl.arange(0, CHUNK)
            inside = columns < count
            x = tl.load(values_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
            key = _order_key(x)
            if BY_MASS:
                weight = tl.where(inside & (key >= kept), tl.exp((x - largest) / heat), 0.0)
            else:
                weight = inside.to(tl.float32)
            of_first += tl.where(key >= first, weight, 0.0)
            of_second += tl.where(key >= second, weight, 0.0)
            of_third += tl.where(key >= third, weight, 0.0)
        measured = tl.sum(_beside(of_first, of_second, of_third).to(tl.float64), axis=0)
        enough = measured >= goal
        digit = tl.sum(tl.sum(enough.to(tl.uint32), axis=1), axis=0)  # the smaller a candidate, the more it measures
        if digit > 0:
            prefix += digit * step
            reached = tl.min(tl.min(tl.where(enough, measured, float("inf")), axis=1), axis=0)
    return prefix, reached


@triton.jit
def _whole(prefix, NUM_DIGITS: tl.constexpr):
    """Return the order key that begins with these digits, of a dtype without more: the bits after them are zeros, and
    ones below zero. 0 stays 0."""
    REST: tl.constexpr = (1 << (32 - 2 * NUM_DIGITS)) - 1
    return tl.where((prefix > 0) & (prefix < 0x80000000), prefix | REST, prefix)


@triton.jit
def _beside(first, second, third):
    """Return the three [N] beside each other, [N, 2, 2], the last of -1: their sums take one reduction, not three, and
    a reduction waits for all warps."""
    return tl.join(tl.join(first, second), tl.join(third, tl.zeros_like(third) - 1.0))


@triton.jit(do_not_specialize=["num_rows"])
def _maxima_kernel(
    logits_ptr,
    numbers_ptr,
    heats_ptr,
    maxima_ptr,
    masses_ptr,
    counts_ptr,
    row_stride,
    num_rows,
    VOCAB_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write the largest logit of each group, and of each part the largest and the weights' sum relative to it."""
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part == 0:
        tl.store(counts_ptr + row, 0)
    heat, top_k, top_p, _rank = _filters(numbers_ptr, heats_ptr, row, num_rows, VOCAB_SIZE, NUM_GROUPS)
    if (top_k > 0) | (top_p < 1.0):
        columns = part * PART + tl.arange(0, PART)
        inside = columns < VOCAB_SIZE
        x = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
        of_groups = tl.max(tl.reshape(x, (PART // GROUP, GROUP)), axis=1)
        groups = part * (PART // GROUP) + tl.arange(0, PART // GROUP)
        tl.store(maxima_ptr + row * NUM_GROUPS + groups, of_groups, mask=groups < NUM_GROUPS)
        largest = tl.max(of_groups)
        tl.store(masses_ptr + row * NUM_PARTS + part, largest)
        if top_k == 0:
            weights = tl.where(inside, tl.exp((x - largest) / heat.to(tl.float32)), 0.0)
            tl.store(masses_ptr + (num_rows + row) * NUM_PARTS + part, tl.sum(weights))


@triton.jit(do_not_specialize=["num_rows"])
def _collect_kernel(
    logits_ptr,
    numbers_ptr,
    heats_ptr,
    maxima_ptr,
    counts_ptr,
    collected_ptr,
    row_stride,
    num_rows,
    VOCAB_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    ROOM: tl.constexpr,
    PART: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Collect the logits of a part that reach the row's bound, in any order; ``counts`` says how many there are."""
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    _heat, _top_k, _top_p, rank = _filters(numbers_ptr, heats_ptr, row, num_rows, VOCAB_SIZE, NUM_GROUPS)
    if rank > 0:
        # Half of the digits are a bound that is close enough.
        bound, _ = _search(
            maxima_ptr + row * NUM_GROUPS, NUM_GROUPS, rank.to(tl.float64), 0, 0.0, 1.0, False, NUM_DIGITS=8, CHUNK=1024
        )
        columns = part * PART + tl.arange(0, PART)
        inside = columns < VOCAB_SIZE
        x = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=float("-inf"))
        reaching = (inside & (_order_key(x.to(tl.float32)) >= bound)).to(tl.int32)
        count = tl.sum(reaching)
        if count > 0:
            at = tl.atomic_add(counts_ptr + row, count) + tl.cumsum(reaching, axis=0) - 1
            tl.store(collected_ptr + row * ROOM + at, x, mask=(reaching > 0) & (at < ROOM))


@triton.jit(do_not_specialize=["num_rows"])
def _settle_kernel(
    logits_ptr,
    numbers_ptr,
    heats_ptr,
    masses_ptr,
    counts_ptr,
    collected_ptr,
    thresholds_ptr,
    row_stride,
    num_rows,
    VOCAB_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_DIGITS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write the threshold of a row: the collected logits are searched, or all where these don't decide."""
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    heat, top_k, top_p, rank = _filters(numbers_ptr, heats_ptr, row, num_rows, VOCAB_SIZE, NUM_GROUPS)
    heat32 = heat.to(tl.float32)
    kept = tl.full((), 0, tl.uint32)
    if (top_k > 0) | (top_p < 1.0):
        values_ptr = logits_ptr + row * row_stride
        count = tl.full((), VOCAB_SIZE, tl.int32)
        num_collected = tl.load(counts_ptr + row)
        if (rank > 0) & (num_collected <= ROOM):
            values_ptr = collected_ptr + row * ROOM
            count = num_collected
        parts = tl.arange(0, PARTS)
        of_parts = tl.load(masses_ptr + row * NUM_PARTS + parts, mask=parts < NUM_PARTS, other=float("-inf"))
        largest = tl.max(of_parts)
        surplus = tl.full((), 0.0, tl.float64)  # weight of the ties that top-k keeps beyond k
        if top_k > 0:
            kept, reached = _search(values_ptr, count, top_k.to(tl.float64), 0, 0.0, 1.0, False, NUM_DIGITS, CHUNK)
            kept = _whole(kept, NUM_DIGITS)
            surplus = (reached - top_k.to(tl.float64)) * tl.exp((_logit(kept) - largest) / heat32)
        if top_p < 1.0:
            if top_k > 0:
                total = _mass(values_ptr, count, kept, largest, heat32, CHUNK) - surplus
            else:
                sums = tl.load(masses_ptr + (num_rows + row) * NUM_PARTS + parts, mask=parts < NUM_PARTS, other=0.0)
                total = tl.sum((sums * tl.exp((of_parts - largest) / heat32)).to(tl.float64))
                if _mass(values_ptr, count, kept, largest, heat32, CHUNK) < top_p * total:
                    values_ptr = logits_ptr + row * row_stride
                    count = tl.full((), VOCAB_SIZE, tl.int32)
            kept, reached = _search(values_ptr, count, top_p * total, kept, largest, heat32, True, NUM_DIGITS, CHUNK)
            kept = _whole(kept, NUM_DIGITS)
    tl.store(thresholds_ptr + row, tl.where(kept == 0, float("-inf"), _logit(kept)))


@triton.jit
def _mass(values_ptr, count, kept, largest, heat, CHUNK: tl.constexpr):
    """Return the sum of the weights of the ``count`` values with at least the key ``kept``, float64."""
    mass = tl.full((), 0.0, tl.float64)
    for first in range(0, count, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        inside = columns < count
        x = tl.load(values_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
        mass += tl.sum(tl.where(inside & (_order_key(x) >= kept), tl.exp((x - largest) / heat), 0.0)).to(tl.float64)
    return mass
