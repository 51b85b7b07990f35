"""Sums over the ranks of one machine, read and written directly through each other's memory, in one kernel.

For the small tensors of a decode step latency matters: NCCL's rings pass a tensor on in steps, here all ranks
communicate with all others at once. Every rank has a buffer that all can address, a :class:`PeerMemory`, with a slot
for each rank's summand. One-shot: each rank writes its summand into its slot of all other buffers, and sums what it
received. Two-shot: each rank reads one slice of the summands that the others left in their own slots, sums it and
writes it to the others: less data to move with many ranks, but they meet twice. The summands are added in the order of
the ranks, in float32, with the residual first, so all ranks get the same bits. If a program has whole rows of the
residual, it normalises them as well.

Ranks meet at flags that only count up, so that a captured graph can be replayed: program i of a rank waits for program
i of the others, since it reads what those wrote. The summands of two consecutive calls are in different halves of the
buffer, and two halves suffice. A slot is read in a call by its own rank or by the others, and written by one rank, two
calls later at the earliest. That rank has met all others in the call between: they had begun that call, so their
earlier kernels had ended with all their programs, including the reads. So it doesn't matter which program handles which
part in which call. The results of two-shot need no second half: they are written after the first meeting of a call, and
read before the next call begins. Without flags (:func:`flagless_add`) ranks don't meet (:mod:`.flagless_add`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitserve.kernels.triton.flagless_add import flagless_kernel
from splitserve.kernels.triton.launch import overlapped, wait
from splitserve.kernels.triton.operations import normalised
from splitserve.kernels.triton.peer_memory import ALIGNMENT, FLAG_BYTES, PeerMemory, at_peer, meet, summand

PROGRAMS = 64
"""Programs of every launch, whatever its size: their counters must stay in step. Few enough to run concurrently on any
GPU."""

_BLOCK = 4096
_LONGEST_ROW = 8192  # longest row that one program normalises


def flagless_bytes(capacity_bytes: int, size: int) -> int:
    """Return the bytes of each rank's buffer: three parts with a slot for each rank."""
    assert capacity_bytes % (ALIGNMENT * 4) == 0  # slots are emptied 16 elements at a time
    assert 3 * size * capacity_bytes < 2**31  # offsets are computed in 32 bits
    return 3 * size * capacity_bytes


def buffer_bytes(capacity_bytes: int, size: int) -> int:
    """Return the bytes of each rank's buffer: two halves with a slot for each rank, one part for the others' results,
    the flags."""
    assert capacity_bytes % ALIGNMENT == 0
    assert 4 * size <= FLAG_BYTES
    num_bytes = (2 * size + 1) * capacity_bytes + FLAG_BYTES * PROGRAMS
    assert num_bytes < 2**31  # offsets are computed in 32 bits
    return num_bytes


