"""Operations on logits as Triton kernels: the same draws as :mod:`splitserve.kernels.reference.sampling`, without host
synchronisation; masks, penalties and log-probabilities.

For a draw: thresholds of rows with top-k or top-p (:mod:`.thresholds`), then two kernels: the best token of each part
of the vocabulary, and the best of the parts. The Gumbel noise is the reference's, in float64, from the same Philox
words.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.sampling import FORBIDDEN, IN_PROMPT, SamplingBatch
from splitserve.kernels.triton.launch import overlapped, wait
from splitserve.kernels.triton.thresholds import keep_thresholds

_PART = 2048  # token ids per program
_FILTERED_PART = 512  # likewise, of draws with top-k or top-p: in most programs no token passes
_SCORED_PART = 4096  # likewise, of a program that looks for the likeliest tokens
_ROOM = 32  # of them, for which the kernels are compiled once


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See :class:`splitserve.kernels.sampling.Sample`. ``logits`` may be of any floating dtype."""
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
    part = _FILTERED_PART if is_filtered else _PART
    num_parts = triton.cdiv(vocab_size, part)
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
        PART=part,
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


def mask_logits(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See :class:`splitserve.kernels.sampling.MaskLogits`."""
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    assert bits.is_contiguous() and 32 * bits.shape[1] >= vocab_size
    _mask_kernel[(len(rows), triton.cdiv(vocab_size, _PART))](
        logits, rows, bits, logits.stride(0),
        VOCAB_SIZE=vocab_size, NUM_WORDS=bits.shape[1], FORBIDDEN_LOGIT=FORBIDDEN, PART=_PART,
    )  # fmt: skip


def penalise_logits(logits: Tensor, rows: Tensor, slots: Tensor, occurrences: Tensor, penalties: Tensor) -> None:
    """See :class:`splitserve.kernels.sampling.PenaliseLogits`. The same bits as the reference's."""
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    assert occurrences.is_contiguous() and occurrences.shape[1] == vocab_size and penalties.is_contiguous()
    _penalise_kernel[(len(rows), triton.cdiv(vocab_size, _PART))](
        logits, rows, slots, occurrences, penalties, logits.stride(0),
        VOCAB_SIZE=vocab_size, PROMPT=IN_PROMPT, PART=_PART, enable_fp_fusion=False,
    )  # fmt: skip


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """See :class:`splitserve.kernels.sampling.ScoreTokens`. Of equal logits the lower token id comes first."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_top, num_parts = min(num_top, vocab_size), triton.cdiv(vocab_size, _SCORED_PART)
    device, options = logits.device, overlapped(logits.device)
    masses = torch.empty((num_rows, num_parts, 2), dtype=torch.float32, device=device)  # largest logit, sum of weights
    found = torch.empty((num_rows, num_parts, num_top), dtype=torch.float32, device=device)
    found_ids = torch.empty((num_rows, num_parts, num_top), dtype=torch.int32, device=device)
    scores = torch.empty((num_rows, 1 + num_top), dtype=torch.float32, device=device)
    top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=device)
    _tops_kernel[(num_rows, num_parts)](
        logits, masses, found, found_ids, logits.stride(0), num_top,
        VOCAB_SIZE=vocab_size, NUM_PARTS=num_parts, PART=_SCORED_PART, **options,
    )  # fmt: skip
    _scores_kernel[(num_rows,)](
        logits, token_ids, masses, found, found_ids, scores, top_ids, logits.stride(0), num_top,
        NUM_PARTS=num_parts, PARTS=triton.next_power_of_2(num_parts),
        ROOM=triton.next_power_of_2(num_parts * max(_ROOM, num_top)), **options,
    )  # fmt: skip
    return scores, top_ids


@triton.jit
def _mask_kernel(
    logits_ptr,
    rows_ptr,
    bits_ptr,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    FORBIDDEN_LOGIT: tl.constexpr,
    PART: tl.constexpr,
):
    """Write the logits that aren't allowed; no others are touched. The masks come from a copy, which no kernel launched
    early would wait for."""
    row = tl.load(rows_ptr + tl.program_id(0))
    columns = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = columns < VOCAB_SIZE
    words = tl.load(bits_ptr + tl.program_id(0).to(tl.int64) * NUM_WORDS + columns // 32, mask=inside, other=-1)
    is_forbidden = ((words >> (columns % 32)) & 1) == 0
    tl.store(logits_ptr + row * row_stride + columns, FORBIDDEN_LOGIT, mask=inside & is_forbidden)


@triton.jit
def _penalise_kernel(
    logits_ptr,
    rows_ptr,
    slots_ptr,
    occurrences_ptr,
    penalties_ptr,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    PROMPT: tl.constexpr,
    PART: tl.constexpr,
):
    """Read all occurrences of a part, and the logits of tokens that occurred. Like masks, the penalties come from a
    copy. Products are rounded before they are subtracted, as on a CPU."""
    row, slot = tl.load(rows_ptr + tl.program_id(0)), tl.load(slots_ptr + tl.program_id(0))
    penalties_ptr += 3 * tl.program_id(0)
    repetition, frequency, presence = tl.load(penalties_ptr), tl.load(penalties_ptr + 1), tl.load(penalties_ptr + 2)
    columns = tl.program_id(1) * PART + tl.arange(0, PART)
    found = tl.load(occurrences_ptr + slot * VOCAB_SIZE + columns, mask=columns < VOCAB_SIZE, other=0)
    has_occurred, count = found != 0, (found & (PROMPT - 1)).to(tl.float32)
    logits_ptr += row * row_stride + columns
    logit = tl.load(logits_ptr, mask=has_occurred, other=0.0)
    logit = tl.where(logit < 0, logit * repetition, tl.div_rn(logit, repetition + tl.zeros_like(logit)))
    logit -= frequency * count
    logit -= tl.where(count > 0, presence, 0.0)
    tl.store(logits_ptr, logit, mask=has_occurred)


@triton.jit(do_not_specialize=["num_top"])
def _tops_kernel(
    logits_ptr,
    masses_ptr,
    found_ptr,
    ids_ptr,
    row_stride,
    num_top,
    VOCAB_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write the largest logits of a part with their ids, and the sum of all weights relative to the largest."""
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lanes = tl.arange(0, PART)
    columns = part * PART + lanes
    x = tl.load(logits_ptr + row * row_stride + columns, mask=columns < VOCAB_SIZE, other=float("-inf")).to(tl.float32)
    largest = tl.max(x)
    total = tl.sum(tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest)))
    at = row * NUM_PARTS + part
    tl.store(masses_ptr + 2 * at, largest)
    tl.store(masses_ptr + 2 * at + 1, total)
    for number in range(num_top):
        best, lane = tl.max(x, axis=0, return_indices=True)
        tl.store(found_ptr + at * num_top + number, best)
        tl.store(ids_ptr + at * num_top + number, tl.minimum(part * PART + lane, VOCAB_SIZE - 1))
        x = tl.where(lanes == lane, float("-inf"), x)


