"""The kernel of :func:`.all_reduce.flagless_add`: sums over ranks that don't meet.

Summands are pushed as in one-shot. A slot holds negative zeros before, which are never sent, so its reader recognises
element by element what has arrived. A sender therefore need not wait for its summand to arrive before announcing it.
This takes three parts of the buffer, in rotation. In each call a rank empties the slots that it read in the previous
call. Those are written two calls later, by ranks that received a summand of the call between; the sender of that
summand had finished the call that empties them. The parts and the counters are separate from those of the calls with
flags.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from splitserve.kernels.triton.launch import wait
from splitserve.kernels.triton.operations import normalised
from splitserve.kernels.triton.peer_memory import at_peer, summand


@triton.jit
def _is_empty(values):
    """Return a mask of the negative zeros."""
    if values.dtype.primitive_bitwidth == 16:
        is_empty = values.to(tl.int16, bitcast=True) == -(2**15)
    else:
        is_empty = values.to(tl.int32, bitcast=True) == -(2**31)
    return is_empty


@triton.jit
def _sendable(values):
    return tl.where(_is_empty(values), 0.0, values).to(values.dtype)


@triton.jit
def _arrived(slot, inside, MAX_SPINS: tl.constexpr):
    """Return the elements at ``slot``, once all of them have arrived."""
    values = tl.load(slot, mask=inside, other=0.0, volatile=True)
    missing = tl.max(_is_empty(values).to(tl.int32), 0)
    spins = 0
    while missing > 0:
        values = tl.load(slot, mask=inside, other=0.0, volatile=True)
        missing = tl.max(_is_empty(values).to(tl.int32), 0)
        if MAX_SPINS > 0:
            spins += 1
            missing = tl.where(spins < MAX_SPINS, missing, 0)
    return values


@triton.jit
def flagless_kernel(
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
    MAX_SPINS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    program = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    if HAS_NORM:
        weight = tl.load(norm + within, mask=within < LENGTH, other=0.0)
    wait(OVERLAPPED)
    turn = tl.load(calls + program)  # which of the three parts
    slots_at = turn * (SIZE * CAPACITY)
    for first in range(program * LENGTH, num_elements, NUM_PROGRAMS * LENGTH):
        at = first + within
        inside = (within < LENGTH) & (at < num_elements)
        sent = _sendable(summand(parts, at, inside, num_elements, residual, PARTS))
        for step in tl.static_range(1, SIZE):
            slot = at_peer(buffers, (RANK + step) % SIZE, slots_at + RANK * CAPACITY, residual)
            tl.store(slot + at, sent, mask=inside)
    _empty_last(buffers, calls, turn, residual, CAPACITY, RANK, SIZE, BLOCK, NUM_PROGRAMS)
    for first in range(program * LENGTH, num_elements, NUM_PROGRAMS * LENGTH):
        at = first + within
        inside = (within < LENGTH) & (at < num_elements)
        total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                total += _sendable(summand(parts, at, inside, num_elements, residual, PARTS)).to(tl.float32)
            else:
                slot = at_peer(buffers, RANK, slots_at + rank * CAPACITY, residual)
                total += _arrived(slot + at, inside, MAX_SPINS).to(tl.float32)
        total = total.to(residual.dtype.element_ty)
        tl.store(residual + at, total, mask=inside)
        if HAS_NORM:
            tl.store(normed + at, normalised(total, weight, eps, LENGTH), mask=inside)
    tl.debug_barrier()  # all threads have read them
    tl.store(calls + program, (turn + 1) % 3)
    tl.store(calls + NUM_PROGRAMS + program, num_elements)


@triton.jit
def _empty_last(
    buffers,
    calls,
    turn,
    like,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
):
    """Empty this program's share of the slots that were read in the previous call, whichever program read them."""
    program = tl.program_id(0)
    num_elements = tl.cdiv(tl.load(calls + NUM_PROGRAMS + program), 16) * 16  # elements after the last one are empty
    if like.dtype.element_ty.primitive_bitwidth == 16:
        empty = tl.full((BLOCK,), -(2**15), tl.int16).to(like.dtype.element_ty, bitcast=True)
    else:
        empty = tl.full((BLOCK,), -(2**31), tl.int32).to(like.dtype.element_ty, bitcast=True)
    slots_at = (turn + 2) % 3 * (SIZE * CAPACITY)
    for first in range(program * BLOCK, num_elements, NUM_PROGRAMS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        for step in tl.static_range(1, SIZE):
            slot = at_peer(buffers, RANK, slots_at + (RANK + step) % SIZE * CAPACITY, like)
            tl.store(slot + at, empty, mask=at < num_elements)