def one_shot_add(
    memory: PeerMemory,
    residual: Tensor,
    parts: Tensor,
    max_spins: int = 0,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor | None:
    """Add the sum of all ranks' ``parts`` to ``residual``, both contiguous.

    ``parts`` [S, *residual's] are summed first, in float32, and their sum is rounded to the residual's dtype
    (:meth:`splitserve.kernels.api.Linear.parts`). With ``norm`` [N], for a residual [T, N]: return it RMS-normalised
    (:class:`splitserve.kernels.api.RmsNorm`) unless its rows are too long for that; otherwise return None.

    All ranks call it (or :func:`two_shot_add`) in the same order, for the same shapes. With ``max_spins`` a rank reads
    a flag at most that many times, after which the result is wrong: for trials only.
    """
    return _launch_with_norm(_one_shot_kernel, memory, residual, parts, max_spins, norm, eps, FLAG_BYTES=FLAG_BYTES)


def flagless_add(
    memory: PeerMemory,
    residual: Tensor,
    parts: Tensor,
    max_spins: int = 0,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor | None:
    """Add without flags; see :func:`one_shot_add`. A sum of negative zeros becomes a positive one."""
    return _launch_with_norm(flagless_kernel, memory, residual, parts, max_spins, norm, eps)


def _launch_with_norm(
    kernel,
    memory: PeerMemory,
    residual: Tensor,
    parts: Tensor,
    max_spins: int,
    norm: Tensor | None,
    eps: float,
    **constants: int,
) -> Tensor | None:
    normed, part = None, _BLOCK
    if norm is not None and norm.shape[0] <= _LONGEST_ROW:
        assert residual.dim() == 2 and norm.shape == residual.shape[1:] and norm.is_contiguous()
        normed, part = torch.empty_like(residual), norm.shape[0]
    block = triton.next_power_of_2(part)
    kernel[(PROGRAMS,)](
        memory.buffers,
        memory.calls,
        residual,
        parts,
        residual.numel(),
        residual if normed is None else norm,
        residual if normed is None else normed,
        eps,
        LENGTH=part,
        HAS_NORM=normed is not None,
        **constants,
        **_launch_options(memory, residual, parts, block, max_spins),
    )
    return normed


def two_shot_add(
    memory: PeerMemory,
    residual: Tensor,
    parts: Tensor,
    max_spins: int = 0,
    norm: Tensor | None = None,  # noqa: ARG001
    eps: float = 0.0,  # noqa: ARG001
) -> None:
    """Add in two shots; see :func:`one_shot_add`. A program has no whole rows, so nothing is normalised."""
    _two_shot_kernel[(PROGRAMS,)](
        memory.buffers,
        memory.calls,
        residual,
        parts,
        residual.numel(),
        FLAG_BYTES=FLAG_BYTES,
        **_launch_options(memory, residual, parts, _BLOCK, max_spins),
    )


def _launch_options(memory: PeerMemory, residual: Tensor, parts: Tensor, block: int, max_spins: int) -> dict[str, Any]:
    """Return the launch options of all kernels. ``block``: elements that a program handles at a time, a power of
    two."""
    assert residual.is_contiguous() and parts.is_contiguous()
    assert residual.shape == parts.shape[1:] and parts.dtype in (residual.dtype, torch.float32)
    assert residual.nbytes <= memory.capacity_bytes
    return {
        "PARTS": parts.shape[0],
        "CAPACITY": memory.capacity_bytes,
        "RANK": memory.rank,
        "SIZE": memory.size,
        "BLOCK": block,
        "NUM_PROGRAMS": PROGRAMS,
        "MAX_SPINS": max_spins,
        "num_warps": min(16, max(1, block // 256)),  # 8 elements a thread, 16 bytes of a narrow dtype
        **overlapped(residual.device),
    }


@triton.jit
def _sum(
    buffers,
    half_at,
    residual,
    parts,
    at,
    inside,
    num_elements,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PUSHED: tl.constexpr,
):
    """Return the residual plus all ranks' summands, at the offsets ``at``, in the residual's dtype.

    ``half_at``: bytes from a buffer's start to its slots. ``PUSHED``: summands are in this rank's buffer; otherwise
    each is in its own rank's.
    """
    total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += summand(parts, at, inside, num_elements, residual, PARTS).to(tl.float32)
        else:
            slot = at_peer(buffers, RANK if PUSHED else rank, half_at + rank * CAPACITY, residual)
            total += tl.load(slot + at, mask=inside, other=0.0).to(tl.float32)
    return total.to(residual.dtype.element_ty)


@triton.jit
def _one_shot_kernel(
    buffers,
    calls,
    residual,
    parts,
    num_elements,
    norm,
    normed,
    eps,
    LENGTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    MAX_SPINS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    program = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    if HAS_NORM:
        weight = tl.load(norm + within, mask=within < LENGTH, other=0.0)
    wait(OVERLAPPED)
    call = tl.load(calls + program)
    half_at = (call & 1) * (SIZE * CAPACITY)  # the counter wraps around
    for first in range(program * LENGTH, num_elements, NUM_PROGRAMS * LENGTH):
        at = first + within
        inside = (within < LENGTH) & (at < num_elements)
        own = summand(parts, at, inside, num_elements, residual, PARTS)
        for step in tl.static_range(1, SIZE):
            slot = at_peer(buffers, (RANK + step) % SIZE, half_at + RANK * CAPACITY, residual)
            tl.store(slot + at, own, mask=inside)
    flags_at = (2 * SIZE + 1) * CAPACITY + program * FLAG_BYTES
    meet(buffers, flags_at, 2 * call + 1, calls, RANK, SIZE, MAX_SPINS)
    for first in range(program * LENGTH, num_elements, NUM_PROGRAMS * LENGTH):
        at = first + within
        inside = (within < LENGTH) & (at < num_elements)
        total = _sum(
            buffers, half_at, residual, parts, at, inside, num_elements, PARTS, CAPACITY, RANK, SIZE, PUSHED=True
        )
        tl.store(residual + at, total, mask=inside)
        if HAS_NORM:
            tl.store(normed + at, normalised(total, weight, eps, LENGTH), mask=inside)
    tl.store(calls + program, call + 1)


@triton.jit
def _two_shot_kernel(
    buffers,
    calls,
    residual,
    parts,
    num_elements,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    MAX_SPINS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait(OVERLAPPED)
    program = tl.program_id(0)
    call = tl.load(calls + program)
    half_at = (call & 1) * (SIZE * CAPACITY)  # the counter wraps around
    results_at = 2 * SIZE * CAPACITY
    length = tl.cdiv(num_elements, 16 * SIZE) * 16  # length of a rank's slice
    published = at_peer(buffers, RANK, half_at + RANK * CAPACITY, residual)
    for step in tl.static_range(1, SIZE):
        start = (RANK + step) % SIZE * length
        end = tl.minimum(start + length, num_elements)
        for first in range(start + program * BLOCK, end, NUM_PROGRAMS * BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < end
            tl.store(published + at, summand(parts, at, inside, num_elements, residual, PARTS), mask=inside)
    flags_at = results_at + CAPACITY + program * FLAG_BYTES
    meet(buffers, flags_at, 2 * call + 1, calls, RANK, SIZE, MAX_SPINS)
    start = RANK * length
    end = tl.minimum(start + length, num_elements)
    for first in range(start + program * BLOCK, end, NUM_PROGRAMS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < end
        total = _sum(
            buffers, half_at, residual, parts, at, inside, num_elements, PARTS, CAPACITY, RANK, SIZE, PUSHED=False
        )
        tl.store(residual + at, total, mask=inside)
        for step in tl.static_range(1, SIZE):
            tl.store(at_peer(buffers, (RANK + step) % SIZE, results_at, residual) + at, total, mask=inside)
    meet(buffers, flags_at, 2 * call + 2, calls, RANK, SIZE, MAX_SPINS)
    results = at_peer(buffers, RANK, results_at, residual)
    for step in tl.static_range(1, SIZE):
        start = (RANK + step) % SIZE * length
        end = tl.minimum(start + length, num_elements)
        for first in range(start + program * BLOCK, end, NUM_PROGRAMS * BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < end
            tl.store(residual + at, tl.load(results + at, mask=inside), mask=inside)
    tl.store(calls + program, call + 1)