@triton.jit(do_not_specialize=["num_top"])
def _scores_kernel(
    logits_ptr,
    token_ids_ptr,
    masses_ptr,
    found_ptr,
    ids_ptr,
    scores_ptr,
    top_ids_ptr,
    row_stride,
    num_top,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write a row's log-probabilities: its token's, then those of the largest of what the parts have found."""
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    inside = parts < NUM_PARTS
    of_parts = tl.load(masses_ptr + 2 * (row * NUM_PARTS + parts), mask=inside, other=float("-inf"))
    sums = tl.load(masses_ptr + 2 * (row * NUM_PARTS + parts) + 1, mask=inside, other=0.0)
    largest = tl.max(of_parts)
    log_total = largest + tl.log(tl.sum(tl.where(inside, sums * tl.exp(of_parts - largest), 0.0)))
    own = tl.load(logits_ptr + row * row_stride + tl.load(token_ids_ptr + row)).to(tl.float32)
    tl.store(scores_ptr + row * (1 + num_top), own - log_total)
    lanes = tl.arange(0, ROOM)
    first = row * NUM_PARTS * num_top
    found = tl.load(found_ptr + first + lanes, mask=lanes < NUM_PARTS * num_top, other=float("-inf"))
    for number in range(num_top):
        best, lane = tl.max(found, axis=0, return_indices=True)
        tl.store(scores_ptr + row * (1 + num_top) + 1 + number, best - log_total)
        tl.store(top_ids_ptr + row * num_top + number, tl.load(ids_ptr + first + lane).to(tl.int64))
        found = tl.where(lanes == lane, float("-inf"), found)
