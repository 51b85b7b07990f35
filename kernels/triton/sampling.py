"""Sampling as Triton kernels: the same draws as :mod:`splitserve.kernels.reference.sampling`, without host
synchronisation.

Thresholds of rows with top-k or top-p (:mod:`.thresholds`), then two kernels: the best token of each part of the
vocabulary, and the best of the parts. The Gumbel noise is the reference's, in float64, from the same Philox words.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.api import SamplingBatch
from splitserve.kernels.triton.launch import overlapped, wait
from splitserve.kernels.triton.thresholds import keep_thresholds

_PART = 2048  # token ids per program


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See :class:`splitserve.kernels.api.Sample`. ``logits`` may be of any floating dtype."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    device = logits.device
    is_random = any(heat > 0.0 for heat in batch.temperatures)
    is_filtered = is_random and any(
        heat > 0.0 and (top_k > 0 or top_p < 1.0)
        for heat, top_k, top_p in zip(batch.temperatures, batch.top_ks, batch.top_ps, strict=True)
    )
    numbers = _numbers(batch, device) if is_random else torch.empty((6, 0), dtype=torch.int64, device=device)
    heats = numbers[4:].view(torch.float64)
    options = overlapped(device)
    if is_filtered:
        thresholds = keep_thresholds(logits, numbers, heats)
    else:
        thresholds = torch.empty(0, dtype=torch.float32, device=device)
    num_parts = triton.cdiv(vocab_size, _PART)
    best = torch.empty((num_rows, num_parts), dtype=torch.float64, device=device)
    ids = torch.empty((num_rows, num_parts), dtype=torch.int64, device=device)
    _part_kernel[(num_rows, num_parts)](
        logits,
        numbers,
        heats,
        thresholds,
        best,
        ids,
        logits.stride(0),
        num_rows,
        VOCAB_SIZE=vocab_size,
        NUM_PARTS=num_parts,
        IS_RANDOM=is_random,
        IS_FILTERED=is_filtered,
        PART=_PART,
        **options,
    )
    drawn = torch.empty(num_rows, dtype=torch.int64, device=device)
    _join_kernel[(num_rows,)](best, ids, drawn, NUM_PARTS=num_parts, PARTS=triton.next_power_of_2(num_parts), **options)
    return drawn


def _numbers(batch: SamplingBatch, device: torch.device) -> Tensor:
    """Pack the parameters, int64 [6, R]: seeds, choices, positions, top_ks; temperatures and top_ps as float64's bits.
    One copy."""
    packed = np.empty((6, len(batch.seeds)), dtype=np.int64)
    packed[0] = np.array(batch.seeds, dtype=np.uint64).view(np.int64)
    packed[1], packed[2], packed[3] = batch.choices, batch.positions, batch.top_ks
    packed[4:].view(np.float64)[:] = batch.temperatures, batch.top_ps
    return to_device(torch.from_numpy(packed), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy to the device in the stream's order; the allocator keeps the pinned memory in between until then."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@triton.jit(do_not_specialize=["num_rows"])
def _part_kernel(
    logits_ptr,
    numbers_ptr,
    heats_ptr,
    thresholds_ptr,
    best_ptr,
    ids_ptr,
    row_stride,
    num_rows,
    VOCAB_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    IS_FILTERED: tl.constexpr,
    PART: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    inside = columns < VOCAB_SIZE
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    score = logits
    if IS_RANDOM:
        score = logits.to(tl.float64)
        heat = tl.load(heats_ptr + row)
        is_drawn = heat > 0.0
        if IS_FILTERED:
            threshold = tl.load(thresholds_ptr + row)
            if is_drawn & (tl.max(logits) < threshold):
                score = tl.full((PART,), float("-inf"), tl.float64)
                is_drawn = False
        if is_drawn:
            seed = tl.load(numbers_ptr + row)
            choice = tl.load(numbers_ptr + num_rows + row).to(tl.uint32)
            position = tl.load(numbers_ptr + 2 * num_rows + row)
            counter = (part * (PART // 4) + tl.arange(0, PART // 4)).to(tl.uint32)
            zero = counter * 0
            low = zero + position.to(tl.uint32)
            high = zero + (position >> 32).to(tl.uint32)
            w0, w1, w2, w3 = tl.philox(seed, counter, low, zero + choice, high)
            words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (PART,))
            uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
            score = score / heat - tl.log(-tl.log(uniform))
            if IS_FILTERED:
                score = tl.where(logits >= threshold, score, float("-inf"))
    is_nan = tl.max((inside & (logits != logits)).to(tl.int32))
    score = tl.where(inside, score, float("-inf"))
    top = tl.max(score)
    chosen = tl.min(tl.where((score == top) & inside, columns, VOCAB_SIZE))
    tl.store(best_ptr + row * NUM_PARTS + part, tl.where(is_nan > 0, float("nan"), top))
    tl.store(ids_ptr + row * NUM_PARTS + part, chosen.to(tl.int64))


@triton.jit
def _join_kernel(best_ptr, ids_ptr, drawn_ptr, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr, OVERLAPPED: tl.constexpr):
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part < NUM_PARTS
    best = tl.load(best_ptr + row * NUM_PARTS + part, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + row * NUM_PARTS + part, mask=inside, other=0)
    is_nan = tl.max((best != best).to(tl.int32))
    top = tl.max(tl.where(best != best, float("-inf"), best))
    is_finite = (is_nan == 0) & (top > float("-inf")) & (top < float("inf"))
    first = tl.min(tl.where((best == top) & inside, part, PARTS))
    token = tl.sum(tl.where(part == first, ids, 0))
    tl.store(drawn_ptr + row, tl.where(is_finite, token, -1))
